"""Argument checks of the sizing functions.

Real numbers within bounds, and lengths one by one or many at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.kv_spec import MAX_BLOCK_SIZE
from pagedkv.spec.sizes import MAX_SIZE, Bytes, check_plain, whole_number

Named = TypeVar("Named")
MAX_TOKENS = 2**40  # in one sequence: past any context, and far from overflow
MAX_PARAMS = 10**15  # weights of a model


def real_number(value: Any, name: str, low: float = 0.0, high: float = math.inf) -> float:
    """`value` as a finite float in ``low..high``.

    Raises
    ------
    WrongType, InvalidArgument
    """
    check_plain(value, name)
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise WrongType(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and low <= number <= high):
        bounds = f"at least {low:g}" if high == math.inf else f"in {low:g}..{high:g}"
        raise InvalidArgument(f"{name} must be finite and {bounds}, got {number:g}")
    return number


def rate(value: Any, name: str) -> float:
    """`value` as a finite float above 0: a divisor.

    Raises
    ------
    WrongType, InvalidArgument
    """
    number = real_number(value, name)
    if number == 0:
        raise InvalidArgument(f"{name} must be above 0")
    return number


def token_count(value: Any, name: str = "num_tokens", low: int = 0) -> int:
    """`value` as a number of tokens.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return whole_number(value, name, low, MAX_TOKENS)


def byte_count(value: Any, name: str, low: int = 0) -> int:
    """`value` as a number of bytes.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return whole_number(value, name, low, MAX_SIZE, unit=Bytes)


def block_tokens(value: Any) -> int:
    """`value` as a block size in tokens, 1..256 as in :class:`pagedkv.KVSpec`.

    Raises
    ------
    WrongType, InvalidArgument
    """
    return whole_number(value, "block_size", 1, MAX_BLOCK_SIZE)


def by_name(table: Mapping[str, Named], name: Any, what: str, advice: str = "") -> Named:
    """The entry of a table under this name; capitals do not count.

    Parameters
    ----------
    table
    name : as its user wrote it.
    what : is looked for, in a word or two.
    advice : what else can be done, for the error.

    Raises
    ------
    WrongType
        Not text.
    InvalidArgument
        Nothing has that name; the message names what there is.
    """
    if not isinstance(name, str):
        raise WrongType(f"the name of a {what} is text, not {type(name).__name__}")
    found = table.get(name.strip().lower())
    if found is None:
        raise InvalidArgument(f"no {what} {name[:60]!r} here; {advice}one of: {', '.join(table)}")
    return found


def length_array(lengths: Any) -> NDArray[np.int64]:
    """`lengths` as int64 [num_sequences], at least one, none negative.

    Raises
    ------
    WrongType, InvalidArgument
    """
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise WrongType("lengths must be whole numbers, [num_sequences]") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise WrongType(f"lengths must be whole numbers, [num_sequences]; got {array.dtype} {list(array.shape)}")
    if not array.size or array.min() < 0 or array.max() > MAX_TOKENS:
        raise InvalidArgument(f"lengths must be one or more numbers in 0..{MAX_TOKENS}")
    return array.astype(np.int64)
