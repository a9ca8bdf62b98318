"""Requests whose prefixes are loaded from a slower tier while others run.

The slow tier brings a block when the test says so, on a clock that the test turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.cache.engine import Engine
from pagedkv.scheduler import Request, SchedulerOptions
from tests.held_storage import HeldStorage, held_cache
from tests.slices import one_in

from .conftest import BLOCK, SPEC, Server, greedy, prompt

LONG = 6  # blocks of a prompt that lies on the slow tier
MOST = 400  # steps


class World(Server):
    """A server over a held storage.

    Attributes
    ----------
    storage : HeldStorage
    """

    def __init__(self, cache: pk.KVCache, storage: HeldStorage, options: SchedulerOptions) -> None:
        super().__init__(cache, options)
        self.storage = storage

    def cool(self, *starts: int, num_blocks: int = LONG) -> None:
        """Have the prefixes of these prompts on the slow tier, and nothing on the device."""
        self.storage.by_itself = True
        for start in starts:
            self.submit(cold(start, num_blocks), 1)
            self.run()
        device = self.cache.stats().blocks["device"]["max"]
        with self.cache.sequence(prompt(99, device * BLOCK)) as seq, self.cache.step([seq]) as step:
            step.mark_written(0)
        self.storage.by_itself, self.storage.read = False, 0
        for start in starts:
            assert self.cache.match(cold(start, num_blocks))["device"] == 0

    def turn(self) -> list[Request]:
        """As a server's, but an empty plan is not waited after: the test brings the blocks."""
        plan = self.scheduler.schedule()
        ended = list(plan.expired)
        if plan:
            self.compute(plan)
            self.steps += 1
            ended += self.scheduler.report(plan, [self.choose(branch) for branch in plan.lanes])
        self.scheduler.check_integrity()
        return ended

    def settle(self) -> None:
        """All moves under way come to their ends."""
        self.storage.arrive()
        while self.cache.moves.run_moves():
            pass

    def finish(self, bring: Callable[[], object] | None = None) -> int:
        """Until nothing is left, a transfer arriving between steps; how many steps it took."""
        for number in range(MOST):
            if not self.scheduler.has_work:
                assert self.cache.table.num_rows == 0
                return number
            self.turn()
            (bring or (lambda: self.storage.arrive(1)))()
        raise AssertionError(f"still at work after {MOST} steps: {self.scheduler.stats()}")


def cold(start: int, num_blocks: int = LONG) -> list[int]:
    """A prompt of so many whole blocks and one token."""
    return prompt(start, num_blocks * BLOCK + 1)


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    """Opens worlds, ``world(device, host=, max_running=, ...)``; in the end nothing is left."""
    with ExitStack() as stack:

        def open_it(device: int = 32, *, host: int = 200, **options: Any) -> World:
            cache, storage = stack.enter_context(held_cache(SPEC, run=1, device=device, host=host))
            options.setdefault("max_running", 8)
            options.setdefault("max_batch_tokens", 64)
            options.setdefault("watermark", 0.0)
            return World(cache, storage, SchedulerOptions(**options))

        yield open_it


def right(request: Request) -> bool:
    return request.state == "finished" and request.outputs[0].tolist() == greedy(request)


def test_others_run_while_a_request_loads_and_it_runs_as_soon_as_it_is_there(world):
    one = world()
    one.cool(1)
    runs = one.submit(prompt(5), 30)
    one.turn()
    loads = one.submit(cold(1), 3)
    for _ in range(LONG):
        before = runs.branches[0].num_output
        one.turn()
        assert (loads.state, runs.state) == ("loading", "running")
        assert runs.branches[0].num_output == before + 1, "no step waits"
        assert one.scheduler.stats().loading == 1
        assert one.storage.read == LONG, "all of it was asked for at once"
        one.storage.arrive(1)
    one.turn()
    assert loads.state == "running"
    assert loads.branches[0].num_output == 1, "its last token was computed in the same step"
    assert loads.hit_tokens["host"] == LONG * BLOCK
    one.finish()
    assert right(runs)
    assert right(loads)


def test_the_block_of_a_remainder_is_beside_those_that_the_request_needs(world):
    one = world()
    one.cache._engine.keeps_remainders = True  # as over a disk
    one.cool(1)
    tokens = prompt(1, LONG * BLOCK + 3)
    one.storage.by_itself = True
    one.submit(tokens, 1)
    one.run()
    one.cool(2)
    loads = one.submit(tokens, 1)
    one.turn()
    assert (loads.state, one.storage.read) == ("loading", LONG + 1)
    assert one.scheduler._running.loading.reserved == 1, "for its own last block"
    one.finish()
    assert right(loads)
    assert loads.hit_tokens["partial"] == 2, "all but the token that is computed"


def test_alone_it_loads_too_and_the_plan_is_empty_meanwhile(world):
    one = world()
    one.cool(1)
    loads = one.submit(cold(1), 3)
    plan = one.scheduler.schedule()
    assert not plan
    assert one.scheduler.has_work
    assert not one.scheduler.wait(0.0)
    one.storage.arrive()
    assert one.scheduler.wait(0.0)
    one.turn()
    assert loads.branches[0].num_output == 1
    one.finish()
    assert right(loads)


def test_a_share_of_none_loads_in_the_call_that_begins_it(world):
    one = world(loading_share=0)
    one.cool(1)
    one.storage.rounds = 1
    loads = one.submit(cold(1), 3)
    assert one.scheduler.schedule()
    assert loads.state == "running"
    one.finish()
    assert right(loads)


# ---- R1: room


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_two_loads_that_would_fill_the_device_exactly_do_not_lock_up(world, lookahead, share):
    """Each needs one block more than its prompt and its copy: others forgot it (vLLM 57104)."""
    one = world(2 * (LONG + 1), lookahead=lookahead, loading_share=share)
    one.cool(1, 2)
    whole = [prompt(start, LONG * BLOCK) for start in (1, 2)]
    requests = [one.submit(tokens, 4) for tokens in whole]
    one.turn()
    assert [request.state for request in requests] == ["loading", "waiting"], "no room for its next token"
    one.finish()
    assert all(map(right, requests))


def test_what_a_load_is_to_have_is_not_given_to_requests_that_come_later(world):
    one = world(2 * LONG + 2)
    one.cool(1)
    loads = one.submit([*cold(1), *prompt(7, 2 * BLOCK)], 3)  # 6 blocks loaded, 3 computed
    one.turn()
    later = [one.submit(prompt(start, 3 * BLOCK), 2) for start in (5, 6)]
    one.turn()
    assert loads.state == "loading"
    assert [request.state for request in later] == ["running", "waiting"]
    one.finish()
    assert all(map(right, [loads, *later]))
    assert not loads.num_preemptions


# ---- R2, R8: order and share


def test_loads_begin_by_rank_within_their_share_and_one_always_may(world):
    one = world(40, loading_share=0.4)
    one.cool(1, 2, 3)
    runs = one.submit(prompt(5), 40)
    one.turn()
    requests = [one.submit(cold(start), 2) for start in (1, 2, 3)]
    one.turn()
    assert [request.state for request in requests] == ["loading", "loading", "waiting"], "7 + 7 of 16 blocks"
    one.storage.arrive(LONG)
    one.turn()
    assert [request.state for request in requests] == ["running", "loading", "loading"]
    one.finish()
    assert all(map(right, [runs, *requests]))
    small = world(40, loading_share=0.01)
    small.cool(1)
    small.submit(prompt(5), 20)
    small.turn()
    only = small.submit(cold(1), 2)
    small.turn()
    assert only.state == "loading"
    small.finish()


def test_a_request_with_nothing_to_load_passes_one_that_may_not_load_at_most_window_times(world):
    one = world(40, loading_share=0.01, window=3)
    one.cool(1, 2)
    one.submit(prompt(5), 60)
    one.turn()
    first, waits = one.submit(cold(1), 2), one.submit(cold(2), 2)
    small = [one.submit(prompt(start, 3), 1) for start in range(10, 16)]
    for _ in range(8):
        one.turn()
    assert (first.state, waits.state, waits.overtaken) == ("loading", "waiting", 3)
    assert [request.state for request in small] == ["finished"] * 3 + ["waiting"] * 3
    one.finish()
    assert all(map(right, [first, waits, *small]))


def test_a_request_without_room_before_one_that_loads_does_not_lock_up(world):
    """Others parked one that holds nothing before one that holds blocks (vLLM 57841)."""
    one = world(16)
    one.cool(1)
    runs = one.submit(prompt(5, 4 * BLOCK), 8)
    one.turn()
    big = one.submit(prompt(6, 11 * BLOCK), 2)
    loads = one.submit(cold(1), 2)
    one.finish()
    assert all(map(right, [runs, big, loads]))


# ---- R3, R4: done first


@pytest.mark.parametrize("priority", [50, 100])
def test_a_load_that_is_over_runs_whatever_waits_at_the_head(world, priority):
    """Others noticed that it was over only when the queue's scan came to it (vLLM 45388)."""
    one = world(16, max_running=2)
    one.cool(1)
    loads = one.submit(cold(1), 4)
    one.turn()
    head = one.submit(prompt(6, 14 * BLOCK), 2, priority=priority)
    one.storage.arrive()
    one.turn()
    if priority == 50:
        assert (loads.state, head.state) == ("running", "waiting")
        assert loads.branches[0].num_output == 1
    one.finish()
    assert all(map(right, [loads, head]))


def test_loads_have_their_place_among_those_that_run(world):
    one = world(max_running=2)
    one.cool(1)
    one.submit(prompt(5), 6)
    loads, third = one.submit(cold(1), 2), one.submit(prompt(6), 2)
    one.turn()
    assert [loads.state, third.state] == ["loading", "waiting"]
    one.finish()
    assert all(map(right, [loads, third]))


# ---- R5: late, failed, hanging


@pytest.mark.parametrize("k", range(LONG + 1))
@pytest.mark.parametrize("how", ["late", "fails", "hangs"])
def test_what_does_not_come_is_computed_from_there_on(world, k, how):
    one = world()
    one.cool(1)
    loads = one.submit(cold(1), 3)
    one.turn()
    one.storage.keeps_deadlines = how != "hangs"
    one.storage.arrive(k)
    if how == "fails" and k < LONG:
        one.storage.arrive(1, ok=False)
        one.storage.arrive()
    one.storage.turn(100.0)
    one.turn()
    assert loads.state == "running"
    kept = 0 if how == "hangs" and k < LONG else k  # of a ticket that is not settled nothing is known
    assert loads.hit_tokens["host"] == kept * BLOCK
    assert one.storage.read == LONG, "no block is read twice"
    one.finish(lambda: None)
    assert right(loads)


def test_a_load_has_a_deadline_by_what_loads_and_prompts_take(world):
    one = world()
    one.cool(1)
    block = SPEC.block_bytes
    for _ in range(3):
        one.cache.costs.observe_load(1, block, 0.5)
    one.submit(cold(1), 3)
    one.turn()
    (ticket,) = one.storage.under_way
    assert ticket.deadline == pytest.approx(one.storage.now + 2 * LONG * 0.5)
    one.storage.arrive()
    one.finish()


def test_a_load_whose_time_is_not_known_has_two_seconds_and_some_by_its_length(world):
    one = world()
    one.cool(1)
    one.cache.costs._lines.clear()
    one.submit(cold(1), 3)
    one.turn()
    (ticket,) = one.storage.under_way
    assert ticket.deadline == pytest.approx(one.storage.now + 2.0 + 0.1 * LONG * BLOCK / 1024)
    one.storage.arrive()
    one.finish()


# ---- R6: who gives way


def test_loads_give_way_before_a_request_that_runs_is_suspended(world):
    one = world(16)
    one.cool(1)
    runs = [one.submit(prompt(start, 3), 24) for start in (5, 6)]
    one.turn()
    loads = one.submit([*cold(1, 2), *prompt(7, 7 * BLOCK)], 2)
    one.turn()
    assert loads.state == "loading"
    for _ in range(24):
        one.turn()
        if loads.state != "loading":
            break
    assert loads.state == "waiting", "its blocks went to those that run"
    assert not loads.num_preemptions
    assert one.scheduler.stats().waiting == 1
    one.finish()
    assert all(map(right, [*runs, loads]))
    assert [request.num_preemptions for request in runs] == [0, 0]


# ---- R7: waking


def test_wait_returns_for_a_failed_load_a_request_another_thread_and_a_deadline(world):
    one = world()
    one.cool(1)
    loads = one.submit(cold(1), 3, deadline_s=5.0)
    scheduler = one.scheduler
    assert not scheduler.schedule()
    assert not scheduler.wait(0.0)
    scheduler.wake()
    assert scheduler.wait(0.0)
    assert not scheduler.schedule()
    assert not scheduler.wait(0.0)
    comes = one.submit(prompt(5), 2)
    assert scheduler.wait(0.0)
    one.turn()
    assert scheduler.wait(0.0), "it runs"
    while not comes.ended:
        one.turn()
    assert not scheduler.schedule()
    assert not scheduler.wait(0.0)
    one.now += 5.0
    assert scheduler.wait(0.0)
    assert scheduler.schedule().expired == (loads,)
    one.storage.arrive()
    one.cool(1)
    failed = one.submit(cold(1), 2)
    assert not one.scheduler.schedule()
    one.storage.arrive(ok=False)
    assert scheduler.wait(0.0)
    one.turn()
    assert failed.branches[0].num_output == 1
    one.finish()
    assert right(failed)


def test_wait_returns_for_a_move_where_a_prompt_does_not_fit_beside_a_load(world):
    one = world(2 * LONG, max_running=2, max_batch_tokens=BLOCK)
    one.cool(1)
    runs = one.submit(prompt(5, 4 * BLOCK + 1), 2)
    one.turn()
    loads = one.submit(cold(1), 2, priority=100)
    one.turn()
    assert (runs.state, loads.state) == ("running", "loading")
    other = one.cache.sequence(prompt(7, 3 * BLOCK))  # of another thread
    with one.cache.step([other]) as step:
        step.mark_written(0)
    for _ in range(3):
        plan = one.scheduler.schedule()
        assert (bool(plan), runs.state, loads.state) == (False, "running", "loading")
        assert not one.scheduler.wait(0.0), "nothing has changed"
    one.storage.arrive()
    assert one.scheduler.wait(0.0)
    other.release()
    one.finish()
    assert right(runs)
    assert right(loads)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "soon"])
def test_seconds_to_wait_that_are_none_are_refused(world, bad):
    with pytest.raises((pk.InvalidArgument, pk.WrongType), match="timeout_s"):
        world().scheduler.wait(bad)


# ---- aborts, deadlines, suspensions at every event of a load

EVENTS = ("before it begins", "on the way", "half there", "there", "runs")


@pytest.mark.parametrize("event", range(len(EVENTS)), ids=EVENTS)
@pytest.mark.parametrize("end", ["abort", "expire", "give up", "interrupt"])
@pytest.mark.parametrize("who", range(3))
def test_a_load_ends_at_any_moment_and_leaves_nothing_behind(world, event, end, who):
    one = world(48, loading_share=1.0)
    one.cool(1, 2, 3)
    requests = [one.submit(cold(start), 3, deadline_s=50.0 if start == who + 1 else None) for start in (1, 2, 3)]
    chosen, scheduler = requests[who], one.scheduler
    if event > 0:
        one.turn()
    if event > 1:
        one.storage.arrive(LONG // 2 + LONG * who)
    if event > 2:
        one.storage.arrive()
    if event > 3:
        one.turn()
    if end == "abort":
        scheduler.abort(chosen)
    elif end == "expire":
        one.now += 60.0
    elif end == "give up":
        while scheduler._running.give_up_load(None):
            pass
    else:
        scheduler.torn = True
    one.finish()
    state = {"abort": "aborted", "expire": "expired"}.get(end, "finished")
    assert chosen.state == state
    assert all(right(request) for request in requests if request is not chosen)
    one.settle()
    assert one.cache.stats().blocks["device"]["live"] == 0


def test_a_ticket_of_an_aborted_load_writes_into_blocks_that_nothing_else_has(world):
    one = world(2 * LONG)
    one.cool(1)
    loads = one.submit(cold(1), 2)
    one.turn()
    one.scheduler.abort(loads)
    other = one.submit(prompt(5, 5 * BLOCK), 4)
    for _ in range(3):
        one.turn()  # compares its writes with the blocks there
        one.storage.arrive(1)
    one.finish()
    one.settle()
    assert right(other)
    assert one.cache.match(cold(1))["device"] == LONG * BLOCK


def test_a_suspended_request_comes_back_through_loading(world):
    one = world(12, preemption="swap")
    requests = [one.submit(prompt(start, 4), 24) for start in (5, 6, 7)]
    states = set()
    for _ in range(MOST):
        if not one.scheduler.has_work:
            break
        one.turn()
        states |= {request.state for request in requests if request.num_preemptions}
        one.storage.arrive(1)
    assert "loading" in states
    assert all(map(right, requests))


def test_branches_that_come_back_are_all_loaded_and_none_is_waited_for(world, monkeypatch):
    one = world(13, preemption="swap", max_batch_tokens=64)
    first = one.submit(prompt(5, 9), 12, n=2)
    for _ in range(8):
        one.turn()
    urgent = one.submit(prompt(6, 12 * BLOCK), 4, priority=100)
    for _ in range(2):
        one.turn()
    assert (first.state, urgent.state) == ("suspended", "running")
    cold = [one.cache.match(branch.saved[:-1])["host"] // BLOCK for branch in first.live()]
    shared = 9 // BLOCK
    assert min(cold) > shared, "each has blocks of its own there"
    monkeypatch.setattr(one.cache.moves, "wait_arrived", lambda owner: pytest.fail("a step waited for a load"))
    one.finish()
    assert one.storage.read == sum(cold) - shared
    assert right(urgent)
    expected = sorted(greedy(first, which) for which in range(2))
    assert sorted(output.tolist() for output in first.outputs) == expected


# ---- everything at once


def one_queue(seed: int, stack: ExitStack) -> None:
    r = Random(seed)
    device = r.randint(8, 64)
    cache, storage = stack.enter_context(held_cache(SPEC, run=r.choice([1, 2, None]), device=device, host=300))
    options = SchedulerOptions(
        max_running=r.randint(1, 5), max_batch_tokens=r.choice([8, 16, 64]), watermark=r.choice([0.0, 0.1]),
        lookahead=r.choice([0, 0, 2]), loading_share=r.choice([0.05, 0.25, 1.0]), window=r.choice([1, 4]),
        priority_tokens=r.choice([0, 5]), order=r.choice(["first_come", "longest_prefix"]),
        admission=r.choice(["prompt", "prompt", "worst_case"]),
    )  # fmt: skip
    one = World(cache, storage, options)
    storage.by_itself = True
    fits = (device - 2) * BLOCK
    for start in range(4):
        one.submit(prompt(start, min(fits, r.randint(2, 12) * BLOCK)), 1)
    one.run()
    storage.by_itself = False
    requests: list[Request] = []
    for step in itertools.count():
        if step < 60 and r.random() < 0.5:
            tokens = prompt(r.randrange(4), r.randint(1, max(1, min(fits - 12, 12 * BLOCK))))
            if r.random() < 0.3:
                tokens = [*tokens, *prompt(50 + step, 5)]
            how = {"priority": r.choice([50, 50, 100]), "deadline_s": r.choice([None, None, None, 20.0])}
            with suppress(pk.RequestTooLarge):
                requests.append(one.submit(tokens, r.randint(1, 8), **how))
        if requests and r.random() < 0.03:
            one.scheduler.abort(r.choice(requests))
        one.now += 1.0
        plan = one.scheduler.schedule()
        if plan:
            one.compute(plan)
            one.scheduler.report(plan, [one.choose(branch) for branch in plan.lanes])
        elif one.scheduler.has_work:
            assert storage.under_way or one.scheduler.wait(0.0), "empty, and nothing is on its way"
        one.scheduler.check_integrity()
        what = r.random()
        if what < 0.6:
            storage.arrive(r.randint(1, 4), ok=r.random() < 0.9)
        elif what < 0.65:
            storage.turn(r.choice([1.0, 40.0]))
        if step >= 60 and not one.scheduler.has_work:
            break
        assert step < 3000, f"seed {seed}: {one.scheduler.stats()}"
    assert all(request.ended for request in requests)
    assert all(right(request) for request in requests if request.state == "finished")


@pytest.mark.parametrize("first", one_in(3, range(0, 60, 10)))
def test_random_queues_all_end(first):
    for seed in range(first, first + 10):
        with ExitStack() as stack:
            one_queue(seed, stack)


@pytest.mark.parametrize("seed", [49, 55])
def test_a_part_of_a_block_is_not_waited_for_while_other_requests_load(seed, monkeypatch):
    """In these queues it once waited for reads that only this thread brings to their end."""
    copies, original = [], Engine.reuse_part

    def checked(engine, row, block, common, *, awaits_reads):
        copies.append(awaits_reads)
        assert not (awaits_reads and engine.moves.placement.num_in_flight), "it may wait for the reads of others"
        return original(engine, row, block, common, awaits_reads=awaits_reads)

    monkeypatch.setattr(Engine, "reuse_part", checked)
    with ExitStack() as stack:
        one_queue(seed, stack)
    assert False in copies


def test_the_time_of_a_load_is_time_in_the_queue_and_it_begins_once(world):
    one = world()
    one.cool(1)
    before = one.scheduler.stats().latency["queue"]
    loads = one.submit(cold(1), 3)
    one.turn()
    assert (loads.state, loads.began_s) == ("loading", None)
    one.now += 5.0
    one.storage.arrive()
    one.turn()
    assert loads.began_s == one.now
    one.finish()
    after = one.scheduler.stats().latency["queue"]
    assert (after.count - before.count, after.total_s - before.total_s) == (1, 5.0)


def test_a_request_whose_load_was_given_up_counts_among_those_that_wait(world):
    one = world(max_waiting=2)
    one.cool(1)
    loads = one.submit(cold(1), 3)
    one.turn()
    assert loads.state == "loading"
    one.scheduler._running.stop_loading(loads)
    one.submit(prompt(5), 3)
    assert one.scheduler.stats().waiting == 2
    with pytest.raises(pk.QueueFull):
        one.submit(prompt(6), 3)
    one.finish()
    assert right(loads)
