"""Sizes: strings such as ``"8GiB"``, ``Bytes`` and ``Blocks``.

Also the number checks that public constructors share.
"""

from __future__ import annotations

import re
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from pagedkv._core.tier import Tier
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.place import is_place

MAX_SIZE = 2**63 - 1
UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}

# ASCII digits only, and few enough of them that no input can make the arithmetic slow.
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([A-Za-z]+)", re.ASCII)
_BLOCKS = re.compile(r" *([0-9]{1,10}) ?[Bb]locks? *", re.ASCII)


class Blocks(int):
    """A number of KV blocks, where a size is asked for: ``device_memory=Blocks(5000)``.

    Raises
    ------
    WrongType, InvalidArgument
        No whole number, negative, or past ``2**63 - 1``.
    """

    __slots__ = ()
    unit = "blocks"  # the core reads it, which cannot import this module

    def __new__(cls, number: int) -> Blocks:
        return super().__new__(cls, whole_number(number, "a number of blocks", 0, MAX_SIZE, unit=Blocks))

    def __repr__(self) -> str:
        return f"Blocks({int(self)})"


class Bytes(int):
    """A size as a number of bytes, for code that has computed one; else write ``"8GiB"``.

    Raises
    ------
    WrongType, InvalidArgument
        No whole number, negative, or past ``2**63 - 1``.
    """

    __slots__ = ()
    unit = "bytes"

    def __new__(cls, number: int) -> Bytes:
        return super().__new__(cls, whole_number(number, "a number of bytes", 0, MAX_SIZE, unit=Bytes))

    def __repr__(self) -> str:
        return f"Bytes({int(self)})"


Size: TypeAlias = str | Blocks | Bytes


def check_size(value: Any, name: str, *, blocks: bool = True) -> None:
    """Raise unless `value` says its unit: a string such as ``"8GiB"``, `Blocks` or `Bytes`.

    Parameters
    ----------
    value : the argument.
    name : of the argument, for errors.
    blocks : False where the size is in bytes: errors then do not advise `Blocks`, and `Blocks` are refused.

    Raises
    ------
    WrongType
        A bare number, or something else.
    InvalidArgument
        A string that is no size.
    """
    if isinstance(value, Blocks) and not blocks:
        raise WrongType(f"{name} is a size in bytes: write a string such as '8GiB' or Bytes, not {value!r}")
    if isinstance(value, Blocks | Bytes):
        return
    if isinstance(value, str):
        try:
            parse_size(value)
        except InvalidArgument as problem:
            hint = f"; a place goes into device={value!r}" if is_place(value) else ""
            if blocks and (count := _BLOCKS.fullmatch(value)):
                hint = f", or pagedkv.Blocks({int(count[1])}) for a number of blocks"
            raise InvalidArgument(f"{name}: {problem}{hint}") from None
        return
    if isinstance(value, Real) and not isinstance(value, bool | Tier):
        shown = value if 0 < value <= MAX_SIZE else "..."  # type: ignore[operator]
        advice = f"pagedkv.Blocks({shown}), " if blocks else ""
        raise WrongType(
            f"{name}={value!r:.40} has no unit: write {advice}pagedkv.Bytes({shown}) or a string such as '8GiB'"
        )
    known = "Blocks or Bytes" if blocks else "or Bytes"
    given = f"Tier.{value.name}" if isinstance(value, Tier) else type(value).__name__
    raise WrongType(f"{name} must be a size: a string such as '8GiB', {known}, not {given}")


def num_bytes_of(value: str | Bytes, name: str) -> int:
    """Bytes of a size that is given in bytes: a string or `Bytes`; `Blocks` are refused.

    Raises
    ------
    WrongType, InvalidArgument
    """
    check_size(value, name, blocks=False)
    return parse_size(value)


def check_plain(value: Any, name: str, write: str = "a plain number") -> None:
    """Raise if `value` is a tier or has a unit, both of which are ints to Python.

    Parameters
    ----------
    value : the argument.
    name : of the argument, for errors.
    write : the advice.

    Raises
    ------
    WrongType
        A `Tier`, `Blocks` or `Bytes`.
    """
    if isinstance(value, Tier):
        raise WrongType(f"{name} is not a tier: write {write}, not Tier.{value.name}")
    if isinstance(value, Blocks | Bytes):
        raise WrongType(f"{name} is not in {value.unit}: write {write}, not {value!r}")


def check_flag(value: Any, name: str) -> None:
    """Raise WrongType unless `value` is True or False."""
    if value is not True and value is not False:
        raise WrongType(f"{name} must be a bool, not {type(value).__name__}")


def number_of_seconds(value: Any, what: str) -> float:
    """`value` as seconds.

    Raises
    ------
    WrongType, InvalidArgument
        It is no number from 0 to below 1e12.
    """
    check_plain(value, what, "a number of seconds")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise WrongType(f"{what} must be a number of seconds, not {type(value).__name__}")
    if not 0 <= value < 1e12:  # type: ignore[operator]
        raise InvalidArgument(f"{what} must be a number of seconds, 0 or more and below 1e12, not {value}")
    return float(value)


def whole_number(value: Any, name: str, low: int, high: int, *, unit: type[Blocks | Bytes] | None = None) -> int:
    """``value`` as an int in ``low..high``.

    Booleans, floats, strings and tiers are no whole numbers.

    Parameters
    ----------
    value : the argument.
    name : of the argument, for errors.
    low, high : smallest and largest allowed number.
    unit : `Blocks` for a number of blocks, `Bytes` for one of bytes, which may then say so; None for all else.

    Raises
    ------
    WrongType
        Not an integer (``int`` or a NumPy integer), a `Tier`, or one of another unit.
    InvalidArgument
        Outside ``low..high``.
    """
    if isinstance(value, bool | np.bool_):
        raise WrongType(f"{name} must be a whole number, not the boolean {value}")
    if not isinstance(value, int | np.integer):
        raise WrongType(f"{name} must be a whole number, not {type(value).__name__}")
    if unit is None or not isinstance(value, unit):
        check_plain(value, name, "a plain int")
    number = int(value)
    if not low <= number <= high:
        shown = number if -MAX_SIZE <= number <= MAX_SIZE else f"{number.bit_length()}-bit number"
        raise InvalidArgument(f"{name} must be in {low}..{high}, got {shown}")
    return number


def parse_size(size: str | int) -> int:
    """Bytes in a size such as ``"8GiB"``, ``"1.5 GB"`` or ``4096``.

    Parameters
    ----------
    size : a number of bytes as an integer, or a string of a number and a unit: B, kB (or KB), MB, GB, TB, PB
        are powers of 1000; KiB, MiB, GiB, TiB, PiB are powers of 1024. Letters count: ``"8Gb"`` would be bits
        and is refused. A string needs its unit.

    Returns
    -------
    int
        Bytes, in ``0..2**63 - 1``.

    Raises
    ------
    WrongType
        Neither a string nor an integer.
    InvalidArgument
        Negative, not a size, not a whole number of bytes, or past ``2**63 - 1``.
    """
    if not isinstance(size, str):
        return whole_number(size, "a size in bytes", 0, MAX_SIZE, unit=Bytes)
    found = _SIZE.fullmatch(size.strip(" "))
    if found is None or found[2] not in UNITS:
        raise InvalidArgument(f"{_quoted(size)} is not a size: write a number, 0 or more, and a unit, as in '8GiB'")
    from fractions import Fraction  # for a size in words alone: it brings decimal

    exact = Fraction(found[1]) * UNITS[found[2]]
    if exact.denominator != 1:
        raise InvalidArgument(f"{_quoted(size)} is not a whole number of bytes")
    if exact > MAX_SIZE:
        raise InvalidArgument(f"{_quoted(size)} is more than {format_size(MAX_SIZE)}")
    return int(exact)


def format_size(num_bytes: int) -> str:
    """``num_bytes`` for people: three digits and a binary unit.

    ``8589934592`` is ``"8.00 GiB"``.
    """
    value, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, bigger
    if unit == "B":
        return f"{num_bytes} B"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def _quoted(text: str) -> str:
    return repr(text) if len(text) <= 40 else repr(text[:40]) + "..."
