"""float32 and float64 arithmetic, and the approximate functions.

The approximations (``ex2.approx`` and its like) are computed accurately: a GPU's last bits differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.elementwise import function_step, preserving_subnormals, ufunc_step
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.numerics import fma_f32, fma_wide, to_f32
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_ROUNDINGS = ("rn", "rz", "rm", "rp")
_KNOWN = (*_ROUNDINGS, "ftz", "sat", "approx", "full", "f32", "f64", "NaN")


def _saturate(values: Row) -> Row:
    """Clamp to [0, 1]; NaN becomes 0."""
    return np.where(np.isnan(values), 0, np.clip(values, 0, 1))


def bind_float(ins: Instruction, m: Machine) -> Step:
    """add, sub, mul, mad, fma, div, min, max, neg, abs."""
    require(ins, *_KNOWN)
    name, kind = ins.opcode, ins.type
    target = m.regs.target(ins.operands[0], kind)
    sources = [m.regs.source(op, kind) for op in ins.operands[1:]]
    rounding = next((mod for mod in ins.mods if mod in _ROUNDINGS), "rn")
    if name in ("neg", "abs"):
        step = _sign_step(ins, target, sources[0])
    elif name in ("min", "max"):
        step = _extreme(ins, target, sources)
    elif rounding != "rn" or ins.has("sat"):
        step = _rounded(ins, target, sources, rounding)
    elif name in ("fma", "mad"):
        step = function_step(fma_f32 if kind == "f32" else _fma_f64, target, *sources)
    else:
        ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
        step = ufunc_step(ufunc, target, *sources)
    return step if kind == "f64" or ins.has("ftz") else preserving_subnormals(step)


def _sign_step(ins: Instruction, target: Row, source: Row) -> Step:
    """neg and abs act on the sign bit, of NaN too; NumPy's do."""
    ufunc = np.negative if ins.opcode == "neg" else np.abs
    if ins.has("ftz"):  # a product flushes, a change of sign does not
        return function_step(lambda a: ufunc(a) * np.float32(1), target, source)
    return ufunc_step(ufunc, target, source)


def _extreme(ins: Instruction, target: Row, sources: list[Row]) -> Step:
    """min and max: a NaN loses, unless .NaN is asked for."""
    if ins.has("NaN"):
        ufunc: Any = np.minimum if ins.opcode == "min" else np.maximum
    else:
        ufunc = np.fmin if ins.opcode == "min" else np.fmax
    if len(sources) == 3:
        return function_step(lambda a, b, c: ufunc(ufunc(a, b), c) * a.dtype.type(1), target, *sources)
    if ins.has("ftz"):  # a choice does not flush, a product does
        one = np.float32(1)
        return function_step(lambda a, b: ufunc(a, b) * one, target, *sources)
    return ufunc_step(ufunc, target, *sources)


def _fma_f64(a: Row, b: Row, c: Row) -> Row:
    """a*b+c through extended precision; its last bit may differ from a true fused operation."""
    long = np.longdouble
    return (a.astype(long) * b.astype(long) + c.astype(long)).astype(np.float64)


def _rounded(ins: Instruction, target: Row, sources: list[Row], rounding: str) -> Step:
    """Directed roundings and saturation, float32 only."""
    if ins.type != "f32":
        raise UnsupportedPtx(f"rounding .{rounding} or .sat of .{ins.type}")
    name, saturating = ins.opcode, ins.has("sat")

    def compute(*values: Row) -> Row:
        wide = [np.asarray(v, np.float64) for v in values]
        if name in ("fma", "mad"):
            exact = fma_wide(*wide)
        elif name == "mul":
            exact = wide[0] * wide[1]
        elif name == "div":
            exact = wide[0] / wide[1]
        else:
            exact = fma_wide(wide[0], np.float64(1), wide[1] if name == "add" else -wide[1])
        out = to_f32(exact, rounding)
        return _saturate(out) if saturating else out

    return function_step(compute, target, *sources)


def _reciprocal_root(a: Row) -> Row:
    return 1 / np.sqrt(np.asarray(a, np.float64))


_FUNCTIONS: dict[str, Callable[[Row], Row]] = {
    "rcp": np.reciprocal, "sqrt": np.sqrt, "rsqrt": _reciprocal_root, "ex2": np.exp2, "lg2": np.log2,
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


@opcode("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def _bind_function(ins: Instruction, m: Machine) -> Step:
    from tests.ptxsim.ops_half import bind_half_function

    function = _FUNCTIONS[ins.opcode]
    if ins.type not in ("f32", "f64"):
        return bind_half_function(ins, m, function)
    require(ins, "approx", "rn", "rz", "ftz", "f32", "f64")
    target, source = m.regs.target(ins.operands[0], ins.type), m.regs.source(ins.operands[1], ins.type)
    if ins.has("rz"):
        step = function_step(lambda a: to_f32(function(np.asarray(a, np.float64)), "rz"), target, source)
    elif isinstance(function, np.ufunc):
        step = ufunc_step(function, target, source)
    else:
        step = function_step(function, target, source)
    return step if ins.type == "f64" or ins.has("ftz") else preserving_subnormals(step)


@opcode("fma")
def _bind_fma(ins: Instruction, m: Machine) -> Step:
    from tests.ptxsim.ops_half import bind_half

    return bind_float(ins, m) if ins.type in ("f32", "f64") else bind_half(ins, m)


@opcode("copysign")
def _bind_copysign(ins: Instruction, m: Machine) -> Step:
    """The sign of a on the magnitude of b."""
    require(ins, "f32", "f64")
    target = m.regs.target(ins.operands[0], ins.type)
    a, b = (m.regs.source(op, ins.type) for op in ins.operands[1:])
    return ufunc_step(np.copysign, target, b, a)


@opcode("testp")
def _bind_testp(ins: Instruction, m: Machine) -> Step:
    """Classify a number."""
    require(ins, "finite", "infinite", "number", "notanumber", "normal", "subnormal", "f32", "f64")
    target, source = m.regs.target(ins.operands[0], "pred"), m.regs.source(ins.operands[1], ins.type)
    tiny = np.finfo(source.dtype).tiny
    tests: dict[str, Callable[[Row], Row]] = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda a: ~np.isnan(a), "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (a.view(f"u{a.itemsize}") << a.dtype.type(1).view(f"u{a.itemsize}").dtype.type(1) != 0)
        & (np.abs(a) < tiny),
    }  # fmt: skip
    step = function_step(tests[ins.mods[0]], target, source)
    return preserving_subnormals(step)
