"""Latencies of a scheduler by its own clock: queue, first token, token."""

from __future__ import annotations

import pytest

from pagedkv.observe.latency import BOUNDS_S, Histogram

from .conftest import prompt


def totals(server):
    """Observations and seconds of each histogram."""
    latency = server.scheduler.stats().latency
    return {name: (one.count, one.total_s) for name, one in latency.items()}


def turns(server, count, seconds):
    """Steps that take so long each: the clock is between the plan and the report."""
    for _ in range(count):
        plan = server.scheduler.schedule()
        server.compute(plan)
        server.now += seconds
        server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])


def test_queue_first_token_and_tokens_are_timed(serve):
    server = serve(max_running=1, max_batch_tokens=64)
    a = server.submit(prompt(1), 4)
    server.now = 3.0
    b = server.submit(prompt(2), 2)
    turns(server, 4, 0.5)
    assert totals(server) == {"queue": (1, 3.0), "first_token": (1, 3.5), "token": (3, 1.5)}
    assert (a.submitted_s, a.began_s, a.first_token_s) == (0.0, 3.0, 3.5)
    assert (b.submitted_s, b.began_s, b.first_token_s) == (3.0, None, None)
    turns(server, 2, 0.5)
    assert totals(server) == {"queue": (2, 5.0), "first_token": (2, 6.0), "token": (4, 2.0)}


def test_every_lane_of_a_step_counts_and_idle_time_counts_for_none(serve):
    server = serve(max_batch_tokens=64)
    for i in range(3):
        server.submit(prompt(i), 3)
    turns(server, 3, 1.0)
    server.now += 1000.0
    server.submit(prompt(9), 2)
    turns(server, 2, 1.0)
    assert totals(server) == {"queue": (4, 0.0), "first_token": (4, 4.0), "token": (7, 7.0)}


def test_tokens_of_a_draft_share_their_time(serve):
    server = serve(max_batch_tokens=64)
    request = server.submit(prompt(1), 9)
    turns(server, 1, 1.0)
    server.scheduler.draft(request, [server.choose(request.branches[0])])
    turns(server, 1, 1.0)
    assert totals(server)["token"] == (2, 1.0)


def test_samples_have_one_first_token_each_request(serve):
    server = serve(100, max_batch_tokens=64)
    server.submit(prompt(1), 3, n=3)
    turns(server, 3, 1.0)
    assert totals(server) == {"queue": (1, 0.0), "first_token": (1, 1.0), "token": (6, 6.0)}


@pytest.mark.parametrize(("device", "branches"), [(12, {}), (14, {"n": 2})])
def test_a_suspension_counts_in_the_time_of_the_token_after_it(serve, device, branches):
    server = serve(device, watermark=0.0)
    server.submit(prompt(1, 9), 40)
    request = server.submit(prompt(2, 13), 14, **branches)
    total = count = 0
    last = {}
    while server.scheduler.has_work:
        plan = server.scheduler.schedule()
        server.compute(plan)
        server.now += 1.0
        server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
        for _, tokens, parent in plan.new_tokens:
            if parent in last:
                total, count = total + server.now - last[parent], count + len(tokens)
        for branch, _, _ in plan.new_tokens:
            last[branch] = server.now
    assert request.num_preemptions
    assert totals(server)["token"] == (count, total)


def test_a_clock_that_goes_back_makes_no_negative_time():
    histogram = Histogram()
    histogram.observe(-5.0)
    assert (histogram.read().count, histogram.read().total_s) == (1, 0.0)


def test_a_histogram_counts_by_upper_bound():
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, 0.3, 1e9):
        histogram.observe(seconds)
    histogram.observe(0.3, 4)
    read = histogram.read()
    assert (read.counts[0], read.counts[1], read.counts[-1], read.count) == (2, 1, 1, 9)
    named = dict(read.cumulative())
    assert [named[bound] for bound in ("1e-05", "2e-05", "0.2", "0.5", "100", "+Inf")] == [2, 3, 3, 8, 8, 9]
    assert read.mean_s == pytest.approx((5 * 0.3 + 1e9 + BOUNDS_S[0] * 2.01) / 9)
