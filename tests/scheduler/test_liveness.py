"""What stopped the scheduler.

Branches that lost their common blocks, prefetches, and blocks that others hold.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.scheduler import Branch, Request, running

from .conftest import Server, greedy, prompt

HANGS_S = 60.0  # only tells a hang


def outputs_are_right(request: Request) -> bool:
    expected = sorted(greedy(request, first) for first in range(request.width))
    return request.state == "finished" and sorted(out.tolist() for out in request.outputs) == expected


def run_to_the_end(server: Server, *requests: Request) -> None:
    """As ``server.run()``, beside sequences of others."""
    for _ in range(500):
        if all(request.ended for request in requests):
            return
        server.turn()
    raise AssertionError(f"still at work: {server.scheduler.stats()}")


def suspended_by_another(server: Server, request: Request) -> None:
    """Run until a better placed request has taken the device from this one.

    The better placed request is then finished.
    """
    for _ in range(6):
        server.turn()
    urgent = server.submit(prompt(9, 40), 2, priority=100)
    run_to_the_end(server, urgent)
    assert request.num_preemptions == 1


@pytest.mark.parametrize("host", [None, 40], ids=["one tier", "two tiers"])
@pytest.mark.parametrize("branches", [{"n": 2}, {"beams": 2}], ids=["samples", "beams"])
def test_branches_share_their_prompt_again_although_a_quota_keeps_it_out_of_the_tree(serve, host, branches):
    server = serve(16, host=host, max_running=4, max_batch_tokens=64, watermark=0.0)
    small = pk.Namespace(tenant="small")
    server.cache.set_quota(small, pk.Blocks(1))
    request = server.submit(range(27), 8, namespace=small, **branches)
    assert request.worst_blocks == 14, "17 if its branches held the prompt's six whole blocks twice"
    suspended_by_another(server, request)
    others = [server.submit(prompt(i, 5), 2) for i in range(5)]
    server.run()
    assert outputs_are_right(request)
    assert all(outputs_are_right(other) for other in others)


@pytest.mark.parametrize("purged_after", range(3))
def test_branches_share_their_prompt_again_when_it_is_purged_while_they_come_back(serve, purged_after):
    server = serve(14, max_running=4, max_batch_tokens=64, watermark=0.0)
    request = server.submit(range(27), 8, n=2)
    assert request.worst_blocks == 14
    suspended_by_another(server, request)
    for _ in range(purged_after):
        server.turn()
    server.cache.purge(None)
    server.run()
    assert outputs_are_right(request)
    assert request.num_preemptions == 1


def test_forked_again_branches_hold_each_common_block_once(serve):
    server = serve(60, max_running=4, max_batch_tokens=64)
    small = pk.Namespace(tenant="small")
    server.cache.set_quota(small, pk.Blocks(1))
    request = server.submit(range(27), 8, n=3, namespace=small)
    for _ in range(3):
        server.turn()
    server.scheduler._running.suspend(request)
    before = server.cache.stats().computed_tokens
    while any(branch.seq is None for branch in request.live()):
        server.turn()
    rows = [branch.seq.blocks.tolist() for branch in request.live()]
    assert all(row[:6] == rows[0][:6] for row in rows), "the prompt's whole blocks"
    computed = server.cache.stats().computed_tokens - before
    assert computed <= 27 + 3 * 4, "the prompt once, and what each branch generated"
    server.run()
    assert outputs_are_right(request)


def test_branches_that_share_less_than_they_could_come_back_once_more(serve, monkeypatch):
    server = serve(14, max_running=4, max_batch_tokens=64, watermark=0.0)
    request = server.submit(range(27), 8, n=2)
    suspended_by_another(server, request)
    shared, apart = running.reopen, []

    def reopen_apart(cache: pk.KVCache, branch: Branch, must: bool, waits: bool) -> pk.Sequence | None:
        if apart:
            return shared(cache, branch, must, waits)
        apart.append(branch)
        cache.purge(None)
        return cache.sequence(branch.saved)

    monkeypatch.setattr(running, "reopen", reopen_apart)
    server.run()
    assert request.num_preemptions == 2
    assert outputs_are_right(request)


def test_a_request_whose_second_branch_finds_no_room_waits_for_another_step(serve, monkeypatch):
    server = serve(16, host=40, max_running=4, max_batch_tokens=64, watermark=0.0, loading_share=0)
    request = server.submit(prompt(1, 12), 20, n=2)
    for _ in range(13):  # 25 tokens: all but the last are in whole blocks, so its first branch comes back at once
        server.turn()
    urgent = server.submit(prompt(2, 33), 4, priority=100)
    server.turn()
    starts: list[Request] = []

    def start(one: Request, promised: int, **how: bool) -> int:
        starts.append(one)
        assert len(starts) < 100, "it is begun and suspended again and again in one step"
        return begin(one, promised, **how)

    begin = server.scheduler._running.start
    monkeypatch.setattr(server.scheduler._running, "start", start)
    small = server.submit(prompt(3, 2), 1)  # that a request comes makes admission try again
    server.turn()
    assert starts[0] is request
    monkeypatch.undo()
    run_to_the_end(server, request, urgent, small)
    assert all(outputs_are_right(one) for one in (request, urgent, small))


class Halt:
    """A hook that stops the thread of prefetches at a point until it is told to go on."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.reached, self.go = threading.Event(), threading.Event()

    def begin(self, span: Any) -> None:
        self._halt(f"begin {span.name}")

    def end(self, span: Any, _: object) -> None:
        self._halt(f"end {span.name}")

    def _halt(self, point: str) -> None:
        if point == self.at and threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.go.wait(HANGS_S)


def in_the_host(server: Server, tokens: list[int]) -> None:
    """Cache this prompt, then have all of the device needed, so that it lies in the host tier."""
    server.submit(tokens, 1)
    server.run()
    server.submit(prompt(8, 4 * server.cache.placement.pools[0].max_blocks - 1), 1)
    server.run()
    assert server.cache.explain(tokens).cached_tokens == 16


def soon(act: Callable[[], object]) -> None:
    """Do something while this thread waits, or before; the result is the same."""
    threading.Timer(0.1, act).start()


def test_a_plan_waits_for_a_prefetch_that_is_about_to_let_go(serve):
    server = serve(8, host=16, max_running=2, max_batch_tokens=64, watermark=0.0)
    ahead = prompt(7, 17)
    in_the_host(server, ahead)
    request = server.submit(prompt(1, 12), 12)
    for _ in range(3):  # its fourth block has room for three more tokens, the step after them needs a fifth
        server.turn()
    halt = Halt("end promote")
    server.cache.hooks.add(halt)
    ticket = server.cache.prefetch(ahead)
    assert halt.reached.wait(HANGS_S), "the prefetch holds what came up, and nothing moves"
    soon(halt.go.set)
    server.run()
    assert ticket.wait(HANGS_S) == 16
    assert outputs_are_right(request)


def test_a_prefetch_under_way_takes_nothing_that_a_plan_has_claimed_meanwhile(serve):
    server = serve(8, host=16, max_running=2, max_batch_tokens=64, watermark=0.0)
    ahead = prompt(7, 17)
    in_the_host(server, ahead)
    starts, holds = Halt("begin promote"), Halt("end promote")
    server.cache.hooks.add(starts)
    server.cache.hooks.add(holds)
    ticket = server.cache.prefetch(ahead)
    assert starts.reached.wait(HANGS_S)
    request = server.submit(prompt(1, 23), 4)
    plan = server.scheduler.schedule()
    assert plan.num_tokens == 23
    starts.go.set()
    assert holds.reached.wait(HANGS_S), "six blocks are planned, two are left, and it needs four"
    soon(holds.go.set)
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert ticket.wait(HANGS_S) == 0
    assert outputs_are_right(request)


def test_a_prefetch_leaves_the_blocks_that_a_plan_is_about_to_use(serve):
    server = serve(8, host=16, max_running=2, max_batch_tokens=64, watermark=0.0)
    ahead = prompt(7, 17)
    in_the_host(server, ahead)
    request = server.submit(prompt(1, 23), 4)
    plan = server.scheduler.schedule()
    assert server.cache.prefetch(ahead).wait(HANGS_S) == 0, "it needs four, and six of eight are planned"
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert outputs_are_right(request)
    assert server.cache.prefetch(ahead).wait(HANGS_S) == 16, "once nothing runs, it may have them"


def test_schedulers_speak_for_what_each_of_them_plans_and_for_nothing_once_they_are_gone(serve):
    server = serve(8, host=16, max_running=2, max_batch_tokens=64, watermark=0.0)
    moves = server.cache.moves
    other = pk.Scheduler(server.cache, server.scheduler.options)
    server.submit(prompt(1, 11), 4)
    other.submit(prompt(2, 7), 2)
    plans = [server.scheduler.schedule(), other.schedule()]
    assert [plan.num_tokens for plan in plans] == [11, 7]
    assert moves.spoken_for == 5
    other.cancel(plans.pop())
    assert moves.spoken_for == 3
    other.schedule()
    assert moves.spoken_for == 5
    del other
    gc.collect()
    assert moves.spoken_for == 3, "a scheduler that is gone uses nothing"
    server.compute(plans[0])
    server.scheduler.report(plans[0], [server.choose(branch) for branch in plans[0].lanes])
    assert moves.spoken_for == 0, "nor does a plan that is reported"


def held_by_others(server: Server, num_blocks: int) -> pk.Sequence:
    seq = server.cache.sequence(prompt(6, 4 * num_blocks))
    with server.cache.step([seq]) as step:
        step.mark_written(0)
    return seq


def test_a_request_that_does_not_fit_beside_what_others_hold_lets_those_go_first_that_do(serve):
    server = serve(12, max_running=4, max_batch_tokens=64, watermark=0.0)
    others = held_by_others(server, 6)
    large = server.submit(prompt(1, 40), 4)
    small = [server.submit(prompt(i, 5), 4) for i in range(2, 5)]
    run_to_the_end(server, *small)
    with pytest.raises(pk.OutOfBlocks):
        server.scheduler.schedule()
    assert not large.ended
    others.release()
    server.run()
    assert all(outputs_are_right(request) for request in [large, *small])


def test_a_request_that_has_begun_steps_aside_too_when_others_take_what_it_needs(serve):
    server = serve(12, max_running=1, max_batch_tokens=64, watermark=0.0)
    large = server.submit(prompt(1, 15), 30)
    server.turn()
    small = server.submit(prompt(2, 5), 4)
    others = held_by_others(server, 7)
    run_to_the_end(server, small)
    assert large.state == "suspended"
    others.release()
    server.run()
    assert outputs_are_right(large)
    assert outputs_are_right(small)


def test_a_request_of_several_branches_lets_others_go_first_while_the_sequences_are_held(serve):
    server = serve(60, max_running=4, max_batch_tokens=64, cache_options={"max_sequences": 4})
    others = [server.cache.sequence([i]) for i in range(2)]
    wide = server.submit(prompt(1, 9), 4, n=3)
    small = server.submit(prompt(2, 9), 4)
    run_to_the_end(server, small)
    with pytest.raises(pk.InvalidArgument, match="others than the scheduler hold 2"):
        server.scheduler.schedule()
    for seq in others:
        seq.release()
    server.run()
    assert outputs_are_right(wide)


def test_no_request_begins_in_a_sequence_that_the_samples_of_another_will_need(serve):
    server = serve(60, max_running=4, max_batch_tokens=64, cache_options={"max_sequences": 4})
    with server.cache.sequence([1]):
        wide, small = server.submit(prompt(1, 9), 4, n=3), server.submit(prompt(2, 9), 4)
        run_to_the_end(server, wide, small)
    assert outputs_are_right(wide)
    assert outputs_are_right(small)


def test_a_request_gives_way_where_others_took_the_sequences_that_better_placed_samples_need(serve):
    server = serve(60, max_running=4, max_batch_tokens=12, cache_options={"max_sequences": 4})
    small = server.submit(prompt(2, 4), 8, priority=0)
    server.turn()
    wide = server.submit(prompt(1, 16), 4, n=3, priority=100)
    server.turn()
    assert wide.branches[0].num_output == 0
    with server.cache.sequence([1]):
        run_to_the_end(server, wide, small)
    assert small.num_preemptions == 1
    assert outputs_are_right(wide)
    assert outputs_are_right(small)


def test_a_request_takes_its_turn_again_as_soon_as_others_leave_room_for_it(serve):
    server = serve(12, max_running=1, max_batch_tokens=64, watermark=0.0)
    others = held_by_others(server, 6)
    large = server.submit(prompt(1, 40), 4)
    small = [server.submit(prompt(i, 5), 4) for i in range(2, 5)]
    server.turn()
    assert small[0].state == "running"
    others.release()
    run_to_the_end(server, large)
    assert [request.ended for request in small] == [True, False, False]
    server.run()


@pytest.mark.parametrize("order", ["first_come", "longest_prefix"])
def test_requests_that_stepped_aside_can_be_aborted_and_expire(serve, order):
    server = serve(12, max_running=1, max_batch_tokens=64, watermark=0.0, order=order)
    others = held_by_others(server, 6)
    large = [server.submit(prompt(i, 40), 4, deadline_s=wait) for i, wait in ((1, None), (2, 2.0), (3, None))]
    small = [server.submit(prompt(i, 5), 2) for i in range(10, 15)]
    server.turn()
    server.scheduler.abort(large[0])
    server.now = 3.0
    run_to_the_end(server, *small)
    assert [request.state for request in large] == ["aborted", "expired", "waiting"]
    others.release()
    server.run()
    assert all(outputs_are_right(request) for request in [large[2], *small])


def test_a_request_is_not_refused_for_what_a_prefetch_holds_in_passing(serve):
    server = serve(8, host=16, max_running=2, max_batch_tokens=64, watermark=0.0, cache_options={"max_sequences": 2})
    ahead = prompt(7, 17)
    in_the_host(server, ahead)
    halt = Halt("end promote")
    server.cache.hooks.add(halt)
    ticket = server.cache.prefetch(ahead)
    assert halt.reached.wait(HANGS_S), "four of eight blocks are the prefetch's"
    wide, small = server.submit(prompt(1, 5), 2, n=2), server.submit(prompt(2, 17), 4)
    soon(halt.go.set)
    with server.cache.sequence([1]):
        run_to_the_end(server, small)
        assert wide.state == "waiting"
    server.run()
    assert ticket.wait(HANGS_S) == 16
    assert outputs_are_right(wide)
    assert outputs_are_right(small)
