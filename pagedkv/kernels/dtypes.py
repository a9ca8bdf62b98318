"""Element types as the kernels name them, and which NumPy or CuPy dtype holds each."""

from __future__ import annotations

from typing import Any

from pagedkv.errors import WrongType

# Name of a dtype here -> its name in kernels_cu (dtypes.cuh), bytes per element.
CUDA_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "i8",
}
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1}
QUANTISED = frozenset({"float8_e4m3", "float8_e5m2", "int8"})

# Bits of a type NumPy has not: bfloat16 as uint16 (pagedkv.spec.dtypes); fp8 as uint8 only when the caller names it.
_HOLDERS = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "uint16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3",
    "float8_e5m2": "float8_e5m2",
    "int8": "int8",
}
_FLOATS = frozenset(_HOLDERS) - {"uint16", "int8"}  # arrays of these hold nothing else, whatever the caller names


def kernel_dtype(name: str, array: Any, given: str | None = None) -> str:
    """The dtype of an array's elements.

    ``given`` where the array's own dtype only says how wide they are.

    Raises
    ------
    WrongType
        No kernel has this dtype, or ``given`` is another than the array's own, or of another size.
    """
    held = array.dtype.name
    if held == "float8_e4m3":
        raise WrongType(f"{name} has dtype {held} of ml_dtypes, which has infinities: take float8_e4m3fn")
    found = given if given is not None else _HOLDERS.get(held)
    if found not in CUDA_NAMES:
        raise WrongType(
            f"{name} has dtype {held}{f' (given as {given!r})' if given else ''}: the kernels take "
            f"{', '.join(CUDA_NAMES)}; fp8 kept in uint8 must be named, for instance kv_dtype='float8_e4m3'"
        )
    own = _HOLDERS.get(held) if held in _FLOATS else found
    if ITEMSIZES[found] != array.dtype.itemsize or own != found:
        raise WrongType(f"{name} must hold {found}, got dtype {held}")
    if not array.dtype.isnative:
        raise WrongType(f"{name} has dtype {array.dtype}, in another byte order than the machine's")
    return found
