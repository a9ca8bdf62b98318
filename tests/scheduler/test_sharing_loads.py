"""Requests that load and share: they follow each other once their loads are over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pagedkv.scheduler import Plan, SchedulerOptions
from tests.held_storage import held_cache

from .conftest import BLOCK, SPEC, prompt
from .test_loading import LONG, MOST, World, cold, right

TAIL = 12  # tokens behind a cold prefix that several requests have in common
WHOLE = (LONG * BLOCK + 1 + TAIL) // BLOCK  # blocks that they have in common


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    """Opens worlds whose prompt 1 is cold, beside a request that runs."""
    with ExitStack() as stack:

        def open_it(**options: Any) -> World:
            cache, storage = stack.enter_context(held_cache(SPEC, run=1, device=64, host=200))
            one = World(cache, storage, SchedulerOptions(8, 64, watermark=0.0, **options))
            one.cool(1)
            one.submit(prompt(5), 20)
            one.turn()
            return one

        yield open_it


def with_tail(own: int) -> list[int]:
    """A prompt that begins as ``cold(1)`` does, and then as all of these do."""
    return [*cold(1), *prompt(7, TAIL), own]


def planned(one: World) -> Plan:
    """The next plan, after it was run and reported."""
    plan = one.scheduler.schedule()
    one.compute(plan)
    one.scheduler.report(plan, [one.choose(branch) for branch in plan.lanes])
    one.scheduler.check_integrity()
    return plan


@pytest.mark.parametrize("arrived", [0, 2])
def test_a_request_that_comes_while_another_loads_its_prefix_follows_it_when_it_runs(world, arrived):
    one = world(loading_share=0.9)
    leads = one.submit(with_tail(1), 3)
    one.turn()
    one.storage.arrive(arrived)
    one.turn()
    follows = [one.submit(with_tail(own), 3) for own in (2, 3)]
    one.turn()
    assert {request.state for request in (leads, *follows)} == {"loading"}
    one.storage.arrive()
    plan = planned(one)
    assert plan.batch.follow.tolist() == [[2, 1, WHOLE], [3, 1, WHOLE]]
    assert plan.shared_tokens == 2 * (WHOLE - LONG) * BLOCK
    one.finish()
    assert all(map(right, (leads, *follows)))
    assert one.storage.read == LONG, "it is loaded once"


@pytest.mark.parametrize("share", ["step", "next"])
@pytest.mark.parametrize("k", range(LONG))
def test_blocks_that_a_load_does_not_bring_are_computed_once_for_all_who_wanted_them(world, share, k):
    one = world(loading_share=0.9, share=share)
    requests = [one.submit(with_tail(own), 3) for own in range(3)]
    one.turn()
    one.storage.arrive(k)
    one.storage.arrive(ok=False)
    computed = 0
    for _ in range(MOST):
        if all(request.branches[0].num_output for request in requests):
            break
        plan = planned(one)
        one.storage.arrive(ok=False)
        prompts = [i for i, seq in enumerate(plan.sequences) if seq.num_tokens > len(prompt(5)) + 20]
        computed += int(plan.q_lens[prompts].sum())
    one.finish(lambda: one.storage.arrive(ok=False))
    assert all(map(right, requests))
    lacking = len(with_tail(0)) - k * BLOCK
    assert computed <= lacking + 2 * (len(with_tail(0)) - WHOLE * BLOCK) + 3
