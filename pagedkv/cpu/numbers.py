"""Names of element types, and float32 values as their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cpu import _attend
from pagedkv.dtypes import float32_to_bfloat16
from pagedkv.errors import WrongType

_OWN_NAMES = {"float8_e4m3fn": "float8_e4m3"}  # of ml_dtypes
_BITS = {"bfloat16": "uint16", "float8_e4m3": "uint8", "float8_e5m2": "uint8"}
_USUAL = {(np.dtype(name).num, given): name for name in ("float32", "float16", "int8") for given in ("", name)} | {
    (np.dtype(_BITS[name]).num, name): name for name in _BITS
}  # asking a dtype for its name takes a microsecond


def dtype_of(what: str, array: Any, given: str = "") -> str:
    """The name of an array's element type; `given` where it only holds bits.

    Raises
    ------
    WrongType
        It is no NumPy array, or of another or an unknown type.
    """
    if not isinstance(array, np.ndarray):
        raise WrongType(f"{what} must be a NumPy array, not {type(array).__name__}")
    if not array.dtype.isnative:
        raise WrongType(f"{what} must be in this machine's byte order, got {array.dtype}")
    if name := _USUAL.get((array.dtype.num, given)):
        return name
    own = _OWN_NAMES.get(array.dtype.name, array.dtype.name)
    if given and given != own and _BITS.get(given) != own:
        raise WrongType(f"{what} must be {given}, got {array.dtype}")
    if (given or own) not in _attend.DTYPES:
        raise WrongType(f"{what} must be one of {', '.join(_attend.DTYPES)}, got {array.dtype}")
    return given or own


def bits_of(values: NDArray[np.float32], name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The nearest numbers of a type, ties to even, as an array of `dtype` (the type itself, or unsigned bits).

    int8 and fp8 saturate; NaN stays NaN, in int8 it is 0.

    Raises
    ------
    ImportError
        fp8 without ml_dtypes.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found: NDArray[Any]
        if name == "int8":
            found = np.nan_to_num(np.clip(np.rint(values), -127, 127), nan=0).astype(np.int8)
            return found
        if name == "bfloat16":
            found = float32_to_bfloat16(values).view(dtype)
            return found
        if name.startswith("float8"):
            return _float8(values, name).view(dtype)
        return values.astype(dtype)


def _float8(values: NDArray[np.float32], name: str) -> NDArray[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"writing {name} needs ml_dtypes: pip install ml_dtypes") from error
    largest, kind = (448, ml_dtypes.float8_e4m3fn) if name == "float8_e4m3" else (57344, ml_dtypes.float8_e5m2)
    found: NDArray[Any] = np.clip(values, -largest, largest).astype(kind)
    return found
