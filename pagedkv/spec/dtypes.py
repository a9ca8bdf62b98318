"""The KV dtypes, and bfloat16 and fp8 on machines whose NumPy has none.

bfloat16 is the upper half of a float32. With ``ml_dtypes`` installed arrays have its dtype; without it they
hold the 16 bits as uint16, and fp8's 8 bits as uint8. The bytes are the same either way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.errors import InvalidArgument, WrongType

FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of one number
LARGEST = {"int8": 127.0, "float8_e4m3": 448.0, "float8_e5m2": 57344.0}  # of the quantised ones, which have scales
BYTES = "uint8"  # only the caller knows their meaning
ITEMSIZES = FLOATS | dict.fromkeys((*LARGEST, BYTES), 1)
SHORT = {
    "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip

_IN_ML_DTYPES: dict[str, tuple[str, type[np.generic]]] = {
    "bfloat16": ("bfloat16", np.uint16),
    "float8_e4m3": ("float8_e4m3fn", np.uint8),
    "float8_e5m2": ("float8_e5m2", np.uint8),
}


def dtype_name(dtype: Any) -> str:
    """Canonical name of a KV dtype, one of :data:`ITEMSIZES`.

    Parameters
    ----------
    dtype : a name, or anything NumPy takes for a dtype (``np.float16``, ``ml_dtypes.bfloat16``).

    Raises
    ------
    WrongType
        Not a dtype at all.
    InvalidArgument
        A dtype in which KV cannot be kept, or one in foreign byte order.
    """
    if isinstance(dtype, str):
        name = dtype
    else:
        if dtype is None or isinstance(dtype, bool | int | float):
            raise WrongType(f"dtype must be a name or a NumPy dtype, not {dtype!r}")
        try:
            resolved = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):
            raise WrongType(f"dtype must be a name or a NumPy dtype, not {type(dtype).__name__}") from None
        name = resolved.name if resolved.isnative else resolved.str
        if name == "float8_e4m3":
            raise InvalidArgument("ml_dtypes.float8_e4m3 has infinities and ends at 240: take float8_e4m3fn")
    if name == "float8_e4m3fn":  # of ml_dtypes
        return "float8_e4m3"
    if name not in ITEMSIZES:
        hint = f": write {SHORT[name]!r}" if name in SHORT else ""
        raise InvalidArgument(f"KV dtype must be one of {', '.join(ITEMSIZES)}, got {name[:40]!r}{hint}")
    return name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy dtype for a canonical name.

    bfloat16 is uint16, and fp8 uint8, where ``ml_dtypes`` is not installed.
    """
    if name not in _IN_ML_DTYPES:
        return np.dtype(name)
    own, bits = _IN_ML_DTYPES[name]
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(bits)
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, own))
    return found


def stored_to_float32(stored: NDArray[Any], name: str) -> NDArray[np.float32]:
    """The float32 values of numbers stored in a quantised dtype, exactly, without their scales.

    Parameters
    ----------
    stored : int8, or fp8 in its own dtype or as bits in uint8; any shape.
    name : of :data:`LARGEST`.
    """
    if name == "int8":
        return stored.astype(np.float32)
    bits: NDArray[Any] = np.ascontiguousarray(stored).view(np.uint8).reshape(stored.shape)
    values: NDArray[np.float32] = _FP8_VALUES[name][bits]
    return values


def _fp8_values(exponent_bits: int) -> NDArray[np.float32]:
    """Values of the 256 bit patterns.

    e4m3 has no infinities and one NaN of each sign, e5m2 is half of a float16.
    """
    patterns = np.arange(256, dtype=np.uint16)
    if exponent_bits == 5:
        return (patterns << np.uint16(8)).view(np.float16).astype(np.float32)
    sizes = patterns & 0x7F
    exponents, fractions = (sizes >> 3).astype(np.int32), (sizes & 7).astype(np.float32)
    normal = np.ldexp(1 + fractions / 8, exponents - 7)
    values = np.where(exponents == 0, np.ldexp(fractions, -9), normal)
    values = np.where(sizes == 0x7F, np.nan, values)
    signed: NDArray[np.float32] = np.where(patterns > 0x7F, -values, values).astype(np.float32)
    return signed


def float32_to_bfloat16(values: ArrayLike, out: NDArray[np.uint16] | None = None) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even.

    NaN stays NaN; values that are too large become infinity.

    Parameters
    ----------
    values : float32, any shape.
    out : uint16 of the same shape, written and returned.

    Raises
    ------
    WrongType
        ``values`` is not float32, or ``out`` is not uint16: a silent cast would round twice.
    InvalidArgument
        ``out`` has another shape.
    """
    array = np.asarray(values)
    if array.dtype != np.float32:
        raise WrongType(f"values must be float32, not {array.dtype}")
    bits = np.ascontiguousarray(array).view(np.uint32).reshape(array.shape)
    # Adding 0x7FFF, and one more when the kept half is odd, carries exactly when half-to-even rounds up.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # The quiet bit is set, or a NaN whose payload lies in the lost half would become infinity.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return _deliver(np.where(nan, quiet, rounded).astype(np.uint16), out)


def bfloat16_to_float32(bits: ArrayLike, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The float32 values of bfloat16 ``bits`` (uint16, or ``ml_dtypes.bfloat16``), exactly.

    Raises
    ------
    WrongType
        ``bits`` is neither uint16 nor bfloat16, or ``out`` is not float32.
    InvalidArgument
        ``out`` has another shape.
    """
    array = np.asarray(bits)
    if array.dtype.name == "bfloat16":
        array = np.ascontiguousarray(array).view(np.uint16).reshape(array.shape)
    if array.dtype != np.uint16:
        raise WrongType(f"bits must be uint16 or bfloat16, not {array.dtype}")
    wide = array.astype(np.uint32) << np.uint32(16)
    return _deliver(np.asarray(wide, dtype=np.uint32).view(np.float32), out)


def _deliver(result: NDArray[Any], out: NDArray[Any] | None) -> NDArray[Any]:
    if out is None:
        return result
    if getattr(out, "dtype", None) != result.dtype:
        raise WrongType(f"out must be a {result.dtype} array")
    if out.shape != result.shape:
        raise InvalidArgument(f"out must have shape {result.shape}, not {out.shape}")
    out[...] = result.view(out.dtype)
    return out


_FP8_VALUES = {"float8_e4m3": _fp8_values(4), "float8_e5m2": _fp8_values(5)}
