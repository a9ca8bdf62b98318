"""The clock and the threads of a cache.

They are the system's, unless the cache's storage has a `runtime` of its own: a simulation's virtual time, or that of a
test that decides what happens next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from pagedkv._core.dispatch import Dispatch
from pagedkv.threads.crew import Thread
from pagedkv.threads.spawn import spawn

SLICE_S = 0.05  # a caller that waits runs Python this often, which is when a signal's exception can arrive


class Runtime(Protocol):
    """What a cache's deadlines go by, and who does its background work. Any thread may call it."""

    def seconds(self) -> float:
        """The time, which never goes back."""

    def thread(self, work: Callable[[], object], name: str) -> Thread:
        """A daemon thread that is still to be started, for the rounds of a dispatcher."""

    def spawn(self, work: Callable[[], object]) -> None:
        """Begin `work` beside the caller, who may be interrupted at any moment.

        Raises
        ------
        RuntimeError
            There are no more threads.
        """

    def pause(self, dispatch: Dispatch, seen: int, others: bool) -> None:
        """Wait for the end of a move, for a short while.

        The caller looks again with ``dispatch.wait(seen, 0.0, others)``. Virtual time goes on to the next event.
        """


class SystemRuntime:
    """The system's."""

    def seconds(self) -> float:
        """The monotonic clock."""
        return time.monotonic()

    def thread(self, work: Callable[[], object], name: str) -> Thread:
        """One of the interpreter's threads."""
        return threading.Thread(target=work, name=name, daemon=True)

    def spawn(self, work: Callable[[], object]) -> None:
        """Another one of the interpreter's threads."""
        spawn(work)

    def pause(self, dispatch: Dispatch, seen: int, others: bool) -> None:
        """Wait for the end of a move, outside the interpreter's lock."""
        dispatch.wait(seen, SLICE_S, others)


SYSTEM = SystemRuntime()
