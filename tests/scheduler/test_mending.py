"""Calls of the scheduler that are interrupted at any line.

The next call goes on, and every token is the same.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
import pagedkv.scheduler
from pagedkv.observe.hooks import Span
from pagedkv.scheduler import Branch
from tests.held_storage import HeldStorage

from .conftest import followed

SPEC = pk.KVSpec(1, 1, 1, "float32", 4, model="toy")
ROOM = str(Path(pagedkv.scheduler.__file__).parent)
WORTH = 23  # every so many lines are interrupted, each time from another one on


class Interrupt(BaseException):
    """From outside."""


class At:
    """A tracer that raises at a line of the scheduler's room.

    Lines are counted over all calls; -1 only counts.
    """

    def __init__(self, at: int) -> None:
        self.at, self.lines, self.where = at, 0, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOM) or frame.f_code.co_name in ("__exit__", "__enter__"):
            return None
        return self.line

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise Interrupt
        return self.line


def token(history: np.ndarray, alternative: int = 0) -> int:
    """What a model says after a history."""
    return int((np.sum(history * np.arange(1, len(history) + 1)) + 7 * alternative) % 1000)


def entries(plan: pk.Plan) -> list[Any]:
    """Return what a step gives each lane.

    First samples and beams, what is right of a draft, then one token each.
    """
    told: list[Any] = []
    for branch in plan.lanes:
        request, history = branch.request, branch.tokens
        first = branch.num_output == 0
        alternatives = request.width if first else 1
        if len(branch.draft):
            said = [token(history)]
            for drafted in branch.draft:
                if drafted != said[-1]:
                    break
                said.append(token(np.append(history, said)))
            told.append(said)
        else:
            told.append([token(history, i) for i in range(alternatives)])
    return told


def outputs(at: int, watch: At | None = None) -> tuple[list[Any], At]:
    """Return what all requests come to, with the line `at` interrupted.

    The device is small, so that some are suspended.
    """
    storage = HeldStorage()  # no other thread is in it: the same lines each time
    storage.rounds = 2
    cache = pk.KVCache(SPEC, pk.Blocks(14), pk.Blocks(32), storage=storage)
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=6, max_batch_tokens=12, watermark=0.0))
    tracer, requests, aborted = At(at), [], []
    plans: list[pk.scheduler.Plan] = []

    def called(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        sys.settrace(tracer)
        try:
            return call(*arguments, **options)
        finally:
            sys.settrace(None)

    def submit(*arguments: Any, **options: Any) -> None:
        before = scheduler._num_submitted
        try:
            requests.append(called(scheduler.submit, *arguments, **options))
        except Interrupt:
            known = [one for one in scheduler._unended if one.id >= before]
            requests.append(known[0] if known else called(scheduler.submit, *arguments, **options))

    submit(range(9), max_new_tokens=6)
    submit(range(50, 59), max_new_tokens=5, n=2)
    submit(range(100, 106), max_new_tokens=5, beams=2)
    submit(range(150, 170), max_new_tokens=4, priority=90)
    submit(range(9), max_new_tokens=3)
    for turn in range(200):
        if not scheduler.has_work:
            break
        try:
            if turn == 3:
                aborted.append(requests[4])
                called(scheduler.abort, requests[4])
            live = requests[0].live()
            if turn % 2 and len(live) == 1 and live[0].seq is not None and scheduler._plan is None:
                guess = token(live[0].tokens)
                called(scheduler.draft, requests[0], [guess, 1])
            plan = called(scheduler.schedule)
            plans.append(plan)
            if not plan:
                continue
            with scheduler.step(plan) as step:
                kv = np.zeros((len(step.tokens), 1, 1), np.float32)
                step.write(0, kv, kv)
            called(scheduler.report, plan, entries(plan))
        except Interrupt:
            if aborted:
                scheduler.abort(aborted[0])
        scheduler.has_work  # noqa: B018 - may be asked at any time
    assert not scheduler.has_work, f"interrupted at {tracer.where}: not all requests have ended"
    scheduler.check_integrity()
    assert cache.table.num_rows == 0
    assert scheduler.stats().finished == 4
    said = [sorted(output.tolist() for output in request.outputs) for request in requests[:4]]
    streams = followed(plans)
    for branch in [branch for request in requests for branch in request.branches if branch.num_output]:
        assert streams[branch] == branch.output.tolist(), f"interrupted at {tracer.where}: told twice, or never"
    assert sum(scheduler.stats().ended.values()) == len(requests)
    cache.close()
    return said, tracer


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, WORTH, 2))
def test_a_scheduler_that_is_interrupted_at_any_line_goes_on_with_the_same_tokens(start: int) -> None:
    expected, counted = outputs(-1)
    assert counted.lines > 1000
    for at in range(start, counted.lines, WORTH):
        said, tracer = outputs(at)
        assert tracer.where, f"line {at} was not reached"
        assert said == expected, f"interrupted at {tracer.where}"


def test_what_is_refused_mends_nothing() -> None:
    cache = pk.KVCache(SPEC, pk.Blocks(16))
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=2, max_batch_tokens=12))
    request = scheduler.submit(range(5), max_new_tokens=3)
    plan = scheduler.schedule()
    with scheduler.step(plan) as step:
        kv = np.zeros((len(step.tokens), 1, 1), np.float32)
        step.write(0, kv, kv)
    for wrong in ([], [1, 2], [-1], "x"):
        with pytest.raises((pk.InvalidArgument, pk.WrongType)):
            scheduler.report(plan, wrong)
        assert not scheduler.torn
    assert request.state == "running"
    scheduler.report(plan, [7])
    assert request.outputs[0].tolist() == [7]


def write(step: pk.Step) -> None:
    kv = np.zeros((len(step.tokens), 1, 1), np.float32)
    step.write(0, kv, kv)


def test_a_request_that_finished_in_an_interrupted_report_is_in_the_next_plan_where_nothing_is_left_to_run(monkeypatch):
    cache = pk.KVCache(SPEC, pk.Blocks(16))
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=2, max_batch_tokens=12))
    request = scheduler.submit(range(5), max_new_tokens=1)
    plan = scheduler.schedule()
    with scheduler.step(plan) as step:
        write(step)

    def interrupted(*_: object) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_forget", interrupted)
        with pytest.raises(Interrupt):
            scheduler.report(plan, [7])
    assert scheduler.has_work, "the caller was not told of its end"
    told = []
    while scheduler.has_work:
        told += scheduler.schedule().finished
    assert told == [request]
    assert (request.state, request.outputs[0].tolist()) == ("finished", [7])
    assert scheduler.stats().finished == 1


class TooSlow(pk.PagedKVError):
    """What a signal handler raises that takes one of our errors for its own."""


class Ringing:
    """A hook in which a signal arrives, when a step has its arrays."""

    def begin(self, span: Span) -> None:
        pass

    def end(self, span: Span, state: object) -> None:
        if span.name == "allocate":
            signal.raise_signal(signal.SIGUSR1)


def test_an_error_of_ours_that_a_signal_handler_raises_is_an_interrupt_and_no_refusal() -> None:
    def handler(*_: object) -> None:
        raise TooSlow

    def clock() -> float:
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGUSR1)
        return 0.0

    armed: list[bool] = []
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        cache = pk.KVCache(SPEC, pk.Blocks(16))
        scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=2, max_batch_tokens=12), clock=clock)
        request = scheduler.submit(range(5), max_new_tokens=2, deadline_s=5.0)
        armed.append(True)
        with pytest.raises(TooSlow):
            scheduler.schedule()
        assert scheduler.torn, "the next call has to mend what this one left"
        while scheduler.has_work:
            plan = scheduler.schedule()
            with scheduler.step(plan) as step:
                write(step)
            scheduler.report(plan, [3])
        assert request.outputs[0].tolist() == [3, 3]
        cache.hooks.add(Ringing())
        with cache.sequence(range(4)) as seq:
            with pytest.raises(TooSlow), cache.step([seq]):
                raise AssertionError("it did not begin")
            seq.fork()[0].release()  # it is in no step
    finally:
        signal.signal(signal.SIGUSR1, before)


def begun(cache: pk.KVCache, **options: Any) -> tuple[pk.Scheduler, Any, pk.Plan]:
    """A scheduler with one request whose prompt is computed, and the plan to report."""
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=4, max_batch_tokens=64))
    request = scheduler.submit([1, 2, 3, 4, 5, 6], 4, **options)
    plan = scheduler.schedule()
    with scheduler.step(plan) as step:
        write(step)
    return scheduler, request, plan


def run_to_the_end(scheduler: pk.Scheduler) -> list[Any]:
    told = []
    for _ in range(100):
        if not scheduler.has_work:
            return told
        plan = scheduler.schedule()
        told += [*plan.finished, *plan.expired]
        if plan:
            with scheduler.step(plan) as step:
                write(step)
            told += scheduler.report(plan, entries(plan))
    raise AssertionError(f"still at work: {scheduler.stats()}")


def test_a_mending_that_is_interrupted_too_cuts_no_token_twice(monkeypatch) -> None:
    with pk.KVCache(SPEC, pk.Blocks(32)) as cache:
        scheduler, request, _ = begun(cache)
        run_to_the_end(scheduler)
        wanted = request.outputs[0].tolist()
    with pk.KVCache(SPEC, pk.Blocks(32)) as cache:
        scheduler, request, plan = begun(cache)

        def interrupted(*_: object) -> None:
            raise Interrupt

        with monkeypatch.context() as patch:  # once the token is appended
            patch.setattr(scheduler._queue, "serve", interrupted)
            patch.setattr(scheduler._reporter, "before", None)
            reporter, real = scheduler._reporter, scheduler._reporter._one_each

            def one_each(*arguments: Any) -> Any:
                real(*arguments)
                raise Interrupt

            patch.setattr(reporter, "_one_each", one_each)
            with pytest.raises(Interrupt):
                scheduler.report(plan, entries(plan))
            assert reporter.before is not None
            before = reporter.before
        reporter.before = before
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(Branch, "let_go", interrupted)
                with pytest.raises(Interrupt):
                    scheduler.schedule()
        run_to_the_end(scheduler)
        assert request.outputs[0].tolist() == wanted


def test_a_fork_that_another_thread_left_no_sequence_for_loses_no_request() -> None:
    with pk.KVCache(SPEC, pk.Blocks(64), max_sequences=4) as cache:
        scheduler, request, plan = begun(cache, n=4)
        others: list[pk.Sequence] = []

        class Other:
            def begin(self, span: Span) -> None:
                if span.name == "fork" and not others:
                    others.append(cache.sequence([9, 9, 9, 9]))

            def end(self, span: Span, state: object) -> None:
                pass

        hook = Other()
        cache.hooks.add(hook)
        with pytest.raises(pk.InvalidArgument):
            scheduler.report(plan, entries(plan))
        assert scheduler.torn, "the branch had left the prompts already"
        cache.hooks.remove(hook)
        others.pop().release()
        assert run_to_the_end(scheduler) == [request]
        assert [len(output) for output in request.outputs] == [4] * 4
        scheduler.check_integrity()


@pytest.mark.parametrize("what", ["finished", "expired"])
def test_what_an_interrupted_call_was_about_to_return_is_told_again(what: str) -> None:
    now = [0.0]
    with pk.KVCache(SPEC, pk.Blocks(32)) as cache:
        scheduler = pk.Scheduler(cache, clock=lambda: now[0])
        request = scheduler.submit([1, 2, 3], 1, deadline_s=5.0)
        plan = scheduler.schedule()
        if what == "finished":
            with scheduler.step(plan) as step:
                write(step)
            assert scheduler.report(plan, [7]) == [request]
        else:
            now[0] = 9.0
            assert scheduler.schedule().expired == (request,)
        scheduler.torn = True  # as where the signal comes before the caller has what was returned
        assert run_to_the_end(scheduler) == [request]
        assert run_to_the_end(scheduler) == []
        scheduler.submit([1, 2], 1)
        assert request not in run_to_the_end(scheduler), "what was heard is not told again"


def test_a_request_is_counted_once_wherever_its_end_is_interrupted() -> None:
    """At every line of the scheduler's room that a report passes which finishes a request."""
    with pk.KVCache(SPEC, pk.Blocks(16)) as cache:
        for at in range(1, 500):
            scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=2))
            scheduler.submit([at, 2, 3], 1)
            plan = scheduler.schedule()
            with scheduler.step(plan) as step:
                step.mark_written(0)
            tracer, before = At(at), sys.gettrace()
            sys.settrace(tracer)
            try:
                scheduler.report(plan, [7] * len(plan.lanes))
            except Interrupt:
                pass
            finally:
                sys.settrace(before)
            while scheduler.has_work:
                plan = scheduler.schedule()
                if plan:
                    with scheduler.step(plan) as step:
                        step.mark_written(0)
                    scheduler.report(plan, [7] * len(plan.lanes))
            assert scheduler.stats().finished == 1, tracer.where
            if not tracer.where:
                break
        assert 20 < at < 499
