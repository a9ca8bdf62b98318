"""Circuit breaker of a disk tier: ok, read_only, off; retries with exponential back-off.

    ok          reads and writes
    read_only   writes are refused at once, reads are served
    off         everything is refused at once: every read is a miss

A failure of the device or of the file system takes the tier one state down, at once where waiting does not help (no
space, quota, read-only, file-size limit) and otherwise after `PATIENCE` failures without a success between them. After
`FIRST_REST_S` seconds, doubled by every failure up to `LONGEST_REST_S`, one call is let through; if it succeeds, the
tier is one state up again. Each change of state is one line in the log.

A tier that is no longer the directory's only owner (its LOCK was deleted or replaced) writes no more until it is
opened again.

A call that hangs takes the tier off at once. It stays off until every such call has come back, and for one more rest,
so that no second thread is lost in the same files.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Literal

from pagedkv.observe.callbacks import Log
from pagedkv.tiers.circuit import Circuit

log = Log(logging.getLogger("pagedkv.tiers.disk"))

State = Literal["ok", "read_only", "off"]

PATIENCE = 8  # blocks
FIRST_REST_S, LONGEST_REST_S = 15.0, 900.0
HANGS = errno.ETIMEDOUT  # the errno recorded for a call that does not come back
HOPELESS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENODEV, errno.ENXIO, errno.ESTALE, HANGS}
)


class CircuitBreaker:
    """The state of one open tier. Calls may come from any thread.

    Parameters
    ----------
    where : the directory's name, for the log.
    never_writes : why the tier cannot write while it is open; empty if it can.
    clock : monotonic seconds.
    """

    def __init__(self, where: str, never_writes: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._where, self._never_writes, self._clock = where, never_writes, clock
        self._lock = threading.RLock()  # reentrant: clocks and log handlers run under it
        self._writes, self._reads = (Circuit(PATIENCE, FIRST_REST_S, LONGEST_REST_S) for _ in range(2))
        self._hanging = 0  # calls
        self._said: State = "ok"
        if never_writes:
            self._said = "read_only"
            log.warning("disk tier %s is read-only: %s", where, never_writes)

    def stop_writing(self, why: str) -> None:
        """Make the tier read-only until it is opened again; `why` goes to the log."""
        with self._lock:
            self._never_writes = why
        self.log_state(why)

    @property
    def state(self) -> State:
        """The state now."""
        if self._hanging or self._reads.shut:
            return "off"
        return "read_only" if self._writes.shut or self._never_writes else "ok"

    @property
    def hangs(self) -> bool:
        """Whether a call hangs now."""
        return self._hanging > 0

    def call_hangs(self) -> None:
        """A call hangs. Follow it with `call_came_back`; nothing is logged before `log_state`."""
        with self._lock:
            self._hanging += 1
            self._reads.learn(self._clock(), 0, 1, hopeless=True)

    def call_came_back(self) -> None:
        """A call that hung is over, whatever came of it."""
        self._learn(self._reads, 0, [HANGS])  # the rest begins now, before the tier can look up again
        with self._lock:
            self._hanging -= 1

    def may_write(self) -> bool:
        """Whether to try a write now. After True the caller must report the outcome by `wrote`."""
        with self._lock:
            if self._hanging:
                return False
            circuit = self._reads if self._reads.shut else self._writes
            return not self._never_writes and circuit.lets_through(self._clock())

    def may_read(self) -> bool:
        """Whether to try a read now. After True the caller must report the outcome by `read`."""
        with self._lock:
            return not self._hanging and self._reads.lets_through(self._clock())

    def wrote(self, successes: int, failures: list[int]) -> None:
        """Report writes or syncs: how many succeeded, and the errno of each that failed."""
        if self._reads.shut:  # a device that takes writes may serve reads again
            self._learn(self._reads, successes, [])
        self._learn(self._writes, successes, failures)

    def read(self, successes: int, failures: list[int]) -> None:
        """Report reads. Bytes that arrive count as a success; `Slots` checks their content."""
        self._learn(self._reads, successes, failures)

    def _learn(self, circuit: Circuit, successes: int, failures: list[int]) -> None:
        with self._lock:
            hopeless = not HOPELESS.isdisjoint(failures)
            circuit.learn(self._clock(), successes, len(failures), hopeless=hopeless)
        self.log_state(_what(failures[-1]) if failures else "writes still fail")

    def log_state(self, why: str = "") -> None:
        """Log one line if the state has changed since the last one."""
        with self._lock:
            state = self.state
            if state == self._said:
                return
            self._said = state
            why = _what(HANGS) if self._hanging else why
        if state == "ok":
            log.warning("disk tier %s works again", self._where)
        else:
            log.warning("disk tier %s is %s now: %s", self._where, state.replace("_", "-"), why)


def _what(number: int) -> str:
    return "a call into it does not come back" if number == HANGS else os.strerror(number)
