"""Calls that may never come back: a dying device, a network mount whose server is gone.

No thread that is inside such a call can be stopped, and the memory it may still touch belongs to it until it is back.
All that can be done is to wait for it no longer, to know that, and to send nobody after it.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagedkv._monitor import Monitor

HANG_S = 10.0  # a call into a store that takes longer hangs

Key = TypeVar("Key")


@dataclass(slots=True)
class _Call:
    store: int
    since: float
    thread: threading.Thread
    hangs: bool = False


class Calls(Generic[Key]):
    """The calls into stores that are under way, by what they carry out. Its owner's lock guards it."""

    def __init__(self) -> None:
        self._calls: dict[Key, _Call] = {}

    def begin(self, key: Key, store: int, now: float) -> None:
        """The calling thread is about to enter the store of that number."""
        self._calls[key] = _Call(store, now, threading.current_thread())

    def end(self, key: Key) -> bool:
        """A call is back; whether it hung."""
        return self._calls.pop(key).hangs

    def under_way(self) -> list[Key]:
        """All of them."""
        return list(self._calls)

    def mark_hanging(self, since: float) -> list[Key]:
        """Calls that began at `since` or before hang; those that did not until now."""
        found = [key for key, call in self._calls.items() if call.since <= since and not call.hangs]
        for key in found:
            self._calls[key].hangs = True
        return found

    def oldest(self) -> float | None:
        """When the first of those that do not hang began; None without any."""
        return min((call.since for call in self._calls.values() if not call.hangs), default=None)

    def hanging_stores(self) -> set[int]:
        """Numbers of the stores into which a call hangs."""
        return {call.store for call in self._calls.values() if call.hangs}

    def lost_threads(self) -> list[threading.Thread]:
        """Threads inside a call that hangs."""
        return [call.thread for call in self._calls.values() if call.hangs]


class Errand:
    """Work that a thread of its own does once, while callers wait for it: one that is interrupted leaves it whole.

    Parameters
    ----------
    work : callable
        What it raises is raised by :meth:`ends_within`.
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
        """Begin, unless it was begun before; whether it is over in that time. If not, its thread goes on."""
        if self._state == "waits":
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the interpreter is ending, and has no more threads
                self._run()
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._state == "over", seconds)
        if is_over and self._problem is not None:
            raise self._problem
        return is_over

    def _run(self) -> None:
        with self._changed:
            if self._state != "waits":  # an interrupted caller had begun it
                return
            self._state = "runs"
        try:
            self._work()
        except BaseException as problem:
            self._problem = problem
        with self._changed:
            self._state = "over"
            self._changed.notify_all()


def ends_within(seconds: float, work: Callable[[], object]) -> bool:
    """Whether `work` was over in that time; if not, a thread goes on with it. What it raises in that time comes out."""
    return Errand(work).ends_within(seconds)
