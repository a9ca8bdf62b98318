"""The caller's clock, made safe: time stands still while it fails.

Also elapsed time that ignores steps back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from numbers import Real
from typing import Any

from pagedkv.errors import InvalidArgument, PagedKVError, WrongType
from pagedkv.observe.callbacks import Log, came_from_signal, has_no_memory

log = Log(logging.getLogger("pagedkv.clock"))

LIMIT_S = 9.2e9  # 291 years: int64 nanoseconds hold no more


def seconds(value: Any) -> float:
    """`value` as a clock's reading.

    Raises
    ------
    WrongType, InvalidArgument
        It is no number, or one that no clock shows: NaN, infinity, or `LIMIT_S` and more from 0.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise WrongType(f"a clock gives seconds as a number, and this one gave {type(value).__name__}")
    if not -LIMIT_S < value < LIMIT_S:  # type: ignore[operator]
        raise InvalidArgument(f"a clock gives seconds, between {-LIMIT_S:g} and {LIMIT_S:g}, and this one gave {value}")
    return float(value)


class Clock:
    """A clock of the caller's. Any thread may read it.

    A reading that fails (the clock raises an Exception, or gives no number of seconds) is counted, the first
    one is logged, and the last good reading stands in for it. MemoryError, KeyboardInterrupt, SystemExit and the
    exceptions of signal handlers come out.

    Parameters
    ----------
    read : callable

    Attributes
    ----------
    failures : readings that failed.

    Raises
    ------
    WrongType, InvalidArgument
        The first reading failed: there is nothing to stand in for it.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        if not callable(read):
            raise WrongType(f"clock must be a function that gives seconds, not {type(read).__name__}")
        self._read, self._counting = read, threading.Lock()
        self.failures = 0
        try:
            self._last = seconds(read())
        except PagedKVError:
            raise
        except Exception as problem:
            if has_no_memory(problem) or came_from_signal(problem):
                raise
            said = f"{type(problem).__name__}: {problem}"
            raise InvalidArgument(f"the clock failed at its first reading, {said}; give one that works") from problem

    def __call__(self) -> float:
        """Seconds, by the last reading that was good."""
        try:
            now = self._read()
            if type(now) is not float or not -LIMIT_S < now < LIMIT_S:
                now = seconds(now)
        except Exception as problem:
            if has_no_memory(problem) or came_from_signal(problem):
                raise
            self._failed(problem)
            return self._last
        self._last = now
        return now

    def _failed(self, problem: Exception) -> None:
        with self._counting:
            self.failures += 1
            first = self.failures == 1
        if first:
            log.warning("the clock fails, and time stands still meanwhile: %s: %s", type(problem).__name__, problem)


class Passed:
    """Elapsed seconds that never fall.

    A clock's step back counts as no time, and time goes on from there.

    For one thread at a time.

    Parameters
    ----------
    clock : callable
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._seen, self._passed = clock, clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._passed += max(0.0, now - self._seen)
        self._seen = now
        return self._passed
