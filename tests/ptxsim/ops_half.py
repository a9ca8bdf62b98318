"""f16, bf16 and packed pairs: each operation is computed wider and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.elementwise import function_step, preserving_subnormals
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.numerics import bf16_to_f32, f32_to_bf16, fma_wide
from tests.ptxsim.registry import Step, require
from tests.ptxsim.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_SIGN, _REST = np.uint16(0x8000), np.uint16(0x7FFF)


def _decode(bits: Row, kind: str) -> Row:
    """16-bit patterns as float32."""
    return bits.view(np.float16).astype(np.float32) if kind == "f16" else bf16_to_f32(bits)


def _encode(values: Row, kind: str) -> Row:
    """Round float32 or float64 to 16-bit patterns."""
    if kind == "f16":
        return np.asarray(values).astype(np.float16).view(np.uint16)
    return f32_to_bf16(values.astype(np.float32))


def _flush(bits: Row) -> Row:
    """f16 subnormals as signed zeros."""
    return np.where((bits & np.uint16(0x7C00)) == 0, bits & _SIGN, bits)


def _element(ins: Instruction) -> tuple[str, bool]:
    """Element type, and whether there are two."""
    kind = ins.type
    if kind not in ("f16", "bf16", "f16x2", "bf16x2"):
        raise UnsupportedPtx(f"type .{kind}")
    return kind.removesuffix("x2"), kind.endswith("x2")


def _lift(ins: Instruction, m: Machine, compute: Callable[..., Row]) -> Step:
    """A function of 16-bit patterns, applied to one or both halves of the operands."""
    kind, packed = _element(ins)
    container = "b32" if packed else "b16"
    target = m.regs.target(ins.operands[0], container)
    sources = [m.regs.source(op, container) for op in ins.operands[1:]]
    ftz = ins.has("ftz")

    def patterns(row: Row) -> Row:
        bits = np.ascontiguousarray(row).reshape(-1).view(np.uint16)
        return _flush(bits) if ftz else bits

    def evaluate(*rows: Row) -> Row:
        values = [patterns(row) for row in rows]
        if packed:  # constants have one pair: spread it over the lanes
            longest = max(len(v) for v in values)
            values = [v if len(v) == longest else np.tile(v, longest // 2) for v in values]
        out = compute(*values)
        out = np.ascontiguousarray(_flush(out) if ftz else out)
        return out.view(np.uint32) if packed else out

    step = function_step(evaluate, target, *sources)
    return preserving_subnormals(step) if kind == "bf16" else step


def bind_half(ins: Instruction, m: Machine) -> Step:
    """add, sub, mul, fma, min, max, neg, abs."""
    require(ins, "rn", "ftz", "sat", "relu", "NaN", "f16", "bf16", "f16x2", "bf16x2")
    kind, _ = _element(ins)
    name = ins.opcode
    if name == "neg":
        return _lift(ins, m, lambda a: a ^ _SIGN)
    if name == "abs":
        return _lift(ins, m, lambda a: a & _REST)

    def compute(*bits: Row) -> Row:
        values = [_decode(b, kind) for b in bits]
        if name == "fma":
            out = fma_wide(*(v.astype(np.float64) for v in values))
            if kind == "bf16":  # the odd rounding must survive the step through float32
                out = _odd_to_f32(out)
        elif name in ("min", "max"):
            pick = {
                ("min", False): np.fmin,
                ("max", False): np.fmax,
                ("min", True): np.minimum,
                ("max", True): np.maximum,
            }
            out = pick[name, ins.has("NaN")](*values)
        else:
            out = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](*values)
        if ins.has("sat"):
            out = np.where(np.isnan(out), 0, np.clip(out, 0, 1))
        if ins.has("relu"):
            out = np.where(np.isnan(out), out, np.maximum(out, 0))
        return _encode(out, kind)

    if name not in ("add", "sub", "mul", "fma", "min", "max"):
        raise UnsupportedPtx(f"{name} on .{ins.type}")
    return _lift(ins, m, compute)


def _odd_to_f32(values: Row) -> Row:
    """float64 to float32 rounded to odd, so that the next rounding is the only one that counts."""
    nearest = values.astype(np.float32)
    wide = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    toward = np.where(np.abs(wide) > np.abs(values), np.nextafter(nearest, np.float32(0)).view(np.uint32), bits)
    inexact = (wide != values) & np.isfinite(values)
    return np.where(inexact, toward | np.uint32(1), bits).view(np.float32)


def bind_half_function(ins: Instruction, m: Machine, function: Callable[[Row], Row]) -> Step:
    """ex2.approx and tanh.approx of 16-bit floats."""
    require(ins, "approx", "ftz", "f16", "bf16", "f16x2", "bf16x2")
    if ins.opcode not in ("ex2", "tanh"):
        raise UnsupportedPtx(f"{ins.opcode} on .{ins.type}")
    kind, _ = _element(ins)
    return _lift(ins, m, lambda bits: _encode(function(_decode(bits, kind)).astype(np.float32), kind))
