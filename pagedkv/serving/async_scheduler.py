"""AsyncScheduler: requests from tasks, tokens to tasks, and one thread that steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from numpy.typing import ArrayLike

from pagedkv.errors import ClosedError, QueueFull, WrongType
from pagedkv.scheduler import Scheduler
from pagedkv.scheduler.request import AbortReason
from pagedkv.serving.mailbox import Mailbox
from pagedkv.serving.stepper import Compute, Stepper, answer
from pagedkv.serving.stream import Stream
from pagedkv.spec.sizes import number_of_seconds, whole_number

MAX_UNREAD = 4096  # tokens


class AsyncScheduler:
    """A Scheduler for asyncio, with a thread of its own.

    That thread is the only one that calls the scheduler and the model.

    An async context manager: starts at the beginning of the block, and at its end stops when all requests have ended,
    or at once after an exception.

    Parameters
    ----------
    scheduler : Scheduler
        Nothing else submits to it, steps it or aborts its requests meanwhile. `stats()` may be asked from anywhere.
    compute : callable
        ``compute(plan, step)``: writes and attends every layer of a step, and returns what :meth:`Scheduler.report`
        takes, an entry for each of ``plan.lanes``. Called in the thread. An exception in it, or from a report of what
        it returned, aborts the requests of that step and no others; their readers get StepFailed.
    propose : callable, optional
        ``propose(scheduler)``, called in the thread before each plan: may call :meth:`Scheduler.draft`. Its first
        Exception is logged; the work goes on without its drafts.
    max_unread : int
        Tokens that a request's stream may have and its reader has not read; with more, the request is aborted.

    Attributes
    ----------
    scheduler : Scheduler

    Raises
    ------
    WrongType, InvalidArgument
    """

    def __init__(
        self,
        scheduler: Scheduler,
        compute: Compute,
        *,
        propose: Callable[[Scheduler], object] | None = None,
        max_unread: int = MAX_UNREAD,
    ) -> None:
        if not isinstance(scheduler, Scheduler):
            raise WrongType(f"a pagedkv.Scheduler is needed, not {type(scheduler).__name__}")
        for name, function in (("compute", compute), ("propose", propose)):
            if not callable(function) and not (name == "propose" and function is None):
                raise WrongType(f"{name} must be a function, not {type(function).__name__}")
        self.scheduler, self._max_unread = scheduler, whole_number(max_unread, "max_unread", 1, 1 << 40)
        self._stepper = Stepper(scheduler, compute, propose)
        self._stopping = False
        self._asked: set[asyncio.Future[None]] = set()  # submissions that the thread has not answered

    # ---- life

    @property
    def is_running(self) -> bool:
        """Whether the thread steps: it was started and has not ended."""
        return self._stepper.is_running

    @property
    def problem(self) -> BaseException | None:
        """What ended the thread, where it was not asked to end; for health checks."""
        return self._stepper.problem

    def start(self) -> None:
        """Start the thread.

        Raises
        ------
        InvalidArgument
            It was started before.
        """
        self._stepper.start()

    async def stop(self, *, abort_after_s: float | None = None) -> None:
        """Refuse further requests, wait until those that there are have ended, and end the thread.

        Again is fine. It does not close the cache.

        Parameters
        ----------
        abort_after_s : seconds after which the requests that are left are aborted; None to wait for their ends.
        """
        seconds = None if abort_after_s is None else number_of_seconds(abort_after_s, "abort_after_s")
        self._stopping = True
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def tell() -> None:
            if not over.done():
                over.set_result(None)

        self._stepper.stop(lambda: answer(loop, tell))
        if not self._stepper.is_running:  # never started, or over
            return
        if seconds is not None:
            await asyncio.wait([over], timeout=seconds)
            if not over.done():
                self._stepper.abort_all()
        await over

    async def __aenter__(self) -> AsyncScheduler:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(abort_after_s=None if kind is None else 0.0)

    # ---- requests

    async def submit(
        self, prompt: ArrayLike, max_new_tokens: int, *, max_unread: int | None = None, **options: Any
    ) -> Stream:
        """Queue a request; returns once the scheduler has taken it, which can be a step later.

        Parameters
        ----------
        prompt, max_new_tokens : as :meth:`Scheduler.submit`.
        max_unread : in place of the one of all streams.
        options : `tenant`, `priority`, `namespace`, `session`, `stop_tokens`, `n`, `beams`, `deadline_s` and `trace`,
            as :meth:`Scheduler.submit`. Samples stream side by side; beams come whole at the end.

        Raises
        ------
        QueueFull, RequestTooLarge, WrongType, InvalidArgument, NamespaceRequired
            As :meth:`Scheduler.submit`. QueueFull also, without waiting for the thread, where as many submissions as
            may wait have not been answered.
        ClosedError
            The thread was not started, stops, or has ended.
        """
        if self._stopping or not self._stepper.is_running:
            raise ClosedError("this AsyncScheduler takes no requests: it was not started, or was stopped")
        unread = self._max_unread if max_unread is None else whole_number(max_unread, "max_unread", 1, 1 << 40)
        most = self.scheduler.options.max_waiting
        if most is not None and len(self._asked) >= most:
            raise QueueFull(len(self._asked), most, None)
        loop = asyncio.get_running_loop()
        box = Mailbox(loop, unread, self._give_up)
        asked: asyncio.Future[None] = loop.create_future()
        arguments = {"prompt": prompt, "max_new_tokens": max_new_tokens, **options}

        def order(refused: ClosedError | None) -> None:
            if box.abandoned:
                return
            try:
                if refused is not None:
                    raise refused
                self._stepper.submit(box, arguments)
            except Exception as problem:
                answer(loop, _settle, asked, problem)
            else:
                answer(loop, _settle, asked, None)

        self._asked.add(asked)
        try:
            self._stepper.put(order)
            await asked
        except asyncio.CancelledError:
            box.abandon()
            self._abort(box)
            raise
        finally:
            self._asked.discard(asked)
        return Stream(box, self._abort)

    def _abort(self, box: Mailbox, reason: AbortReason = "aborted") -> None:
        self._give_up(box, None, reason)

    def _give_up(self, box: Mailbox, problem: BaseException | None, reason: AbortReason = "aborted") -> None:
        def order(refused: ClosedError | None) -> None:
            if refused is None and box.request is not None and not box.request.ended:
                self._stepper.abort(box.request, problem, reason)

        self._stepper.put(order)


def _settle(asked: asyncio.Future[None], problem: Exception | None) -> None:
    if asked.done():  # cancelled
        return
    if problem is None:
        asked.set_result(None)
    else:
        asked.set_exception(problem)
