"""Element types by name, and arrays as the C code reads them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cpu import _attend, _write
from pagedkv.errors import WrongType

_OWN_NAMES = {"float8_e4m3fn": "float8_e4m3", "float8_e4m3": "IEEE float8_e4m3"}  # of ml_dtypes: theirs has infinities
_BITS = {"bfloat16": "uint16", "float8_e4m3": "uint8", "float8_e5m2": "uint8"}
_USUAL = {(np.dtype(name).num, given): name for name in ("float32", "float16", "int8") for given in ("", name)} | {
    (np.dtype(_BITS[name]).num, name): name for name in _BITS
}  # asking a dtype for its name takes a microsecond


def dtype_of(what: str, array: Any, given: str = "", allowed: Collection[str] = _attend.DTYPES) -> str:
    """The name of an array's element type, one of `allowed`; `given` where it only holds bits.

    Raises
    ------
    WrongType
        It is no NumPy array, or of another or an unknown type.
    """
    if not isinstance(array, np.ndarray):
        raise WrongType(f"{what} must be a NumPy array, not {type(array).__name__}")
    if not array.dtype.isnative:
        raise WrongType(f"{what} must be in this machine's byte order, got {array.dtype}")
    name = _USUAL.get((array.dtype.num, given))
    if name is not None and name in allowed:
        return name
    own = _OWN_NAMES.get(array.dtype.name, array.dtype.name)
    if given and given != own and _BITS.get(given) != own:
        raise WrongType(f"{what} must be {given}, got {array.dtype}")
    if (given or own) not in allowed:
        raise WrongType(f"{what} must be one of {', '.join(allowed)}, got {array.dtype}")
    return given or own


def source_of(what: str, array: Any, given: str = "") -> str:
    """The name of the element type of an array that is to be converted, in any byte order.

    `given` where the array holds that type's bits.

    Raises
    ------
    WrongType
        It is no NumPy array, or none of those that are read.
    """
    if not isinstance(array, np.ndarray):
        raise WrongType(f"{what} must be a NumPy array, not {type(array).__name__}")
    usual = _USUAL.get((array.dtype.num, "")) or _USUAL.get((array.dtype.num, given))
    if usual in _write.SOURCES:
        return usual
    name: str = array.dtype.name
    if name not in _write.SOURCES:
        raise WrongType(f"{what} must be one of {', '.join(_write.SOURCES)}, got {array.dtype}")
    return name


def apart(array: NDArray[Any], *written: NDArray[Any] | None) -> NDArray[Any]:
    """The array in this machine's byte order.

    A copy if it may overlap memory that is about to be written.
    """
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    shared = any(other is not None and np.may_share_memory(array, other) for other in written)
    return array.copy() if shared else array
