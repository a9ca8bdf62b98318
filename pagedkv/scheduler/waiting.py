"""How a caller waits while nothing can run: for a load, a deadline, or another thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pagedkv.cache.cache import KVCache
from pagedkv.scheduler.running import Running

LOOK_S = 0.05  # a caller that waits looks so often at its clock, which may be any


class Waiting:
    """Waits until `schedule` is worth calling.

    Parameters
    ----------
    cache, running : of the scheduler.
    seconds_left : until its next deadline, by its clock.

    Attributes
    ----------
    is_news : whether a request came, or another thread has woken this one, since the last plan.
    """

    def __init__(self, cache: KVCache, running: Running, seconds_left: Callable[[], float]) -> None:
        self._moves, self._running, self._seconds_left = cache.moves, running, seconds_left
        self.is_news = False

    def wake(self) -> None:
        """For any thread: a caller that waits returns."""
        self.is_news = True
        self._moves.wake()

    def until_worth_it(self, timeout_s: float | None) -> bool:
        """False where `timeout_s` seconds have passed and nothing has happened."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            seen = self._moves.num_ended
            self._moves.carry_out()
            if self.is_news or self._is_worth_it():
                return True
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            if not self._moves.wait_since(seen, min(LOOK_S, left_s)):
                return True  # nothing is under way at all

    def _is_worth_it(self) -> bool:
        running = self._running
        if running.short_since is not None:
            if self._moves.num_ended != running.short_since:
                return True
        elif running.requests or not running.loading:
            return True
        return running.loading.is_any_over() or self._seconds_left() <= 0
