"""Comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, merge
from tests.ptxsim.elementwise import function_step, ufunc_step
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.numerics import bf16_to_f32, halves
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Instruction, Operand, Pair, Reg

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_ORDERED: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_UNORDERED: dict[str, Callable[[Row, Row], Row]] = {
    "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "neu": lambda a, b: a != b,  # true when unordered
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
_COMBINE: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, kind: str) -> Callable[[Row, Row], Row]:
    floating = kind[0] == "f" or kind[:2] == "bf"
    if name in _UNORDERED and floating:
        return _UNORDERED[name]
    if name not in _ORDERED:
        raise UnsupportedPtx(f"comparison .{name}")
    if name == "ne" and floating:  # ordered: false for NaN
        return lambda a, b: (a < b) | (a > b)
    ufunc: Callable[[Row, Row], Row] = _ORDERED[name]
    return ufunc


def predicate(m: Machine, operand: Operand) -> Callable[[], Row]:
    """A predicate operand, which may be negated."""
    if isinstance(operand, Reg) and operand.negated:
        row = m.regs.row(operand.name)
        return lambda: ~row
    fixed = m.regs.source(operand, "pred")
    return lambda: fixed


def _values(m: Machine, operand: Operand, kind: str) -> Callable[[], Row]:
    row = m.regs.source(operand, kind)
    if kind == "bf16":
        return lambda: bf16_to_f32(row)
    return lambda: row


@opcode("setp")
def _bind_setp(ins: Instruction, m: Machine) -> Step:
    """One or two predicates of a comparison, combined with a third."""
    kind, name = ins.type, ins.mods[0]
    combine = next((mod for mod in ins.mods[1:-1] if mod in _COMBINE), None)
    require(ins, name, kind, "ftz", *([combine] if combine else []))
    compare = _comparison(name, kind)
    if kind in ("f16x2", "bf16x2"):
        return _packed_setp(ins, m, kind, compare)
    destination = ins.operands[0]
    if kind != "bf16" and not combine and isinstance(destination, Reg):
        a, b = m.regs.source(ins.operands[1], kind), m.regs.source(ins.operands[2], kind)
        target = m.regs.target(destination, "pred")
        if isinstance(compare, np.ufunc):
            return ufunc_step(compare, target, a, b)
        return function_step(compare, target, a, b)
    first, second = (destination.first, destination.second) if isinstance(destination, Pair) else (destination, None)
    p = m.regs.target(first, "pred")
    q = None if second is None else m.regs.target(second, "pred")
    left, right = _values(m, ins.operands[1], kind), _values(m, ins.operands[2], kind)
    third = predicate(m, ins.operands[3]) if combine else None
    join = _COMBINE[combine] if combine else None

    def step(active: Active) -> None:
        result = compare(left(), right())
        other = ~result
        if third is not None and join is not None:
            extra = third()
            result, other = join(result, extra), join(other, extra)
        merge(p, active, result)
        if q is not None:
            merge(q, active, other)

    return step


def _packed_setp(ins: Instruction, m: Machine, kind: str, compare: Callable[[Row, Row], Row]) -> Step:
    destination = ins.operands[0]
    if not isinstance(destination, Pair) or len(ins.operands) != 3:
        raise UnsupportedPtx("packed setp in this form")
    p, q = (m.regs.target(op, "pred") for op in (destination.first, destination.second))
    a, b = (m.regs.source(op, "b32") for op in ins.operands[1:])
    decode = (lambda x: x.view(np.float16)) if kind == "f16x2" else bf16_to_f32

    def step(active: Active) -> None:
        for row, x, y in zip((p, q), halves(a), halves(b), strict=True):
            merge(row, active, compare(decode(np.ascontiguousarray(x)), decode(np.ascontiguousarray(y))))

    return step


@opcode("set")
def _bind_set(ins: Instruction, m: Machine) -> Step:
    """A comparison as all ones or 1.0."""
    name, to, kind = ins.mods[0], ins.mods[-2], ins.mods[-1]
    require(ins, name, to, kind, "ftz")
    if kind in ("f16x2", "bf16x2"):
        return _packed_set(ins, m, name, to, kind)
    compare = _comparison(name, kind)
    target = m.regs.target(ins.operands[0], to)
    left, right = _values(m, ins.operands[1], kind), _values(m, ins.operands[2], kind)
    true = np.array(0x3F80, np.uint16) if to == "bf16" else np.array(1 if to[0] == "f" else -1).astype(target.dtype)
    zero = target.dtype.type(0)
    return function_step(lambda: np.where(compare(left(), right()), true, zero), target)


def _packed_set(ins: Instruction, m: Machine, name: str, to: str, kind: str) -> Step:
    compare = _comparison(name, kind)
    target = m.regs.target(ins.operands[0], "b32")
    a, b = (m.regs.source(op, "b32") for op in ins.operands[1:])
    true = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(to, 0xFFFF)

    def evaluate() -> Row:
        parts = []
        for x, y in zip(halves(a), halves(b), strict=True):
            left, right = np.ascontiguousarray(x), np.ascontiguousarray(y)
            if kind == "f16x2":
                result = compare(left.view(np.float16), right.view(np.float16))
            else:
                result = compare(bf16_to_f32(left), bf16_to_f32(right))
            parts.append(np.where(result, true, 0).astype(np.uint32))
        return parts[0] | parts[1] << np.uint32(16)

    return function_step(evaluate, target)


@opcode("selp")
def _bind_selp(ins: Instruction, m: Machine) -> Step:
    kind = ins.type
    require(ins, kind)
    target = m.regs.target(ins.operands[0], kind)
    a, b = (m.regs.source(op, kind) for op in ins.operands[1:3])
    condition = predicate(m, ins.operands[3])
    return function_step(lambda: np.where(condition(), a, b), target)


@opcode("slct")
def _bind_slct(ins: Instruction, m: Machine) -> Step:
    """a where c >= 0, else b."""
    kind, tested = ins.mods[-2], ins.mods[-1]
    require(ins, kind, tested, "ftz")
    target = m.regs.target(ins.operands[0], kind)
    a, b = (m.regs.source(op, kind) for op in ins.operands[1:3])
    c = m.regs.source(ins.operands[3], tested)
    return function_step(lambda: np.where(c >= 0, a, b), target)
