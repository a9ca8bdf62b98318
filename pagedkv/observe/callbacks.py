"""Calls of the caller's functions: clocks, progress callbacks, log handlers.

An Exception that one of them raises goes no further.

What comes out all the same: KeyboardInterrupt, SystemExit and other BaseExceptions, and what one of the program's own
signal handlers raises, wherever the signal arrives. A timeout by ``signal.alarm`` works through all of these callbacks.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from types import CodeType
from typing import Any

from pagedkv.errors import PagedKVError


def is_refusal(problem: BaseException) -> bool:
    """Whether the library refused a request, with nothing half done.

    Never true of a signal handler's error.
    """
    return isinstance(problem, PagedKVError) and not came_from_signal(problem)


def has_no_memory(problem: BaseException) -> bool:
    """Whether the process is out of memory.

    OutOfBlocks is a MemoryError as well, but says that a tier is full.
    """
    return isinstance(problem, MemoryError) and not isinstance(problem, PagedKVError)


def is_interrupt(problem: BaseException) -> bool:
    """Whether it comes out of the call that it arrives in, whatever else that call survives."""
    return not isinstance(problem, Exception) or has_no_memory(problem) or came_from_signal(problem)


def came_from_signal(problem: BaseException) -> bool:
    """Whether a signal handler of the program raised it.

    Its traceback goes through a handler that is installed now.
    """
    installed = (signal.getsignal(number) for number in signal.valid_signals())
    handlers = {_code_of(handler) for handler in installed if callable(handler)} - {None}
    trace = problem.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """The code that runs when a Python function, method, partial or callable object is called.

    None for anything else.
    """
    for _ in range(8):  # partials of methods of objects
        if isinstance(code := getattr(handler, "__code__", None), CodeType):
            return code
        for inner in ("__func__", "func"):
            if callable(getattr(handler, inner, None)):
                handler = getattr(handler, inner)
                break
        else:
            handler = type(handler).__call__
    return None


class Log:
    """A logger whose handlers and filters cannot fail the caller.

    An Exception that they raise is dropped.

    Parameters
    ----------
    logger : logging.Logger
    """

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def info(self, message: str, *values: object) -> None:
        """As ``logging.Logger.info``."""
        self._say(logging.INFO, message, values, None)

    def warning(self, message: str, *values: object, exc_info: BaseException | None = None) -> None:
        """As ``logging.Logger.warning``."""
        self._say(logging.WARNING, message, values, exc_info)

    def exception(self, message: str, *values: object) -> None:
        """As ``logging.Logger.exception``, where an exception is being handled."""
        self._say(logging.ERROR, message, values, True)

    def _say(self, level: int, message: str, values: tuple[object, ...], exc_info: BaseException | bool | None) -> None:
        try:
            self._logger.log(level, message, *values, exc_info=exc_info, stacklevel=3)
        except Exception as problem:
            if came_from_signal(problem):
                raise


log = Log(logging.getLogger("pagedkv.callbacks"))


class Told:
    """A callback of the caller's whose result is ignored; its first Exception is logged.

    Parameters
    ----------
    callback : callable
    name : of the argument that it was given as.

    Attributes
    ----------
    failures : calls that raised an Exception.
    """

    def __init__(self, callback: Callable[..., object], name: str) -> None:
        self._callback, self._name = callback, name
        self.failures = 0

    def __call__(self, *values: Any) -> None:
        try:
            self._callback(*values)
        except Exception as problem:
            if has_no_memory(problem) or came_from_signal(problem):
                raise
            self.failures += 1
            if self.failures == 1:
                log.warning("%s raised, and may again; the work goes on", self._name, exc_info=problem)
