"""cvt: between all integer and float types, roundings, saturation, packed and fp8 forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.elementwise import function_step, preserving_subnormals
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.numerics import (
    bf16_to_f32,
    f32_to_bf16,
    f32_to_fp8,
    fp8_to_f32,
    halves,
    join_halves,
    to_f16,
    to_f32,
    to_tf32,
)
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Instruction
from tests.ptxsim.types import dtype_of, is_float

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_INTEGRAL: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLOAT_ROUNDING = ("rn", "rz", "rm", "rp", "rna")
_MODS = (*_INTEGRAL, *_FLOAT_ROUNDING, "ftz", "sat", "relu", "satfinite", "pack")


@opcode("cvt")
def _bind_cvt(ins: Instruction, m: Machine) -> Step:
    if "pack" in ins.mods:
        return _pack_integers(ins, m)
    to, kind = ins.mods[-2], ins.mods[-1]
    require(ins, *_MODS, to, kind)
    if to.endswith("x2") or kind.endswith("x2"):
        return _packed(ins, m, to, kind)
    if to == "tf32":
        target, source = m.regs.target(ins.operands[0], "b32"), m.regs.source(ins.operands[1], "f32")
        mode = "rna" if ins.has("rna") else "rn"
        if kind != "f32" or ins.has("satfinite") or not (ins.has("rna") or ins.has("rn")):
            raise UnsupportedPtx("this cvt to tf32")
        return function_step(lambda a: to_tf32(a, mode).view(np.uint32), target, source)
    rounding = next((mod for mod in ins.mods if mod in _INTEGRAL or mod in _FLOAT_ROUNDING), "rn")
    target = m.regs.widened_target(ins.operands[0], to)
    source = m.regs.source(ins.operands[1], kind)
    if target.dtype == dtype_of(to) and _is_assignment(to, kind, rounding, ins):
        step = function_step(lambda a: a, target, source)
    else:
        step = function_step(_conversion(to, kind, rounding, ins), target, source)
    keeps = "f32" in (to, kind) and is_float(kind) and not ins.has("ftz")
    return preserving_subnormals(step) if keeps else step


def _is_assignment(to: str, kind: str, rounding: str, ins: Instruction) -> bool:
    """Whether NumPy's conversion on assignment does this conversion.

    It wraps integers and rounds to nearest.
    """
    if "bf16" in (to, kind) or ins.has("sat") or ins.has("relu"):
        return False
    if is_float(kind):
        return is_float(to) and rounding == "rn"
    return not is_float(to) or (rounding == "rn" and to != "f16")


def _conversion(to: str, kind: str, rounding: str, ins: Instruction) -> Callable[[Row], Row]:
    if is_float(kind):
        return _float_to_float(to, kind, rounding, ins) if is_float(to) else _float_to_integer(to, kind, rounding)
    if not is_float(to):
        return _saturated(to) if ins.has("sat") else lambda a: a.astype(dtype_of(to))
    if to == "bf16":
        return lambda a: f32_to_bf16(to_f32(a.astype(np.float64), "rn"))
    if to == "f16":
        return lambda a: to_f16(a.astype(np.float64), rounding)
    if to == "f32" and rounding != "rn":
        if dtype_of(kind).itemsize == 8:
            raise UnsupportedPtx(f"cvt.{rounding} of a 64-bit integer")
        return lambda a: to_f32(a.astype(np.float64), rounding)
    return lambda a: a.astype(dtype_of(to))


def _saturated(to: str) -> Callable[[Row], Row]:
    limits = np.iinfo(dtype_of(to))

    def convert(a: Row) -> Row:
        out = a
        if np.iinfo(a.dtype).max > limits.max:
            out = np.minimum(out, a.dtype.type(limits.max))
        if np.iinfo(a.dtype).min < limits.min:
            out = np.maximum(out, a.dtype.type(limits.min))
        return out.astype(dtype_of(to))

    return convert


def _float_to_integer(to: str, kind: str, rounding: str) -> Callable[[Row], Row]:
    """Out of range clamps; NaN gives 0."""
    if rounding not in _INTEGRAL:
        raise UnsupportedPtx(f"cvt.{rounding} of a float to an integer")
    round_, dtype = _INTEGRAL[rounding], dtype_of(to)
    limits = np.iinfo(dtype)

    def convert(a: Row) -> Row:
        wide = bf16_to_f32(a).astype(np.float64) if kind == "bf16" else np.asarray(a).astype(np.float64)
        values = round_(wide)
        inside = (values >= float(limits.min)) & (values < float(limits.max) + (1 if dtype.itemsize < 8 else 0))
        out = np.where(inside, values, 0).astype(dtype)
        out = np.where(~inside & (values > 0), limits.max, out)
        return np.where(~inside & (values < 0), limits.min, out).astype(dtype)

    return convert


def _float_to_float(to: str, kind: str, rounding: str, ins: Instruction) -> Callable[[Row], Row]:
    saturating, relu = ins.has("sat"), ins.has("relu")

    def widen(a: Row) -> Row:
        return bf16_to_f32(a) if kind == "bf16" else a

    def shape(values: Row) -> Row:
        if rounding in _INTEGRAL:
            values = _INTEGRAL[rounding](values)
        if saturating:
            values = np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(values.dtype)
        if relu:
            values = np.where(values < 0, 0, values).astype(values.dtype)
        return values

    if to == "bf16":
        if kind == "f64":
            raise UnsupportedPtx("cvt.bf16.f64")
        return lambda a: f32_to_bf16(shape(widen(a).astype(np.float32)), rounding)
    if to == "f16":
        return lambda a: to_f16(shape(widen(a)), rounding if rounding in _FLOAT_ROUNDING else "rn")
    if to == "f32" and kind == "f64":
        return lambda a: to_f32(shape(a), rounding if rounding in _FLOAT_ROUNDING else "rn")
    return lambda a: shape(widen(a)).astype(dtype_of(to))


def _packed(ins: Instruction, m: Machine, to: str, kind: str) -> Step:
    """Two at a time: ``d = {hi: a, lo: b}``, or a packed source."""
    relu = ins.has("relu")
    target = m.regs.target(ins.operands[0], to)
    if kind in ("e4m3x2", "e5m2x2") and to == "f16x2":
        codes = m.regs.source(ins.operands[1], "b16")

        def decode(a: Row) -> Row:
            values = fp8_to_f32(np.ascontiguousarray(a).reshape(-1).view(np.uint8), kind[:4]).astype(np.float16)
            return _relu(values, relu).view(np.uint32)

        return function_step(decode, target, codes)
    if to in ("e4m3x2", "e5m2x2") and kind == "f16x2":
        packed = m.regs.source(ins.operands[1], "b32")

        def encode(a: Row) -> Row:
            low, high = (half.view(np.float16).astype(np.float32) for half in map(np.ascontiguousarray, halves(a)))
            return _join_bytes(f32_to_fp8(_relu(low, relu), to[:4]), f32_to_fp8(_relu(high, relu), to[:4]))

        if not ins.has("satfinite"):
            raise UnsupportedPtx("cvt to fp8 without .satfinite")
        return function_step(encode, target, packed)
    if kind != "f32" or len(ins.operands) != 3:
        raise UnsupportedPtx(f"cvt.{to}.{kind}")
    high, low = (m.regs.source(op, "f32") for op in ins.operands[1:])
    mode = "rz" if ins.has("rz") else "rn"
    encode_one: dict[str, Callable[[Row, str], Row]] = {"f16x2": to_f16, "bf16x2": f32_to_bf16}
    if to in ("e4m3x2", "e5m2x2") and ins.has("satfinite"):
        return preserving_subnormals(
            function_step(
                lambda a, b: _join_bytes(f32_to_fp8(_relu(b, relu), to[:4]), f32_to_fp8(_relu(a, relu), to[:4])),
                target, high, low,
            )
        )  # fmt: skip
    if to not in encode_one or ins.has("satfinite"):
        raise UnsupportedPtx(f"cvt.{to}.{kind}")
    one = encode_one[to]
    return preserving_subnormals(
        function_step(lambda a, b: join_halves(one(_relu(b, relu), mode), one(_relu(a, relu), mode)), target, high, low)
    )


def _relu(values: Row, relu: bool) -> Row:
    return np.where(values <= 0, values.dtype.type(0), values) if relu else values


def _join_bytes(low: Row, high: Row) -> Row:
    return low.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)


def _pack_integers(ins: Instruction, m: Machine) -> Step:
    """cvt.pack.sat: two s32 to 8 or 16 bits each, above the low half of a third operand."""
    require(ins, "pack", "sat", "u8", "s8", "u16", "s16", "s32", "b32")
    to = ins.mods[2]
    limits, width = np.iinfo(dtype_of(to)), 8 * dtype_of(to).itemsize
    target = m.regs.target(ins.operands[0], "b32")
    a, b = (m.regs.source(op, "s32") for op in ins.operands[1:3])
    c = m.regs.source(ins.operands[3], "b32") if len(ins.operands) > 3 else None
    mask = (1 << width) - 1

    def pack() -> Row:
        high, low = (np.clip(v, limits.min, limits.max).astype(np.int64) & mask for v in (a, b))
        out = (high << width | low).astype(np.uint32)
        return out if c is None or width == 16 else out | c << np.uint32(2 * width)

    return function_step(pack, target)
