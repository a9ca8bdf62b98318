"""Worlds of the proof *progress* that once did not end."""

from __future__ import annotations

import pytest

from tests.reliability import small_store as small
from tests.reliability.progress_world import World
from tests.reliability.proof import Tally


@pytest.mark.parametrize("seed", [953, 1037, 10411])  # of 1,400, those that stalled in 10 of 10 runs
def test_worlds_in_which_branches_came_back_apart_end(seed: int) -> None:
    tally = Tally()
    with small.quiet():
        World(seed, tally).run(150)
    assert not tally.wrong, tally.first_wrong
