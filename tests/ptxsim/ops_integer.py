"""Integer arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.elementwise import function_step, ufunc_step
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Instruction
from tests.ptxsim.types import dtype_of, is_float

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _operands(ins: Instruction, m: Machine, kind: str) -> tuple[Row, list[Row]]:
    return m.regs.target(ins.operands[0], kind), [m.regs.source(op, kind) for op in ins.operands[1:]]


def bind_integer(ins: Instruction, m: Machine) -> Step:
    """add, sub, mul, mad, min, max, neg, abs of integers, with carries; div and rem."""
    name, kind = ins.opcode, ins.type
    if kind not in _INTEGERS:
        raise UnsupportedPtx(f"type .{kind}")
    if name in ("mul", "mad"):
        return _multiply(ins, m, kind)
    if "cc" in ins.mods or name in ("addc", "subc"):
        return _carry(ins, m, kind)
    require(ins, kind, "sat")
    target, sources = _operands(ins, m, kind)
    if "sat" in ins.mods:
        if name not in ("add", "sub") or kind != "s32":
            raise UnsupportedPtx("modifier .sat")
        sign = 1 if name == "add" else -1
        return function_step(
            lambda a, b: np.clip(a.astype(np.int64) + sign * b.astype(np.int64), -(2**31), 2**31 - 1), target, *sources
        )
    simple: dict[str, Any] = {
        "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "abs": np.abs, "neg": np.negative,
    }  # fmt: skip
    if name in simple:
        return ufunc_step(simple[name], target, *sources)
    if name == "rem":
        return function_step(_remainder, target, *sources)
    assert name == "div", name
    return function_step(_quotient, target, *sources)


def _remainder(a: Row, b: Row) -> Row:
    """C's remainder; of a division by zero, the dividend."""
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b).astype(b.dtype)))


def _quotient(a: Row, b: Row) -> Row:
    """C's quotient; all ones for a division by zero."""
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    exact = a if a.dtype.kind == "u" else a - np.fmod(a, safe)
    ones = np.array(-1).astype(a.dtype)
    return np.where(b == 0, ones, exact // safe)


def _high_product(a: Row, b: Row) -> Row:
    """The upper 64 bits of a 64-bit product."""
    signed = a.dtype.kind == "i"
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> shift, y & low, y >> shift
    middle = x1 * y0 + (x0 * y0 >> shift)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> shift) + (other >> shift)
    if signed:
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
        return high.view(np.int64)
    return high


def _multiply(ins: Instruction, m: Machine, kind: str) -> Step:
    """mul and mad: .lo, .hi and .wide."""
    require(ins, kind, "lo", "hi", "wide", "cc")
    if "cc" in ins.mods:
        raise UnsupportedPtx("modifier .cc on a multiplication")
    adds = ins.opcode == "mad"
    if "wide" in ins.mods:
        wide = _WIDER[kind]
        target = m.regs.target(ins.operands[0], wide)
        a, b = (m.regs.source(op, kind) for op in ins.operands[1:3])
        dtype = dtype_of(wide)
        b_wide = b.astype(dtype) if b.ndim == 0 else None

        def product(*_: Row) -> Row:
            return np.multiply(a, b if b_wide is None else b_wide, dtype=dtype, casting="unsafe")

        if not adds:
            return function_step(product, target)
        c = m.regs.source(ins.operands[3], wide)
        return function_step(lambda: product() + c, target)
    target, sources = _operands(ins, m, kind)
    if "hi" in ins.mods:
        if kind in ("s64", "u64"):
            high = _high_product
        else:
            dtype, bits = dtype_of(_WIDER[kind]), 8 * dtype_of(kind).itemsize

            def high(a: Row, b: Row) -> Row:
                return np.multiply(a, b, dtype=dtype, casting="unsafe") >> dtype.type(bits)

        if adds:
            return function_step(lambda a, b, c: high(a, b).astype(target.dtype) + c, target, *sources)
        return function_step(lambda a, b: high(a, b).astype(target.dtype), target, *sources)
    if adds:
        return function_step(lambda a, b, c: a * b + c, target, *sources)
    return ufunc_step(np.multiply, target, *sources)


def _carry(ins: Instruction, m: Machine, kind: str) -> Step:
    """add.cc, addc, sub.cc, subc: the carry bit is a hidden register per lane."""
    require(ins, kind, "cc")
    unsigned = f"u{kind[1:]}"
    target, (a, b) = _operands(ins, m, unsigned)
    carry = m.regs.carry
    uses, sets, adds = ins.opcode in ("addc", "subc"), "cc" in ins.mods, ins.opcode[:3] == "add"

    def step(active: Any) -> None:
        one = carry.astype(target.dtype) if uses else target.dtype.type(0)
        if adds:
            part = a + b
            values = part + one
            out = (part < a) | (values < part)
        else:
            part = a - b
            values = part - one
            out = (a < b) | (part < one)
        if active.where is None:
            target[...] = values
            if sets:
                carry[...] = out
        else:
            np.putmask(target, active.where, values)
            if sets:
                np.putmask(carry, active.where, out)

    return step


@opcode("addc", "subc")
def _bind_carry(ins: Instruction, m: Machine) -> Step:
    return _carry(ins, m, ins.type)


@opcode("rem")
def _bind_rem(ins: Instruction, m: Machine) -> Step:
    return bind_integer(ins, m)


@opcode("add", "sub", "mul", "mad", "div", "min", "max", "neg", "abs")
def _bind_arithmetic(ins: Instruction, m: Machine) -> Step:
    from tests.ptxsim.ops_float import bind_float
    from tests.ptxsim.ops_half import bind_half

    if ins.type in ("f32", "f64"):
        return bind_float(ins, m)
    if is_float(ins.type):
        return bind_half(ins, m)
    return bind_integer(ins, m)


@opcode("mul24", "mad24")
def _bind_mul24(ins: Instruction, m: Machine) -> Step:
    """24-bit products, low half."""
    require(ins, "lo", "u32", "s32")
    if "lo" not in ins.mods:
        raise UnsupportedPtx("modifier .hi")
    target, sources = _operands(ins, m, ins.type)
    shift = target.dtype.type(8)

    def product(a: Row, b: Row, *c: Row) -> Row:
        value = ((a << shift) >> shift) * ((b << shift) >> shift)
        return value + c[0] if c else value

    return function_step(product, target, *sources)


@opcode("sad")
def _bind_sad(ins: Instruction, m: Machine) -> Step:
    """Sum of absolute differences."""
    require(ins, *_INTEGERS)
    target, sources = _operands(ins, m, ins.type)
    return function_step(lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b)), target, *sources)


@opcode("dp4a", "dp2a")
def _bind_dot(ins: Instruction, m: Machine) -> Step:
    """Dot product of four bytes (or two 16-bit with two bytes) with 32-bit accumulation."""
    if ins.opcode == "dp2a":
        raise UnsupportedPtx("dp2a")
    require(ins, "u32", "s32")
    kinds = ins.mods
    signed = "s32" in kinds
    target = m.regs.target(ins.operands[0], "s32" if signed else "u32")
    a, b = (m.regs.source(op, "b32") for op in ins.operands[1:3])
    c = m.regs.source(ins.operands[3], "s32" if signed else "u32")
    types = [np.int8 if kind == "s32" else np.uint8 for kind in kinds]

    def dot(x: Row, y: Row, z: Row) -> Row:
        left = np.ascontiguousarray(x).view(types[0]).reshape(-1, 4).astype(np.int32)
        right = np.ascontiguousarray(y).view(types[1]).reshape(-1, 4).astype(np.int32)
        return z + (left * right).sum(axis=1, dtype=np.int32).astype(target.dtype)

    return function_step(dot, target, a, b, c)
