"""Moves, packing, addresses of variables, and conversions between address spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active
from tests.ptxsim.elementwise import function_step, ufunc_step
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Instruction, Reg, Special, Sym, Vec
from tests.ptxsim.types import UNSIGNED, dtype_of

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
_SPACE = {"global": 0, "const": 0, "shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "local": LOCAL_WINDOW}


@opcode("mov")
def _bind_mov(ins: Instruction, m: Machine) -> Step:
    kind = ins.type
    require(ins, kind)
    destination, source = ins.operands
    if isinstance(source, Vec):
        return _pack(m, ins, source)
    if isinstance(destination, Vec):
        return _unpack(m, ins, destination)
    target = m.regs.target(destination, kind)
    if isinstance(source, Special) and source.name in _CLOCKS:
        return function_step(lambda: np.array(m.clocks.now).astype(target.dtype), target)
    row = m.regs.source(source, kind)

    def step(active: Active) -> None:
        if active.where is None:
            target[...] = row
        else:
            np.putmask(target, active.where, row)

    return step


def _pack(m: Machine, ins: Instruction, source: Vec) -> Step:
    """Several registers into one."""
    width = dtype_of(ins.type).itemsize
    part = width // len(source.items)
    target = m.regs.target(ins.operands[0], f"b{8 * width}")
    rows = [m.regs.source(item, f"b{8 * part}") for item in source.items]
    parts = target.view(UNSIGNED[part]).reshape(-1, len(rows))
    own = isinstance(ins.operands[0], Reg) and any(
        isinstance(item, Reg) and item.name == ins.operands[0].name for item in source.items
    )

    def step(active: Active) -> None:
        if active.where is None and not own:
            for i, row in enumerate(rows):
                parts[:, i] = row
            return
        packed = np.empty_like(parts)
        for i, row in enumerate(rows):
            packed[:, i] = row
        if active.where is None:
            parts[...] = packed
        else:
            np.putmask(target, active.where, packed.view(target.dtype)[:, 0])

    return step


def _unpack(m: Machine, ins: Instruction, destination: Vec) -> Step:
    """One register into several."""
    width = dtype_of(ins.type).itemsize
    part = width // len(destination.items)
    source = m.regs.source(ins.operands[1], f"b{8 * width}")
    pieces = source.reshape(-1).view(UNSIGNED[part])
    targets = [
        (m.regs.target(item, f"b{8 * part}"), pieces[i :: len(destination.items)])
        for i, item in enumerate(destination.items)
        if not (isinstance(item, Reg) and item.name == "_")
    ]

    def step(active: Active) -> None:
        for target, piece in targets:
            if active.where is None:
                target[...] = piece
            else:
                np.putmask(target, active.where, np.broadcast_to(piece, target.shape))

    return step


@opcode("cvta")
def _bind_cvta(ins: Instruction, m: Machine) -> Step:
    """Between generic addresses and those of one space."""
    require(ins, "to", "global", "shared", "shared::cta", "local", "param", "param::entry", "const", "u64", "u32")
    space = next(mod for mod in ins.mods if mod not in ("to", "u64", "u32"))
    kind = ins.type
    target = m.regs.target(ins.operands[0], kind)
    operand = ins.operands[1]
    row = m.regs.source(operand, kind)
    if space in ("param", "param::entry"):
        base = PARAM_WINDOW
        if isinstance(operand, Sym) and operand.name not in m.program.param_offsets:
            raise UnsupportedPtx("the address of a call parameter")
    else:
        base = _SPACE[space]
    if base == 0:
        return function_step(lambda a: a, target, row)
    if kind == "u32":
        raise UnsupportedPtx("32-bit generic addresses")
    offset = np.array(base, np.uint64)
    return ufunc_step(np.subtract if ins.has("to") else np.add, target, row, offset)


@opcode("isspacep")
def _bind_isspacep(ins: Instruction, m: Machine) -> Step:
    """Which space a generic address lies in."""
    require(ins, "global", "shared", "shared::cta", "local", "const", "param", "param::entry")
    window = {"global": 0, "const": -1, "shared": 1, "shared::cta": 1, "local": 2, "param": 3, "param::entry": 3}[
        ins.type
    ]
    target, row = m.regs.target(ins.operands[0], "pred"), m.regs.source(ins.operands[1], "u64")
    return function_step(lambda a: (a >> np.uint64(WINDOW)) == np.uint64(window & 0xFFFF), target, row)


@opcode("getctarank")
def _bind_getctarank(ins: Instruction, m: Machine) -> Step:
    """There are no clusters of more than one CTA here: the rank is 0."""
    target = m.regs.target(ins.operands[0], "u32")
    return function_step(lambda: np.zeros((), np.uint32), target)
