"""How many calls of the core a prompt costs.

Each call takes the mutex that all threads of a cache share.
"""

from __future__ import annotations

import pytest

import pagedkv as pk

from .conftest import BLOCK, Toy, prompt


@pytest.mark.parametrize("options", [{}, {"host": 8}, {"host": 8, "disk": 20}], ids=["one tier", "two", "three"])
@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "hazard"])
def test_a_device_hit_takes_the_core_four_times_at_most(open_cache, options, policy):
    toy = Toy(open_cache(16, policy=policy, **options))
    toy.use(prompt(1))
    core, learns = toy.cache.placement, policy == "hazard"
    for tokens in (prompt(1), prompt(1)[: 2 * BLOCK + 1], prompt(5)):
        before = core.num_locked
        seq = toy.cache.sequence(tokens)
        calls = core.num_locked - before
        assert calls <= (4 if seq.num_computed or not learns else 5), tokens
        before = core.num_locked
        seq.release()
        assert core.num_locked - before == (3 if learns else 1), "its time, its output, what is learned at its end"
    before = core.num_locked
    with toy.cache.sequence([*prompt(1)[: 2 * BLOCK], *prompt(1)[2 * BLOCK : -2], 7, 8, 9]) as seq:
        assert seq.hit_tokens["partial"], "a block is copied: its own block, and the row's"
        assert core.num_locked - before <= (8 if learns or "disk" in options else 7), "a disk's rule asks for requests"


@pytest.mark.parametrize(("policy", "plan_calls"), [("lru", 13), ("hazard", 14)])
def test_the_calls_of_a_hit_that_a_scheduler_plans(open_cache, policy, plan_calls):
    """Its match and its row, and the scheduler's books: rows, room, tokens to compute."""
    toy = Toy(open_cache(16, policy=policy))
    toy.use(prompt(1))
    core = toy.cache.placement
    scheduler = pk.Scheduler(toy.cache)
    request = scheduler.submit(prompt(1), 2)
    before = core.num_locked
    plan = scheduler.schedule()
    assert core.num_locked - before <= plan_calls
    assert sum(plan.sequences[0].hit_tokens.values()) > 0
    for calls in (2, 1):  # a decode step, then nothing to do
        with scheduler.step(plan) as step:
            toy.write(step, *plan.sequences)
        scheduler.report(plan, [5] * len(plan.lanes))
        before = core.num_locked
        plan = scheduler.schedule()
        assert core.num_locked - before <= calls
    assert request.ended
