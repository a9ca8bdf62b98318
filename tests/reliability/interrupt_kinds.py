"""What interrupts a call.

The exceptions that must come out of it, and how signals and the watchdog raise them.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


class HandlerTimeout(Exception):
    """What a signal handler of the caller's raises."""


class Foreign(Exception):
    """What a callback of the caller's raises: it must not come out of the library."""


class Hung(BaseException):
    """The watchdog: a call did not come back. Its text says where it was."""


KINDS: tuple[type[BaseException], ...] = (KeyboardInterrupt, HandlerTimeout, SystemExit, MemoryError)


def innermost(problem: BaseException, folder: str) -> str:
    """The innermost line of an exception that is in a folder, for a report."""
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if folder in frame.filename]
    return f"{frames[-1].filename.rpartition(folder)[2]}:{frames[-1].lineno}" if frames else "elsewhere"


def deliver(number: int, frame: FrameType | None) -> None:
    """A signal handler of the program's, which raises what is `PENDING`.

    The tracer calls it as if a signal had come.
    """
    raise PENDING.pop()


PENDING: list[BaseException] = []
signal.signal(signal.SIGUSR1, deliver)


class Alarm:
    """The only owner of SIGALRM in the process.

    The alarm is a signal in the middle of a call, or the watchdog, never both.

    Attributes
    ----------
    arrived : the frame that the signal came in, as (file, line, function) from the inside out; empty before it came.
    """

    AGAIN_S = 5.0  # the watchdog raises again: something may have swallowed it

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._problem: BaseException | None = None
        self._watching = False
        self._until = 0.0
        self.arrived: list[tuple[str, int, str]] = []
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        problem, self._problem = self._problem, None
        if problem is None:
            if not self._watching:
                return  # the call was over before its signal came
            if (left := self._until - time.monotonic()) > 0:  # nor is this the watchdog's
                signal.setitimer(signal.ITIMER_REAL, left, self.AGAIN_S)
                return
            stack = [f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in traceback.extract_stack(frame)[:-7:-1]]
            raise Hung(f"still there after {self._patience_s} s, in {', '.join(stack)}")
        self._set()
        self.arrived = []
        while frame is not None:
            self.arrived.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        raise problem

    def interrupt(self, call: Callable[[], object], problem: BaseException, after_s: float) -> None:
        """Call it, with a signal after `after_s` seconds if it still runs.

        Then the watchdog takes over.
        """
        self.arrived, self._watching = [], False
        try:
            self._problem = problem
            signal.setitimer(signal.ITIMER_REAL, max(after_s, 1e-6))
            call()
        finally:
            self._problem = None
            self._set()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raise Hung in here where it takes too long."""
        self._set()
        try:
            yield
        finally:
            self._watching = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _set(self) -> None:
        """Watch from now on."""
        self._until = time.monotonic() + 0.9 * self._patience_s
        signal.setitimer(signal.ITIMER_REAL, self._patience_s, self.AGAIN_S)
        self._watching = True


class Callbacks:
    """Counts calls of the caller's callbacks, and raises in number `target` (0: in none).

    Attributes
    ----------
    passed : calls so far.
    raised : the name of the callback that raised; "" if none did.
    """

    def __init__(self) -> None:
        self._target, self._problem = 0, Foreign()
        self.passed, self.raised = 0, ""
        self.names: dict[str, int] = {}
        self.in_finalizer = False

    def arm(self, target: int, problem: Any = None) -> None:
        """Count from here."""
        self._target, self._problem, self.passed, self.raised = target, problem, 0, ""
        self.names = {}

    def __call__(self, name: str) -> None:
        """Count a callback of this name.

        Interrupts are raised in the caller's thread alone.
        """
        in_caller = threading.current_thread() is threading.main_thread()
        if not in_caller and not isinstance(self._problem, Exception):
            return
        self.passed += 1
        self.names[name] = self.names.get(name, 0) + 1
        if self.passed == self._target:
            self.raised = name
            frame = sys._getframe()
            while frame.f_back is not None and frame.f_code.co_name != "__del__":
                frame = frame.f_back
            self.in_finalizer = frame.f_code.co_name == "__del__"
            raise self._problem
