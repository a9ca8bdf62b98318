"""Terminators: branches, exits and CTA barriers.

Each sends its lanes on, or sets them aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Mask
from tests.ptxsim.errors import BarrierError, DeviceTrap, UnsupportedPtx
from tests.ptxsim.ops_compare import predicate
from tests.ptxsim.ops_mbarrier import bind_try_wait
from tests.ptxsim.registry import Step, require
from tests.ptxsim.syntax import Imm, Instruction, Operand, Sym

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Release = Callable[[Mask], None]


def bind_terminator(ins: Instruction | None, number: int, m: Machine) -> Step:
    """What happens at the end of block ``number``."""
    if ins is None:
        if number + 1 == len(m.program.blocks):
            return m.end_lanes  # the code's end, after its last instruction

        def fall(active: Active) -> None:
            m.send(number + 1, active)

        return fall
    step = _BINDERS[ins.opcode](ins, number, m)
    if ins.guard is None:
        return step
    row, negated = m.regs.row(ins.guard.name), ins.guard.negated

    def guarded(active: Active) -> None:
        taken = m.restrict(active, row, negated)
        if taken.count == active.count:
            step(active)
            return
        if not taken.count:
            m.send(number + 1, active)
            return
        m.send(number + 1, m.active(active.mask & ~taken.mask))
        step(taken)

    return guarded


def _bind_branch(ins: Instruction, number: int, m: Machine) -> Step:
    require(ins, "uni")
    target = ins.operands[0]
    if not isinstance(target, Sym) or target.name not in m.program.labels:
        raise UnsupportedPtx(f"branch target of {ins}")
    block = m.program.labels[target.name]

    def branch(active: Active) -> None:
        m.send(block, active)

    return branch


def _bind_indexed_branch(ins: Instruction, number: int, m: Machine) -> Step:
    require(ins, "idx", "uni")
    index, table = ins.operands
    if not isinstance(table, Sym) or table.name not in m.program.function.branch_targets:
        raise UnsupportedPtx(f"branch targets of {ins}")
    blocks = [m.program.labels[name] for name in m.program.function.branch_targets[table.name]]
    row = m.regs.source(index, "u32")

    def branch(active: Active) -> None:
        chosen = np.broadcast_to(row, active.mask.shape)
        for value in np.unique(active.take(chosen)).tolist():
            if value >= len(blocks):
                raise DeviceTrap(f"brx.idx with index {value} of {len(blocks)}")
            m.send(blocks[value], m.active(active.mask & (chosen == value)))

    return branch


def _bind_exit(ins: Instruction, number: int, m: Machine) -> Step:
    require(ins, "uni")
    return m.end_lanes


def _bind_trap(ins: Instruction, number: int, m: Machine) -> Step:
    def trap(active: Active) -> None:
        raise DeviceTrap(f"{m.describe(int(active.index[0]))} ran {ins.opcode}")

    return trap


def _numbers(m: Machine, operand: Operand | None) -> int | NDArray[Any] | None:
    """A barrier's id or count: known now, or a register."""
    if operand is None:
        return None
    return int(operand.text, 0) if isinstance(operand, Imm) else m.regs.source(operand, "u32")


def _bind_barrier(ins: Instruction, number: int, m: Machine) -> Step:
    """bar.sync, bar.arrive and bar.red (barrier.* too)."""
    require(ins, "sync", "arrive", "red", "cta", "aligned", "popc", "and", "or", "u32", "pred")
    operands = list(ins.operands)
    release: Release | None = None
    target: Operand | None = None
    condition: Operand | None = None
    if ins.has("red"):
        target, condition = operands.pop(0), operands.pop()
    identity = _numbers(m, operands[0])
    count = _numbers(m, operands[1] if len(operands) > 1 else None)
    if target is not None and condition is not None:
        release = _reduction(ins, m, target, condition)
    arrive_only = ins.has("arrive")
    if arrive_only and count is None:
        raise UnsupportedPtx("bar.arrive without a count")
    barriers: Barriers = m.barriers

    def barrier(active: Active) -> None:
        for one, id_, needed in _split(m, active, identity, count):
            if arrive_only:
                barriers.arrive(one, id_, needed)
                m.send(number + 1, one)
            else:
                barriers.wait(one, id_, needed, number + 1, release)

    return barrier


def _split(m: Machine, active: Active, identity: Any, count: Any) -> list[tuple[Active, int, int | None]]:
    """Lanes by barrier id and count, which may come from registers."""
    if not isinstance(identity, np.ndarray) and not isinstance(count, np.ndarray):
        return [(active, identity, count)]
    ids = np.broadcast_to(np.asarray(identity, np.int64), active.mask.shape)
    counts = np.broadcast_to(np.asarray(-1 if count is None else count, np.int64), active.mask.shape)
    pairs = {(int(i), int(c)) for i, c in zip(ids[active.index], counts[active.index], strict=True)}
    return [(m.active(active.mask & (ids == i) & (counts == c)), i, None if c < 0 else c) for i, c in sorted(pairs)]


def _reduction(ins: Instruction, m: Machine, target: Operand, condition: Operand) -> Release:
    """bar.red: every thread gets the count, all or any of the CTA's predicates."""
    kind = "popc" if ins.has("popc") else "and" if ins.has("and") else "or"
    row = m.regs.target(target, "u32" if kind == "popc" else "pred")
    values = predicate(m, condition)

    def release(mask: Mask) -> None:
        held = np.broadcast_to(values(), mask.shape)
        table, inside = held.reshape(m.ctas, -1), mask.reshape(m.ctas, -1)
        results = {
            "popc": (table & inside).sum(axis=1),
            "and": (table | ~inside).all(axis=1),
            "or": (table & inside).any(axis=1),
        }
        np.putmask(row, mask, np.repeat(results[kind], m.threads).astype(row.dtype))

    return release


class Barriers:
    """The CTA barriers of a launch: who has arrived and who waits."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.waiting: dict[tuple[int, int, int], Mask] = {}  # (barrier, count or 0, block to go on at) -> lanes
        self.arrived: dict[int, Mask] = {}  # barrier -> lanes of bar.arrive
        self.releases: dict[int, Release] = {}

    def wait(self, active: Active, barrier: int, count: int | None, block: int, release: Release | None) -> None:
        """Lanes arrive and wait; whichever CTAs are complete go on."""
        m = self.m
        if release is not None:
            self.releases[block] = release
        complete = active.count == m.live_count == m.ctas * m.block_threads
        if complete and not self.waiting and not self.arrived and count in (None, m.block_threads):
            m.clocks.cta_barrier(slice(None))
            if release is not None:
                release(active.mask)
            m.progress += 1
            m.send(block, active)
            return
        if count is not None and (count % 32 or not 0 < count <= m.threads):
            raise BarrierError(
                f"barrier {barrier} with a count of {count} threads, which is no multiple of 32 or too many"
            )
        key = (barrier, count or 0, block)
        before = self.waiting.get(key)
        self.waiting[key] = active.mask if before is None else before | active.mask
        self._complete(barrier)

    def arrive(self, active: Active, barrier: int, count: int | None) -> None:
        """Lanes arrive and do not wait."""
        assert count is not None
        before = self.arrived.get(barrier)
        if before is not None and (before & active.mask).any():
            lane = int(np.argmax(before & active.mask))
            raise BarrierError(f"{self.m.describe(lane)} arrives twice at barrier {barrier}")
        self.arrived[barrier] = active.mask if before is None else before | active.mask
        self.m.clocks.now += 1
        self._complete(barrier)

    def _complete(self, barrier: int) -> None:
        """Let go the CTAs whose threads have all arrived."""
        m = self.m
        keys = [key for key in self.waiting if key[0] == barrier]
        if not keys:
            return
        waiting = np.logical_or.reduce([self.waiting[key] for key in keys])
        present = waiting | self.arrived[barrier] if barrier in self.arrived else waiting
        per_cta = present.reshape(m.ctas, -1).sum(axis=1)
        needed = {key[1] or m.block_threads for key in keys}
        if len(needed) > 1:
            self._require_one_count(keys, barrier)
        for count in needed:
            here = np.logical_or.reduce([self.waiting[key] for key in keys if (key[1] or m.block_threads) == count])
            full = (per_cta >= count) & here.reshape(m.ctas, -1).any(axis=1)
            if not full.any():
                continue
            if (per_cta[full] > count).any():
                cta = int(np.argmax(full & (per_cta > count)))
                raise BarrierError(
                    f"{int(per_cta[cta])} threads of CTA {cta} arrive at barrier {barrier}, which counts {count}"
                )
            self._go(barrier, keys, np.repeat(full, m.threads), full, count)
            return

    def _require_one_count(self, keys: list[tuple[int, int, int]], barrier: int) -> None:
        ctas: dict[int, int] = {}
        for key in keys:
            for cta in np.flatnonzero(self.waiting[key].reshape(self.m.ctas, -1).any(axis=1)).tolist():
                if ctas.setdefault(cta, key[1]) != key[1]:
                    raise BarrierError(f"threads of CTA {cta} wait at barrier {barrier} with different counts")

    def _go(
        self, barrier: int, keys: list[tuple[int, int, int]], lanes: Mask, full: NDArray[np.bool_], count: int
    ) -> None:
        m = self.m
        places = [key for key in keys if (self.waiting[key] & lanes).any()]
        if count == m.block_threads and barrier not in self.arrived and len(places) > 1:
            self._forbid_different_places(places, lanes)
        arrived = self.arrived.get(barrier)
        waiters = np.logical_or.reduce([self.waiting[key] for key in places]) & lanes
        participants = waiters if arrived is None else waiters | (arrived & lanes)
        if count == m.block_threads and arrived is None:
            m.clocks.cta_barrier(np.flatnonzero(full), m.live_ctas)
        else:
            m.clocks.partial_barrier(np.flatnonzero(full), participants, waiters)
        if arrived is not None:
            left = arrived & ~lanes
            if left.any():
                self.arrived[barrier] = left
            else:
                del self.arrived[barrier]
        m.progress += 1
        for key in places:
            mask = self.waiting[key]
            rest = mask & ~lanes
            if rest.any():
                self.waiting[key] = rest
            else:
                del self.waiting[key]
            if key[2] in self.releases:
                self.releases[key[2]](mask & lanes)
            m.send(key[2], m.active(mask & lanes))

    def _forbid_different_places(self, places: list[tuple[int, int, int]], lanes: Mask) -> None:
        m = self.m
        seen = np.zeros(m.ctas, int)
        for key in places:
            seen += (self.waiting[key] & lanes).reshape(m.ctas, -1).any(axis=1)
        if (seen > 1).any():
            texts = [m.barrier_text(key[2]) for key in places]
            raise BarrierError(
                f"divergent barrier: threads of CTA {int(np.argmax(seen > 1))} wait at different barriers: "
                + "; ".join(texts)
            )


_BINDERS: dict[str, Callable[[Instruction, int, Machine], Step]] = {
    "bra": _bind_branch, "brx": _bind_indexed_branch, "ret": _bind_exit, "exit": _bind_exit, "bar": _bind_barrier,
    "barrier": _bind_barrier, "trap": _bind_trap, "brkpt": _bind_trap, "mbarrier": bind_try_wait,
}  # fmt: skip
TERMINATORS = frozenset(_BINDERS)
