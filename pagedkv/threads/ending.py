"""The order in which pagedkv's parts end with the process.

``import pagedkv`` loads most of them later, at their first use. One handler stands for all, registered by the import:
handlers that a program registers after it, such as ``atexit.register(cache.close)``, find all parts at work.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

_steps: list[Callable[[], object]] = []


def at_end(step: Callable[[], object]) -> Callable[[], object]:
    """Decorate a function that the end of the interpreter calls, the last one first."""
    _steps.append(step)
    return step


@atexit.register
def _end() -> None:
    problem: BaseException | None = None
    while _steps:
        try:
            _steps.pop()()
        except BaseException as error:  # noqa: PERF203 - the others are called all the same
            problem = error
    if problem is not None:
        raise problem
