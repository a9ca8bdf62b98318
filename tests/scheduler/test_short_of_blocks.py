"""What the scheduler does when blocks or rows run out: it suspends, waits, or refuses."""

from __future__ import annotations

import pytest

import pagedkv as pk

from .conftest import BLOCK, greedy, prompt


@pytest.mark.parametrize("host", [None, 100], ids=["recompute", "swap"])
def test_when_blocks_run_out_the_last_is_suspended_and_comes_to_the_same(serve, host):
    server = serve(12, host=host, watermark=0.0)
    requests = [server.submit(prompt(i, 4), 20) for i in range(4)]
    server.run()
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]
    stats = server.scheduler.stats()
    assert stats.preempted_by_swap + stats.preempted_by_recompute > 0
    assert requests[0].num_preemptions == 0, "the first of them never gives way"
    assert {request.preempted_by for request in requests} <= ({None, "swap"} if host else {None, "recompute"})


def test_swapped_blocks_come_back_from_the_host(serve):
    server = serve(12, host=100, watermark=0.0)
    for i in range(4):
        server.submit(prompt(i, 4), 20)
    server.run()
    moved = server.cache.stats().moved_bytes
    assert moved.get("device_to_host", 0) > 0
    assert moved.get("host_to_device", 0) > 0


def test_measured_costs_decide_between_swapping_and_computing_again(serve):
    for load_s, how in ((1e-6, "swap"), (10.0, "recompute")):
        server = serve(12, host=100, watermark=0.0)
        server.cache.costs.observe_prefill(1000, 1.0)
        server.cache.costs.observe_load(1, server.cache.spec.block_bytes, load_s)
        requests = [server.submit(prompt(i, 4), 20) for i in range(4)]
        while not server.scheduler.stats().suspended:
            server.turn()
        assert {request.preempted_by for request in requests if request.state == "suspended"} == {how}
        server.run()
        assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


@pytest.mark.parametrize(("how", "load_s"), [("swap", 10.0), ("recompute", 1e-6)])
def test_how_to_suspend_can_be_decided_against_what_was_measured(serve, how, load_s):
    server = serve(12, host=100, watermark=0.0, preemption=how)
    server.cache.costs.observe_prefill(1000, 1.0)
    server.cache.costs.observe_load(1, server.cache.spec.block_bytes, load_s)
    requests = [server.submit(prompt(i, 4), 20) for i in range(4)]
    server.run()
    stats = server.scheduler.stats()
    counts = {"swap": stats.preempted_by_swap, "recompute": stats.preempted_by_recompute}
    assert counts.pop(how) > 0
    assert set(counts.values()) == {0}
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_a_way_to_suspend_that_does_not_exist_is_refused():
    with pytest.raises(pk.InvalidArgument, match=r"preemption must be one of \('measured'"):
        pk.SchedulerOptions(preemption="cost")


def test_with_worst_case_admission_nobody_is_ever_suspended(serve):
    server = serve(12, admission="worst_case")
    requests = [server.submit(prompt(i, 4), 20) for i in range(6)]
    server.run()
    stats = server.scheduler.stats()
    assert stats.preempted_by_swap == stats.preempted_by_recompute == 0
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_the_watermark_leaves_room_for_those_that_run(serve):
    preemptions = []
    for watermark in (0.0, 0.5):
        server = serve(20, watermark=watermark)
        for i in range(6):
            server.submit(prompt(i, 8), 12)
        server.run()
        stats = server.scheduler.stats()
        preemptions.append(stats.preempted_by_swap + stats.preempted_by_recompute)
    assert preemptions[1] < preemptions[0]


def test_a_request_of_exactly_the_device_runs_and_one_token_more_is_refused(serve):
    server = serve(5)
    fits = server.submit(prompt(1, 9), 5 * BLOCK - 9 + 1)
    other = server.submit(prompt(2, 4), 2)
    server.run()
    assert fits.outputs[0].tolist() == greedy(fits)
    assert other.outputs[0].tolist() == greedy(other)
    with pytest.raises(pk.RequestTooLarge, match=r"6 blocks on the device, and there are 5 in all") as caught:
        server.submit(prompt(1, 9), 5 * BLOCK - 9 + 2)
    assert (caught.value.asked, caught.value.capacity) == (6, 5)
    assert not server.scheduler.has_work


@pytest.mark.parametrize(("n", "beams"), [(9, 1), (1, 9)])
def test_more_branches_than_may_run_are_refused(serve, n, beams):
    server = serve(400)
    with pytest.raises(pk.RequestTooLarge, match="9 sequences"):
        server.submit(prompt(1), 4, n=n, beams=beams)


@pytest.mark.parametrize("branches", [{"n": 3}, {"beams": 3}], ids=["samples", "beams"])
def test_branches_of_exactly_the_device_run(serve, branches):
    need = 9 // BLOCK + 3 * (-(-(9 + 12 - 1) // BLOCK) - 9 // BLOCK + 1)
    server = serve(need)
    request = server.submit(prompt(1, 9), 12, **branches)
    other = server.submit(prompt(2, 9), 12)
    server.run()
    assert [len(out) for out in request.outputs] == [12] * 3
    assert other.outputs[0].tolist() == greedy(other)
    with pytest.raises(pk.RequestTooLarge):
        serve(need - 1).submit(prompt(1, 9), 12, **branches)


def test_with_room_for_one_prompt_the_second_waits_until_the_first_has_its_blocks(serve):
    server = serve(13, max_batch_tokens=64, watermark=0.0)
    requests = [server.submit(prompt(i, 8 * BLOCK), 3) for i in range(2)]
    server.turn()
    assert [request.state for request in requests] == ["running", "waiting"], "8 of 13 blocks are spoken for"
    server.run()
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_an_opening_that_finds_no_room_counts_no_prompt_and_no_hit(serve):
    server = serve(4, max_running=8, share="never")
    shared = prompt(1, BLOCK)
    rest = ((2, BLOCK - 1), (3, BLOCK + 1), (4, 1))
    requests = [server.submit([*shared, *prompt(i, n)], 1 if i == 4 else 3) for i, n in rest]
    server.run()
    stats = server.cache.stats()
    assert server.scheduler.stats().preempted_by_recompute == 0
    assert stats.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert sum(stats.hit_tokens.values()) == sum(sum(request.hit_tokens.values()) for request in requests) > 0
