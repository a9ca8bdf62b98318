"""Thread count and instruction set of the CPU kernels.

Chosen by the machine, the environment or the caller.
"""

from __future__ import annotations

import os

from pagedkv.cpu import _attend
from pagedkv.errors import InvalidArgument
from pagedkv.spec.sizes import whole_number

MOST_THREADS = 256
THREADS_VARIABLE, ISA_VARIABLE = "PAGEDKV_NUM_THREADS", "PAGEDKV_CPU_ISA"


class _Choice:
    """The threads of this process; None: not decided yet."""

    threads: int | None = None
    isa: str | None = None


def num_threads() -> int:
    """Threads that a call may use.

    As set, else ``PAGEDKV_NUM_THREADS``, else the number of CPUs this process may run on.

    Raises
    ------
    InvalidArgument
        The environment variable is no number from 1 to 256.
    """
    if _Choice.threads is None:
        text = os.environ.get(THREADS_VARIABLE, "")
        if text and not (text.isdecimal() and 1 <= int(text) <= MOST_THREADS):
            raise InvalidArgument(f"{THREADS_VARIABLE} must be a number from 1 to {MOST_THREADS}, it is {text[:40]!r}")
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        _Choice.threads = int(text) if text else min(available, MOST_THREADS)
    return _Choice.threads


def set_num_threads(number: int) -> None:
    """Set the number of threads that calls use, the caller's included.

    Results have the same bits for any number.

    Raises
    ------
    WrongType, InvalidArgument
        Not a whole number from 1 to 256.
    """
    _Choice.threads = checked(number)


def checked(number: int) -> int:
    """A number of threads that makes sense.

    Raises
    ------
    WrongType, InvalidArgument
        Not a whole number from 1 to 256.
    """
    return whole_number(number, "number of threads", 1, MOST_THREADS)


def isa() -> str:
    """The instruction set in use: as set, else ``PAGEDKV_CPU_ISA``, else the best of this CPU.

    Raises
    ------
    InvalidArgument
        The environment variable names none that is here.
    """
    if _Choice.isa is None:
        if name := os.environ.get(ISA_VARIABLE, ""):
            _check_isa(ISA_VARIABLE, name)
        _Choice.isa = name or _attend.isas()[0]
    assert _Choice.isa is not None
    return _Choice.isa


def isas() -> list[str]:
    """The instruction sets that this CPU has kernels for, the best first."""
    return _attend.isas()


def set_isa(name: str) -> None:
    """Select ``"avx512"``, ``"avx2"`` or ``"portable"`` kernels: for tests and comparisons.

    Raises
    ------
    InvalidArgument
        There are no such kernels for this CPU.
    """
    _check_isa("the instruction set", name)
    _Choice.isa = name


def _check_isa(what: str, name: str) -> None:
    here = _attend.isas()
    if name not in here:
        raise InvalidArgument(f"{what} must be one of {', '.join(here)}, which this CPU has; got {str(name)[:40]!r}")
