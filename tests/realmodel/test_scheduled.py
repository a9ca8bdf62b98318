"""Served by the scheduler on a device that is too small for all: whoever was suspended goes on with the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import pagedkv as pk
from tests.realmodel.bed import Bed

Open = Callable[..., pk.KVCache]


CASES = [("tiny_beds", 1, 12), ("tiny_beds", 1, 100), ("tiny_beds", 8, 12), ("tiny_beds", 8, 100)]


@pytest.mark.parametrize("host", [True, False], ids=["swapped", "recomputed"])
@pytest.mark.parametrize(
    ("beds", "size", "budget"), [*CASES, pytest.param("smollm2_bed", 16, 30, marks=pytest.mark.realmodel)]
)
def test_suspended_requests_go_on_with_the_same_tokens(
    request: pytest.FixtureRequest, opened: Open, host: bool, beds: str, size: int, budget: int
) -> None:
    """Every logit is compared with the golden ones, in steps that mix chunks of prompts with decoding."""
    found = request.getfixturevalue(beds)
    bed: Bed = found[size] if isinstance(found, dict) else found
    names = ("single", "france", "code")  # short prompts and long continuations: all begin, and not all can end
    lengths = {name: (len(bed.goldens[name].ids), len(bed.goldens[name].greedy)) for name in names}
    room = max(bed.blocks(ids + greedy) for ids, greedy in lengths.values()) * bed.block_size
    cache = opened(bed, room, **({"host": bed.blocks(4 * room)} if host else {}))
    options = pk.SchedulerOptions(max_running=len(names), max_batch_tokens=budget, watermark=0.0)
    scheduler = pk.Scheduler(cache, options)
    requests = {scheduler.submit(bed.so_far(name), lengths[name][1]): name for name in names}
    suspended = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        with scheduler.step(plan) as step:
            logits = bed.model.forward(step, plan.last_tokens)
        tokens = []
        for branch, row in zip(plan.lanes, logits, strict=True):
            name, place = requests[branch.request], branch.num_output
            bed.check(name, place, row)
            tokens.append(bed.goldens[name].greedy[place])
        scheduler.report(plan, tokens)
        suspended += scheduler.stats().suspended
        scheduler.check_integrity()
    assert suspended
    for served, name in requests.items():
        assert served.outputs[0].tolist() == bed.goldens[name].greedy
