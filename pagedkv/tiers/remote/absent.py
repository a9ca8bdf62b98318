"""Keys that a store did not have a moment ago, and is not asked about again at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

LASTS_S = 1.0
MOST_KEYS = 65_536


class Absent:
    """A negative cache. Any thread may call it.

    Parameters
    ----------
    clock : monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._until: OrderedDict[str, float] = OrderedDict()  # those that end first come first

    def add(self, key: str) -> None:
        """The store did not have it just now."""
        with self._lock:
            self._until[key] = self._clock() + LASTS_S
            self._until.move_to_end(key)
            if len(self._until) > MOST_KEYS:
                self._until.popitem(last=False)

    def discard(self, key: str) -> None:
        """The store has it now."""
        with self._lock:
            self._until.pop(key, None)

    def first_in(self, keys: Sequence[str]) -> int:
        """Index of the first of these keys known to be absent; their number if none is."""
        with self._lock:
            now = self._clock()
            while self._until and next(iter(self._until.values())) <= now:
                self._until.popitem(last=False)
            if not self._until:
                return len(keys)
            return next((i for i, key in enumerate(keys) if key in self._until), len(keys))
