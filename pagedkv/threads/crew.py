"""Threads for callers that a signal may interrupt at any moment.

``threading.Thread.start`` and the futures of an executor wait in a ``threading.Condition``, and a signal's exception
that comes while its lock is being taken leaves that taken: the thread, or the pool's end, then waits for ever. Here
callers wait in a Monitor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from pagedkv.threads.monitor import Monitor
from pagedkv.threads.spawn import spawn

BEGIN_S = 60.0  # until a thread that does not say that it has begun is given up
START_S = 1.0  # until a thread that has not begun is taken for one that never will

Item = TypeVar("Item")
Result = TypeVar("Result")


class Thread(Protocol):
    """The part of `threading.Thread` that is used here."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def ident(self) -> int | None:
        """Of a thread that has begun."""

    def start(self) -> None:
        """Begin its work."""

    def join(self) -> None:
        """Wait until the work is over."""

    def is_alive(self) -> bool:
        """Whether it has begun and is not over."""


class Errand:
    """Work that one thread does once, while callers wait for it.

    A caller that is interrupted leaves the work whole.

    Parameters
    ----------
    work : callable
        Its exception is raised by :meth:`ends_within`.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._changed = Monitor()
        self._state = "waits"
        self._problem: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it is over because it raised."""
        return self._problem is not None

    def ends_within(self, seconds: float) -> bool:
        """Start the work unless it was started before; whether it ends in time.

        If not, its thread goes on.
        """
        while self._state == "waits":
            try:
                spawn(self._run)
            except RuntimeError:  # the interpreter is ending, and has no more threads
                self._run()
            with self._changed:
                self._changed.wait_for(lambda: self._state != "waits", START_S)  # a thread may die before it begins
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._state == "over", seconds)
        if is_over and self._problem is not None:
            raise self._problem
        return is_over

    def _run(self) -> None:
        with self._changed:
            if self._state != "waits":  # another thread had begun it
                return
            self._state = "runs"
        try:
            self._work()
        except BaseException as problem:
            self._problem = problem
        finally:
            self._state = "over"  # those who wait see it soon, even where there is no memory to wake them
        with self._changed:
            self._changed.notify_all()


def start(thread: Thread) -> None:
    """Start a thread, in an errand.

    Raises
    ------
    MemoryError
        It has not begun within a minute: without memory a thread may die before it can say that it has begun.
    """
    if not Errand(thread.start).ends_within(BEGIN_S):
        raise MemoryError(f"thread {thread.name} did not begin: the system has no memory for it")


class Crew(Generic[Item, Result]):
    """Does the same to each of some items, several at a time.

    Iterating gives the results in the items' order.

    A context manager: when it is left, no further item is begun, and it waits for those under way. (An exception in
    the first line of its `__exit__` leaves the threads to go on with the rest.)

    Parameters
    ----------
    work : callable
        Its exception for an item comes out in place of that item's result.
    items : sequence
    num_threads : int
        At most; one is enough for one item.
    """

    def __init__(self, work: Callable[[Item], Result], items: Sequence[Item], num_threads: int) -> None:
        self._work, self._items, self._num_threads = work, items, num_threads
        self._changed = Monitor()
        self._begun = self._under_way = 0
        self._stopping = False
        self._results: dict[int, Result] = {}
        self._problems: dict[int, BaseException] = {}

    def __enter__(self) -> Crew[Item, Result]:
        started = 0
        try:
            for _ in range(min(self._num_threads, len(self._items))):
                spawn(self._serve)
                started += 1
        except RuntimeError:  # no more threads: those that there are do it, or the caller
            if not started:
                self._serve()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopping = True
            self._changed.wait_for(lambda: not self._under_way)

    def __iter__(self) -> Iterator[Result]:
        for at in range(len(self._items)):
            with self._changed:
                self._changed.wait_for(partial(self._is_done, at))
            if at in self._problems:
                raise self._problems.pop(at)
            yield self._results.pop(at)

    def _is_done(self, at: int) -> bool:
        return at in self._results or at in self._problems

    def _serve(self) -> None:
        """A thread: item after item."""
        while True:
            with self._changed:
                if self._stopping or self._begun == len(self._items):
                    return
                at = self._begun
                self._begun += 1
                self._under_way += 1
            try:
                result = self._work(self._items[at])
            except BaseException as problem:
                self._problems[at] = problem
            else:
                self._results[at] = result
                del result
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
