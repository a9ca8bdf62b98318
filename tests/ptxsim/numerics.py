"""Number formats and roundings that NumPy lacks.

The formats are bf16, fp8 and tf32; the roundings are towards zero and one rounding of a*b+c.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bits = NDArray[Any]

_LOW29 = np.array((1 << 29) - 1, np.uint64)
_HALF29 = np.array(1 << 28, np.uint64)
_ONE = np.array(1, np.uint64)
_SIXTEEN = np.array(16, np.uint32)
_LOW16 = np.array(0xFFFF, np.uint32)


def bf16_to_f32(bits: Bits) -> F32:
    """Exact."""
    return (bits.astype(np.uint32) << _SIXTEEN).view(np.float32)


def f32_to_bf16(values: F32, mode: str = "rn") -> Bits:
    """Bits of the nearest bf16 (ties to even), or of the one towards zero; NaN becomes 0x7fff."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    if mode == "rn":
        rounded = bits + (((bits >> _SIXTEEN) & np.uint32(1)) + np.uint32(0x7FFF))
    else:
        rounded = bits
    out = (rounded >> _SIXTEEN).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        out = np.where(nan, np.uint16(0x7FFF), out)
    return out


def two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """The rounded sum and its exact error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def round_to_odd(total: F64, error: F64) -> F64:
    """Adjust a rounded sum so that it can be rounded again to fewer bits.

    The second rounding then gives what one rounding would have given.
    """
    bits = np.array(total).view(np.uint64)
    even = (bits & _ONE) == 0
    fix = even & (error != 0) & np.isfinite(total)
    if not fix.any():
        return total
    away = (error > 0) == (total > 0)  # the exact value is larger in magnitude
    return np.where(fix, np.where(away, bits + _ONE, bits - _ONE), bits).view(np.float64)


def fma_f32(a: F32, b: F32, c: F32) -> F32:
    """Compute a*b+c with one rounding.

    The product is exact in float64, and ties made by rounding the sum are put right.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    tie = (np.asarray(total).view(np.uint64) & _LOW29) == _HALF29
    if tie.any():
        some = np.flatnonzero(tie)
        addend = np.broadcast_to(np.asarray(c, np.float64), total.shape)[some]
        total[some] = round_to_odd(*two_sum(np.broadcast_to(product, total.shape)[some], addend))
    return total.astype(np.float32)


def fma_wide(a: F64, b: F64, c: F64) -> F64:
    """a*b+c in float64, rounded to odd: for results of 8 or 11 bits."""
    return round_to_odd(*two_sum(a * b, c))


def to_f32(values: F64, mode: str) -> F32:
    """Round float64 to float32: rn, rz, rm (down) or rp (up)."""
    out = values.astype(np.float32)
    if mode == "rn":
        return out
    wide = out.astype(np.float64)
    if mode == "rz":
        wrong = np.abs(wide) > np.abs(values)
        return np.where(wrong, np.nextafter(out, np.float32(0)), out)
    if mode == "rm":
        return np.where(wide > values, np.nextafter(out, np.float32(-np.inf)), out)
    return np.where(wide < values, np.nextafter(out, np.float32(np.inf)), out)


def to_f16(values: Any, mode: str = "rn") -> NDArray[np.float16]:
    """Round float32 or float64 to float16: rn or rz."""
    out = np.asarray(values).astype(np.float16)
    if mode == "rz":
        wrong = np.abs(out.astype(np.float64)) > np.abs(values)
        out = np.where(wrong, np.nextafter(out, np.float16(0)), out)
    return out


def _fp8_table(exponent_bits: int, mantissa_bits: int, bias: int, infinite: bool) -> F32:
    codes = np.arange(256)
    sign = np.where(codes >= 128, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    top = (1 << exponent_bits) - 1
    if infinite:
        value = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    return (sign * value).astype(np.float32)


FP8 = {"e4m3": _fp8_table(4, 3, 7, False), "e5m2": _fp8_table(5, 2, 15, True)}
_FP8_TOP = {"e4m3": 0x7E, "e5m2": 0x7B}


def fp8_to_f32(codes: Bits, kind: str) -> F32:
    """Exact; ``kind`` is e4m3 or e5m2."""
    return FP8[kind].take(codes.astype(np.int64))


def f32_to_fp8(values: Any, kind: str) -> Bits:
    """Return codes of the nearest fp8 (ties to even).

    Values that are too large, infinity included, become the largest (satfinite).
    """
    top = _FP8_TOP[kind]
    ladder = FP8[kind][: top + 1].astype(np.float64)
    middles = (ladder[1:] + ladder[:-1]) / 2
    wide = np.asarray(values, np.float64)
    size = np.abs(wide)
    code = np.searchsorted(middles, size, "left")
    tie = (code < top) & (size == middles[np.minimum(code, top - 1)]) & (code % 2 == 1)
    code = np.minimum(code + tie, top)
    code = np.where(np.isnan(wide), 0x7F, code).astype(np.uint8)
    return np.where(np.signbit(wide) & ~np.isnan(wide), code | 0x80, code).astype(np.uint8)


def to_tf32(values: F32, mode: str = "rna") -> F32:
    """Round float32 to 10 mantissa bits: ties away from zero (rna) or to even (rn)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    add = np.uint32(0x1000) if mode == "rna" else np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    rounded = ((bits + add) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values).astype(np.float32)


def halves(words: Bits) -> tuple[Bits, Bits]:
    """Low and high 16 bits of each 32-bit word."""
    pairs = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return pairs[..., 0], pairs[..., 1]


def join_halves(low: Bits, high: Bits) -> Bits:
    """32-bit words of two 16-bit columns (as bits)."""
    out = np.empty((*np.broadcast_shapes(low.shape, high.shape), 2), np.uint16)
    out[..., 0], out[..., 1] = low.view(np.uint16), high.view(np.uint16)
    return out.view(np.uint32)[..., 0]
