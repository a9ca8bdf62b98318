"""PTX types as NumPy types."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.errors import UnsupportedPtx

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8,
    "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "f16": np.float16, "bf16": np.uint16,
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32, "tf32": np.float32,
    "f16x2": np.uint32, "bf16x2": np.uint32, "u16x2": np.uint32, "s16x2": np.uint32,
    "e4m3x2": np.uint16, "e5m2x2": np.uint16,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f64": np.float64,
}  # fmt: skip
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


_NUMPY: dict[str, np.dtype[Any]] = {kind: np.dtype(given) for kind, given in DTYPES.items()}


def dtype_of(kind: str) -> np.dtype[Any]:
    """NumPy type of a PTX type; ``bf16`` and packed types are their bits."""
    found = _NUMPY.get(kind)
    if found is None:
        raise UnsupportedPtx(f"type .{kind}")
    return found


def is_float(kind: str) -> bool:
    """Whether arithmetic on the type is floating point."""
    return kind[0] == "f" or kind[:2] == "bf"


@functools.cache
def immediate(text: str, kind: str) -> NDArray[Any]:
    """A literal as a 0-d array of the type, which is not to be written."""
    dtype = dtype_of(kind)
    prefix = text[:2].lower()
    if prefix == "0f":
        single = np.array(int(text[2:], 16), np.uint32).view(np.float32)
        return single.astype(dtype) if kind == "f64" else single if dtype.kind == "f" else single.view(dtype)
    if prefix == "0d":
        double = np.array(int(text[2:], 16), np.uint64).view(np.float64)
        return double.astype(dtype) if dtype.kind == "f" else double.view(dtype)
    if dtype.kind == "f":
        if "." in text or kind in ("f32", "f64"):
            return np.array(float(text) if "." in text else int(text, 0), dtype)
        bits = int(text, 0) & ((1 << 8 * dtype.itemsize) - 1)  # f16 literals are bits
        return np.array(bits, UNSIGNED[dtype.itemsize]).view(dtype)
    if dtype.kind == "b":
        return np.array(bool(int(text, 0)))
    value = int(text, 0) & ((1 << 8 * dtype.itemsize) - 1)
    return np.array(value, UNSIGNED[dtype.itemsize]).view(dtype)
