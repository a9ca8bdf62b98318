"""Element types by name, as DLPack codes and as NumPy dtypes.

Types that NumPy lacks come from ``ml_dtypes``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pagedkv.errors import ExchangeRefused, WrongType

# name -> (DLPack type code, bits); whole bytes only
CODES: dict[str, tuple[int, int]] = {
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "bool": (6, 8),
    "float8_e3m4": (7, 8),
    "float8_e4m3": (8, 8),
    "float8_e4m3b11fnuz": (9, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}
NAMES = {code: name for name, code in CODES.items()}


def dtype_name(dtype: Any) -> str:
    """Canonical name of a dtype: a name of ``CODES``, or anything NumPy takes for one of them.

    Raises
    ------
    WrongType
        No dtype, one that no framework exchanges (objects, text, records), or foreign byte order.
    """
    if isinstance(dtype, str) and dtype in CODES:
        return dtype
    if isinstance(dtype, np.dtype):
        return _name_of(dtype)
    try:
        return _name_of(np.dtype(dtype))
    except (TypeError, ValueError, SyntaxError) as problem:
        if isinstance(problem, WrongType):
            raise
        raise WrongType(f"dtype must be a name or a NumPy dtype, got {dtype!r:.60}") from None


@functools.lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> str:
    name = dtype.name if dtype.isnative else dtype.str
    if name not in CODES:
        raise WrongType(f"arrays of {name!r:.40} cannot be exchanged; one of these can: {', '.join(CODES)}")
    return name


def name_of_code(code: int, bits: int, lanes: int) -> str:
    """Name of DLPack's type code.

    Raises
    ------
    ExchangeRefused
        Vectors as elements, elements of less than a byte, or a code that is not known.
    """
    if lanes != 1 or (code, bits) not in NAMES:
        raise ExchangeRefused(
            f"elements of DLPack code {code}, {bits} bits, {lanes} lanes are not understood; "
            f"one of these is: {', '.join(CODES)}"
        )
    return NAMES[code, bits]


def itemsize(name: str) -> int:
    """Bytes of an element."""
    return CODES[name][1] // 8


def in_numpy(name: str) -> bool:
    """Whether NumPy itself has the dtype, and so a type string for ``__array_interface__``."""
    return not name.startswith(("bfloat", "float8"))


@functools.cache
def bits_dtype(name: str) -> np.dtype[Any]:
    """NumPy's own dtype of the bytes; an unsigned integer as wide where NumPy lacks the type."""
    return np.dtype(name if in_numpy(name) else f"uint{CODES[name][1]}")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of arrays: NumPy's, else that of ``ml_dtypes``.

    Unsigned integers where ``ml_dtypes`` is not installed.
    """
    if in_numpy(name):
        return bits_dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return bits_dtype(name)
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else bits_dtype(name)
