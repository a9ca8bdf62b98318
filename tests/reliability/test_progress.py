"""What the proof *progress* must meet does not depend on its seed."""

from __future__ import annotations

from random import Random

import pytest

from tests.reliability.progress_shape import Shape
from tests.reliability.proofs.progress import run


@pytest.mark.parametrize("seed", [31, 32])
def test_another_thread_is_in_the_first_world_and_unjust_refusals_are_a_count(seed):
    tally = run(1, seed, lambda n: None)
    assert not tally.wrong, tally.first_wrong
    assert tally.found["sequences of the other thread"] > 0
    assert tally.found["unjust refusals"] == 0


def test_a_world_that_must_have_another_thread_is_otherwise_as_its_seed_says():
    free = [Shape(Random(seed), None) for seed in range(40)]
    forced = [Shape(Random(seed), None, True) for seed in range(40)]
    assert not all(shape.has_visitor for shape in free)
    assert all(shape.has_visitor for shape in forced)
    assert [shape.options for shape in forced] == [shape.options for shape in free]
