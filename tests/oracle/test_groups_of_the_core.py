"""The core over groups of layers is the model's equal, and no read of any layer is wrong.

Where some boundaries need nothing, and in a third of the other runs, the core is alone: every read and the auditor are
checked, and hits are not compared. Not covered: tiers below the device (tests/core/test_tails_between_tiers.py has
them); two threads at once.
"""

from __future__ import annotations

import pytest

from tests.oracle.groups_play import MIXES, alone, beside_the_model, has_free_boundaries

MOVES = 400
SEEDS = range(1000, 1000 + 100_000 // MOVES)


def of_a_mix(name: str, seed: int, moves: int, check_every: int) -> tuple[int, int]:
    """Beside the model where it keeps the same points, else alone; each third seed alone."""
    play = alone if has_free_boundaries(MIXES[name]) or seed % 3 == 0 else beside_the_model
    return play(MIXES[name], seed, moves, check_every)


@pytest.mark.parametrize("name", MIXES)
def test_the_core_over_groups_is_the_models_equal(name: str) -> None:
    asked, hit = map(sum, zip(*(of_a_mix(name, seed, 120, 1) for seed in range(6)), strict=True))
    assert 0.05 * asked < hit < asked


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
def test_a_million_moves_over_groups_agree(name: str) -> None:
    asked, hit = map(sum, zip(*(of_a_mix(name, seed, MOVES, 20) for seed in SEEDS), strict=True))
    assert 0.05 * asked < hit < asked
