"""Calls that may never come back: a dying device, a network mount whose server is gone.

No thread that is inside such a call can be stopped, and the memory it may still touch belongs to it until it is back.
The mover stops waiting for it, records that it hangs, and sends no other thread into the same store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagedkv.threads.crew import Errand

HANG_S = 10.0  # a call into a store that takes longer hangs
LANE = 4  # from the number of a store to that of its next lane, which hangs with it

Key = TypeVar("Key")


@dataclass(slots=True)
class _Call:
    store: int
    since: float
    thread: threading.Thread
    hangs: bool = False


class Calls(Generic[Key]):
    """The calls into stores under way, by the piece of a ticket that they carry out.

    The owner's lock guards it.
    """

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
        """Numbers of the stores into which a call hangs, whichever their lane: see `store_of`."""
        return {store_of(call.store) for call in self._calls.values() if call.hangs}

    def lost_threads(self) -> list[threading.Thread]:
        """Threads inside a call that hangs."""
        return [call.thread for call in self._calls.values() if call.hangs]


def store_of(number: int) -> int:
    """The number of the store that has the lane of this number."""
    return number % LANE


def ends_within(seconds: float, work: Callable[[], object]) -> bool:
    """Run `work` on a thread; whether it ended in time.

    If not, the thread goes on. An error raised in time is raised here.
    """
    return Errand(work).ends_within(seconds)
