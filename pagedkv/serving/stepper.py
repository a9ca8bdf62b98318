"""The thread that steps: takes orders, plans, has the model compute, hands tokens over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from pagedkv.cache.step import Step
from pagedkv.errors import ClosedError, InvalidArgument, OutOfBlocks, StepFailed
from pagedkv.observe.callbacks import Log, Told
from pagedkv.scheduler import Plan, Request, Scheduler
from pagedkv.scheduler.request import AbortReason
from pagedkv.scheduler.room import NoSequences
from pagedkv.serving.mailbox import Chunk, Mailbox
from pagedkv.threads import crew

log = Log(logging.getLogger("pagedkv.serving"))

PAUSE_S = 0.01  # until a plan is asked for again, where others hold the room

Compute: TypeAlias = Callable[[Plan, Step], Any]
Handed: TypeAlias = tuple[Mailbox, list[Chunk], bool, BaseException | None]
Order: TypeAlias = Callable[[ClosedError | None], None]  # called once, by the thread, or with why it is refused


class Stepper:
    """Steps a scheduler in a thread of its own, the only one that calls it.

    Parameters
    ----------
    scheduler : Scheduler
    compute : callable
        Computes a plan's step: ``compute(plan, step)`` returns what :meth:`Scheduler.report` takes.
    propose : callable, optional
        Called before each plan with the scheduler: may draft.

    Attributes
    ----------
    problem : what ended the thread, where nothing asked for its end.
    """

    def __init__(self, scheduler: Scheduler, compute: Compute, propose: Callable[[Scheduler], object] | None) -> None:
        self._scheduler, self._compute = scheduler, compute
        self._propose = None if propose is None else Told(propose, "propose")
        self._inbox: SimpleQueue[Order] = SimpleQueue()
        self._boxes: dict[Request, Mailbox] = {}
        self._out: dict[asyncio.AbstractEventLoop, list[Handed]] = {}
        self._thread: threading.Thread | None = None
        self._plan: Plan | None = None  # the last one
        self._stopping = self._over = False
        self._waits = False  # the thread waits in the scheduler, or is about to
        self._when_over: list[Callable[[], object]] = []
        self.problem: BaseException | None = None

    # ---- from any thread

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread is not None and not self._over

    def start(self) -> None:
        """Start the thread.

        Raises
        ------
        InvalidArgument
            It was started before.
        """
        if self._thread is not None:
            raise InvalidArgument("this was started before, and is started once: make another one")
        self._thread = threading.Thread(target=self._run, name="pagedkv-serving", daemon=True)
        crew.start(self._thread)

    def put(self, order: Order) -> None:
        """Have the thread do something between two steps; refused at once where it has ended."""
        self._inbox.put(order)
        if self._waits:
            self._scheduler.wake()
        if self._over:
            self._refuse_rest()

    def stop(self, when_over: Callable[[], object]) -> None:
        """End the thread once no request is left; tell when that is."""

        def order(refused: ClosedError | None) -> None:
            self._stopping = True
            if refused is None:
                self._when_over.append(when_over)
            else:
                when_over()

        self.put(order)

    def abort_all(self) -> None:
        """Abort every request."""

        def order(refused: ClosedError | None) -> None:
            for request in [] if refused else list(self._boxes):
                self.abort(request, None)

        self.put(order)

    # ---- in the thread

    def submit(self, box: Mailbox, arguments: dict[str, Any]) -> None:
        """Queue a request.

        Raises
        ------
        PagedKVError
            As :meth:`Scheduler.submit`.
        """
        box.request = self._scheduler.submit(**arguments)
        self._boxes[box.request] = box

    def abort(self, request: Request, problem: BaseException | None, reason: AbortReason = "aborted") -> None:
        """End a request, and tell its reader why."""
        self._scheduler.abort(request, reason)
        self._end(request, problem)

    def _run(self) -> None:
        try:
            while self._turn():
                self._hand_over()
        except BaseException as problem:
            self.problem = problem
            log.warning("the thread that steps has ended: it takes no more requests", exc_info=problem)
            self._let_go()
        self._over = True
        cause = self.problem
        said = "was stopped" if cause is None else f"ended with {type(cause).__name__}: {cause}"
        closed = ClosedError(f"the thread that steps {said}")
        closed.__cause__ = cause
        for box in self._boxes.values():
            self._out.setdefault(box.loop, []).append((box, [], True, closed))
        self._boxes.clear()
        self._hand_over()
        self._refuse_rest()
        for tell in self._when_over:
            tell()

    def _let_go(self) -> None:
        """Have the scheduler hold nothing of the requests that no step comes for any more."""
        with contextlib.suppress(Exception):
            if self._plan is not None:
                self._scheduler.cancel(self._plan)
        with contextlib.suppress(Exception):
            for request in self._boxes:
                self._scheduler.abort(request)

    def _refuse_rest(self) -> None:
        while True:
            try:
                order = self._inbox.get_nowait()
            except Empty:
                return
            order(ClosedError("the thread that steps has ended, and takes no more requests"))

    def _turn(self) -> bool:
        """Do what was ordered, then one step; False at the end."""
        scheduler = self._scheduler
        self._take_orders(0.0 if scheduler.has_work else None)
        if not scheduler.has_work:
            return not self._stopping
        if self._propose is not None:
            self._propose(scheduler)
        try:
            plan = scheduler.schedule()
        except (OutOfBlocks, NoSequences):  # nothing fits beside what others hold: they may let go of it
            self._take_orders(PAUSE_S)
            return True
        for request in (*plan.expired, *plan.finished):
            self._end(request, None)
        if plan:
            self._step(plan)
        elif not self._out:
            self._wait()
        return True

    def _take_orders(self, timeout_s: float | None) -> None:
        """Do all orders that there are; wait so long for the first, None for ever."""
        if timeout_s is None and self._stopping:
            timeout_s = 0.0
        try:
            order = self._inbox.get(timeout=timeout_s) if timeout_s is None or timeout_s else self._inbox.get_nowait()
            while True:
                order(None)
                order = self._inbox.get_nowait()
        except Empty:
            pass

    def _wait(self) -> None:
        """Wait until the scheduler can plan more than nothing, or an order comes."""
        self._waits = True
        if self._inbox.empty():  # an order that comes after this look finds `_waits`
            self._scheduler.wait()
        self._waits = False

    def _step(self, plan: Plan) -> None:
        self._plan, entered = plan, False
        try:
            with self._scheduler.step(plan) as step:
                entered = True
                entries = self._compute(plan, step)
            ended = self._scheduler.report(plan, entries)
        except Exception as problem:
            if entered or not isinstance(problem, OutOfBlocks):
                self._fail(plan, problem)
            else:  # another user of the cache took the blocks: the next plan does without them
                self._take_orders(PAUSE_S)
            return
        for branch, tokens, _ in plan.new_tokens:
            box = self._boxes.get(branch.request)
            if box is not None and branch.request.beams == 1:
                self._out.setdefault(box.loop, []).append((box, [box.chunk_of(branch, tokens)], False, None))
        for request in ended:
            self._end(request, None)

    def _fail(self, plan: Plan, problem: Exception) -> None:
        """Abort the requests of a step that raised; the others go on."""
        there = {id(seq) for seq in plan.sequences}
        failed = {branch.request for branch in plan.lanes}
        for request in self._boxes:
            if any(branch.seq is not None and id(branch.seq) in there for branch in request.live()):
                failed.add(request)
        log.warning("a step raised, and %d requests in it are aborted", len(failed), exc_info=problem)
        with contextlib.suppress(InvalidArgument):  # a report that was torn has taken it back
            self._scheduler.cancel(plan)
        for request in sorted(failed, key=lambda one: one.id):
            told = StepFailed(type(problem).__name__, str(problem))
            told.__cause__ = problem
            self.abort(request, told)

    def _end(self, request: Request, problem: BaseException | None) -> None:
        box = self._boxes.pop(request, None)
        if box is not None:
            last = [] if problem is not None else box.last_chunks(request)
            self._out.setdefault(box.loop, []).append((box, last, True, problem))

    def _hand_over(self) -> None:
        """Give each loop what there is for it, in one call."""
        out, self._out = self._out, {}
        for loop, handed in out.items():
            if not answer(loop, _receive, handed):  # its readers are gone with it
                for box, _, over, _ in handed:
                    box.abandoned = True
                    if not over and box.request is not None and not box.request.ended:
                        self.abort(box.request, None)


def _receive(handed: list[Handed]) -> None:
    for box, chunks, over, problem in handed:
        box.receive(chunks, over, problem)


def answer(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *values: object) -> bool:
    """Have a loop call something; False where it is closed."""
    try:
        loop.call_soon_threadsafe(call, *values)
    except RuntimeError:
        return False
    return True
