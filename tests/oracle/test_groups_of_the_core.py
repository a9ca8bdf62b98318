"""The core over groups of layers is the model's equal, and no read of any layer is wrong.

In the moves beside the model hits, shortages and pages in use are compared after each move. The moves of the core alone
are all that it knows (forks, truncation, drafts, two namespaces, quotas, several pages to an extent): there every read
and the auditor are checked, and hits are not compared. Not covered: tiers below the device
(tests/core/test_tails_between_tiers.py has them); two threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.oracle.groups_play import MIXES, alone, beside_the_model

MOVES = 400
SEEDS = range(1000, 1000 + 100_000 // MOVES)


def sums(played: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Tokens asked for and hit."""
    asked, hit = map(sum, zip(*played, strict=True))
    return asked, hit


@pytest.mark.parametrize("name", MIXES)
def test_the_core_over_groups_is_the_models_equal(name: str) -> None:
    asked, hit = sums(beside_the_model(MIXES[name], seed, 120) for seed in range(5))
    assert 0.05 * asked < hit < asked


@pytest.mark.parametrize("name", MIXES)
def test_whatever_the_core_over_groups_reads_is_right(name: str) -> None:
    asked, hit = sums(alone(MIXES[name], seed, 120) for seed in range(8))
    assert 0.05 * asked < hit < asked


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
def test_a_million_moves_over_groups_agree(name: str) -> None:
    asked, hit = sums(beside_the_model(MIXES[name], seed, MOVES, 20) for seed in SEEDS)
    assert 0.05 * asked < hit < asked


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
def test_all_moves_of_the_core_over_groups_read_right(name: str) -> None:
    asked, hit = sums(alone(MIXES[name], seed, MOVES, 20) for seed in SEEDS[::3])
    assert 0.05 * asked < hit < asked
