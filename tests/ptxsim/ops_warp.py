"""Instructions of whole warps: shuffles, votes, reductions.

None of them orders memory, except ``bar.warp.sync``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active
from tests.ptxsim.errors import DivergentWarp, UnsupportedPtx
from tests.ptxsim.ops_compare import predicate
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Instruction, Pair, Reg

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_LANES = np.arange(32, dtype=np.int64)
_ALL = np.ones((1, 32), bool)
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def members(m: Machine, active: Active, mask: Row, name: str) -> tuple[Any, NDArray[np.bool_]]:
    """The active warps and which of their lanes take part.

    Raises
    ------
    DivergentWarp
        A lane that the mask names is elsewhere, or an active lane is not in its own mask.
    """
    warps = active.warps
    if warps is not None:
        if mask.ndim == 0 and int(mask) == 0xFFFFFFFF:
            return warps, _ALL
        rows = _ALL
    else:
        warps = np.flatnonzero(active.mask.reshape(-1, 32).any(axis=1))
        rows = active.mask.reshape(-1, 32)[warps]
    masks = np.broadcast_to(mask, active.mask.shape).reshape(-1, 32)[warps]
    rows = np.broadcast_to(rows, masks.shape)
    own = (masks >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    here = (rows * _BITS).sum(axis=1, dtype=np.uint32)[:, None]
    bad = rows & ((own == 0) | ((masks & ~here) != 0))
    if bad.any():
        warp, lane = (int(v) for v in np.argwhere(bad)[0])
        first = (np.arange(m.lanes // 32)[warps])[warp] * 32 + lane
        raise DivergentWarp(
            f"divergent warp: {name} by {m.describe(int(first))} names lanes {int(masks[warp, lane]):#010x}, "
            f"but only {int(here[warp, 0]):#010x} are here"
        )
    return warps, rows


def table_of(m: Machine, row: Row) -> Row:
    """A register row, or a constant, as (warps, 32)."""
    return row.reshape(-1, 32) if row.ndim else np.broadcast_to(row, (m.lanes // 32, 32))


def _scatter(active: Active, row: Row, warps: Any, values: Row, rows: NDArray[np.bool_]) -> None:
    """Store per-lane results of the active warps' member lanes."""
    table = row.reshape(-1, 32)
    if active.warps is not None:
        table[warps] = values
    else:
        table[warps] = np.where(rows, values, table[warps])


@opcode("shfl")
def _bind_shuffle(ins: Instruction, m: Machine) -> Step:
    require(ins, "sync", "up", "down", "bfly", "idx", "b32")
    mode = ins.mods[1]
    destination = ins.operands[0]
    first, second = (destination.first, destination.second) if isinstance(destination, Pair) else (destination, None)
    target = m.regs.target(first, "b32")
    flag = None if second is None else m.regs.target(second, "pred")
    value, b, c, mask = (m.regs.source(op, "b32") for op in ins.operands[1:5])
    values_of, lanes_b, lanes_c = (table_of(m, row) for row in (value, b, c))
    fixed = None
    if b.ndim == 0 and c.ndim == 0:
        fixed = _shuffle_sources(mode, b.astype(np.int64), c.astype(np.int64))

    def step(active: Active) -> None:
        warps, rows = members(m, active, mask, "shfl")
        table = values_of[warps]
        if fixed is not None:
            source, inside = fixed
        else:
            source, inside = _shuffle_sources(mode, lanes_b[warps].astype(np.int64), lanes_c[warps].astype(np.int64))
        if active.warps is None:
            _check_sources(m, warps, rows, source)
        if source.ndim == 1:
            values = table.take(source, axis=1)
        else:
            values = np.take_along_axis(table, source, 1)
        _scatter(active, target, warps, values, rows)
        if flag is not None:
            _scatter(active, flag, warps, np.broadcast_to(inside, values.shape), rows)

    return step


def _shuffle_sources(mode: str, b: Row, c: Row) -> tuple[Row, Row]:
    """Source lane of each lane, and whether it was in range."""
    segment, clamp = (c >> 8) & 31, c & 31
    limit = (_LANES & segment) | (clamp & ~segment)
    shift = b & 31
    lane = {
        "up": _LANES - shift, "down": _LANES + shift, "bfly": _LANES ^ shift,
        "idx": (_LANES & segment) | (shift & ~segment),
    }[mode]  # fmt: skip
    inside = lane >= limit if mode == "up" else lane <= limit
    return np.where(inside, lane, _LANES), inside


def _check_sources(m: Machine, warps: Any, rows: NDArray[np.bool_], source: Row) -> None:
    """Reading a lane that does not take part is undefined."""
    wide = np.broadcast_to(source, rows.shape)
    bad = rows & ~np.take_along_axis(rows, wide, 1)
    if bad.any():
        warp, lane = (int(v) for v in np.argwhere(bad)[0])
        raise DivergentWarp(
            f"divergent warp: {m.describe(int(warps[warp]) * 32 + lane)} shuffles from lane {int(wide[warp, lane])}, "
            "which does not take part"
        )


@opcode("vote")
def _bind_vote(ins: Instruction, m: Machine) -> Step:
    require(ins, "sync", "all", "any", "uni", "ballot", "pred", "b32")
    mode = ins.mods[1]
    target = m.regs.target(ins.operands[0], ins.type)
    condition = predicate(m, ins.operands[1])
    mask = m.regs.source(ins.operands[2], "b32")

    def step(active: Active) -> None:
        warps, rows = members(m, active, mask, "vote")
        held = table_of(m, condition())[warps]
        votes = held & rows
        if mode == "ballot":
            result = votes @ _BITS if votes.dtype != bool else (votes * _BITS).sum(axis=1, dtype=np.uint32)
        elif mode == "any":
            result = votes.any(axis=1)
        elif mode == "all":
            result = (held | ~rows).all(axis=1)
        else:
            result = (held | ~rows).all(axis=1) | ~votes.any(axis=1)
        _scatter(active, target, warps, np.repeat(result[:, None], 32, axis=1), rows)

    return step


@opcode("activemask")
def _bind_activemask(ins: Instruction, m: Machine) -> Step:
    target = m.regs.target(ins.operands[0], "b32")

    def step(active: Active) -> None:
        words = (active.mask.reshape(-1, 32) * _BITS).sum(axis=1, dtype=np.uint32)
        active.put(target, np.repeat(words, 32)[active.index])

    return step


@opcode("elect")
def _bind_elect(ins: Instruction, m: Machine) -> Step:
    """The lowest member lane is elected."""
    require(ins, "sync")
    destination = ins.operands[0]
    if not isinstance(destination, Pair):
        raise UnsupportedPtx("elect.sync without two destinations")
    leader, flag = m.regs.target(destination.first, "b32"), m.regs.target(destination.second, "pred")
    mask = m.regs.source(ins.operands[1], "b32")

    def step(active: Active) -> None:
        warps, rows = members(m, active, mask, "elect")
        count = len(np.arange(m.lanes // 32)[warps])
        rows = np.broadcast_to(rows, (count, 32))
        chosen = np.argmax(rows, axis=1)
        _scatter(active, leader, warps, np.repeat(chosen[:, None], 32, axis=1).astype(np.uint32), rows)
        _scatter(active, flag, warps, np.arange(32) == chosen[:, None], rows)

    return step


@opcode("match")
def _bind_match(ins: Instruction, m: Machine) -> Step:
    require(ins, "any", "all", "sync", "b32", "b64")
    destination = ins.operands[0]
    first, second = (destination.first, destination.second) if isinstance(destination, Pair) else (destination, None)
    target = m.regs.target(first, "b32")
    flag = None if second is None or (isinstance(second, Reg) and second.name == "_") else m.regs.target(second, "pred")
    value, mask = m.regs.source(ins.operands[1], ins.type), m.regs.source(ins.operands[2], "b32")
    everyone = ins.has("all")
    values_of = table_of(m, value)

    def step(active: Active) -> None:
        warps, rows = members(m, active, mask, "match")
        table = values_of[warps]
        rows = np.broadcast_to(rows, table.shape)
        same = (table[:, :, None] == table[:, None, :]) & rows[:, None, :]
        words = (same * _BITS).sum(axis=2, dtype=np.uint32)
        if everyone:
            member = (rows * _BITS).sum(axis=1, dtype=np.uint32)[:, None]
            equal = (words == member).astype(bool)
            agree = (equal | ~rows).all(axis=1, keepdims=True)
            words = np.where(agree, member, np.uint32(0))
            if flag is not None:
                _scatter(active, flag, warps, np.broadcast_to(agree, table.shape), rows)
            words = np.broadcast_to(words, table.shape)
        _scatter(active, target, warps, words, rows)

    return step


@opcode("redux")
def _bind_redux(ins: Instruction, m: Machine) -> Step:
    require(ins, "sync", "add", "min", "max", "and", "or", "xor", "b32", "u32", "s32")
    ufuncs: dict[str, Any] = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    ufunc = ufuncs[ins.mods[1]]
    target = m.regs.target(ins.operands[0], ins.type)
    value, mask = m.regs.source(ins.operands[1], ins.type), m.regs.source(ins.operands[2], "b32")
    values_of = table_of(m, value)

    def step(active: Active) -> None:
        warps, rows = members(m, active, mask, "redux")
        table = values_of[warps]
        rows = np.broadcast_to(rows, table.shape)
        first = np.take_along_axis(table, np.argmax(rows, axis=1)[:, None], 1)
        neutral = {"add": 0, "or": 0, "xor": 0}.get(ins.mods[1])
        filled = np.where(rows, table, first if neutral is None else table.dtype.type(neutral))
        result = ufunc.reduce(filled, axis=1, dtype=table.dtype)
        _scatter(active, target, warps, np.repeat(result[:, None], 32, axis=1), rows)

    return step


@opcode("bar", "barrier")
def _bind_warp_barrier(ins: Instruction, m: Machine) -> Step:
    """bar.warp.sync: orders memory among the lanes named.

    The CTA's barriers end blocks: see control.
    """
    require(ins, "warp", "sync")
    mask = m.regs.source(ins.operands[0], "b32")

    def step(active: Active) -> None:
        members(m, active, mask, "bar.warp.sync")
        m.clocks.warp_barrier(active, m.live)

    return step


@opcode("setmaxnreg")
def _bind_setmaxnreg(ins: Instruction, m: Machine) -> Step:
    """Registers are not counted here; the instruction must be run by whole warps all the same."""
    require(ins, "inc", "dec", "sync", "aligned", "u32")

    def step(active: Active) -> None:
        m.whole_warps(active, str(ins))

    return step
