"""Loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active
from tests.ptxsim.declarations import size_of
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.registry import Step, opcode
from tests.ptxsim.syntax import Addr, Imm, Instruction, Operand, Reg, Sym, Vec
from tests.ptxsim.types import UNSIGNED, dtype_of

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
AddressOf = Callable[[Active], NDArray[np.int64]]
_HINTS = (
    "ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "weak", "cta", "gpu", "sys", "cluster",
    "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
    "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint", "L2::evict_last", "L2::evict_first", "L2::evict_normal",
)  # fmt: skip
_STRONG = ("volatile", "relaxed", "acquire", "release", "mmio")
_SPACES = {
    "global": "global", "const": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared",
    "local": "local",
    "param": "param", "param::entry": "param", "param::func": "param",
}  # fmt: skip


def space_of(ins: Instruction) -> str:
    """State space named by an instruction, ``generic`` if none."""
    return next((_SPACES[mod] for mod in ins.mods if mod in _SPACES), "generic")


def memory_of(m: Machine, space: str) -> Any:
    """The memory of a space."""
    return {
        "global": m.global_memory, "shared": m.shared, "local": m.local, "param": m.param, "generic": m.generic,
    }[space]  # fmt: skip


def address_of(m: Machine, operand: Operand) -> AddressOf:
    """Byte addresses of the active lanes."""
    if not isinstance(operand, Addr):
        raise UnsupportedPtx(f"address {operand}")
    base, offset = operand.base, operand.offset
    if isinstance(base, Sym | Imm):
        if isinstance(base, Sym):
            if base.name not in m.regs.symbols:
                raise UnsupportedPtx(f"symbol {base.name}")
            constant = m.regs.symbols[base.name] + base.offset + offset
        else:
            constant = int(base.text, 0) + offset
        return lambda active: np.full(active.count, constant, np.int64)
    assert isinstance(base, Reg)
    row = m.regs.row(base.name)
    if row.dtype == np.uint64:
        wide = row.view(np.int64)
        if offset:
            return lambda active: active.take(wide) + offset
        return lambda active: active.take(wide).copy() if active.full else wide[active.index]
    if row.dtype != np.uint32:
        raise UnsupportedPtx(f"an address in {base.name}")
    return lambda active: active.take(row).astype(np.int64) + offset


def _vector(ins: Instruction) -> int:
    return next((int(mod[1:]) for mod in ins.mods if mod in ("v2", "v4", "v8")), 1)


def _check_mods(ins: Instruction, kind: str) -> None:
    for mod in ins.mods:
        if mod not in _HINTS and mod not in _STRONG and mod not in _SPACES and mod not in ("v2", "v4", kind):
            raise UnsupportedPtx(f"modifier .{mod}")


def _is_call_parameter(m: Machine, ins: Instruction, operand: Operand) -> bool:
    """Parameters of inlined calls live in local memory."""
    return (
        isinstance(operand, Addr)
        and isinstance(operand.base, Sym)
        and operand.base.name not in m.program.param_offsets
        and operand.base.name in m.program.symbols
    )


def order_access(
    m: Machine, ins: Instruction, space: str, reads: bool, writes: bool
) -> Callable[[Active, Row], None] | None:
    """What a strong access does to the clocks between CTAs; None if it does nothing."""
    cross = m.clocks.cross
    if cross is None or space not in ("global", "generic") or ins.has("cta"):
        return None
    acquires = ins.has("acquire") or ins.has("acq_rel")
    releases = ins.has("release") or ins.has("acq_rel")

    def order(active: Active, addresses: Row) -> None:
        lanes = active.index
        if releases:
            cross.fence(lanes)
        cross.access(lanes, addresses, reads, writes)
        if acquires:
            cross.fence(lanes)

    return order


@opcode("ld", "ldu")
def _bind_load(ins: Instruction, m: Machine) -> Step:
    kind = ins.type
    _check_mods(ins, kind)
    space = space_of(ins)
    if space == "param" and _is_call_parameter(m, ins, ins.operands[1]):
        space = "local"
    many, part = _vector(ins), size_of(kind)
    address, memory = address_of(m, ins.operands[1]), memory_of(m, space)
    strong = any(mod in _STRONG for mod in ins.mods)
    order = order_access(m, ins, space, True, False) if strong else None
    destination = ins.operands[0]
    items = destination.items if isinstance(destination, Vec) else (destination,)
    if len(items) != many:
        raise UnsupportedPtx("a vector of another length")
    if kind == "b128":
        raise UnsupportedPtx("128-bit registers")
    dtype = dtype_of(kind)
    targets = [
        (i, m.regs.widened_target(item, kind))
        for i, item in enumerate(items)
        if not (isinstance(item, Reg) and item.name == "_")
    ]
    width = part * many
    if width > 16:
        raise UnsupportedPtx(f"a {width}-byte load")
    clocks = m.clocks

    if space == "param" and isinstance(ins.operands[1], Addr) and isinstance(ins.operands[1].base, Sym):
        offset = m.program.param_offsets[ins.operands[1].base.name] + ins.operands[1].offset
        block = m.param.views[1]
        if offset + width > m.param.size:
            raise UnsupportedPtx("a parameter beyond the parameter block")
        constants = block[offset : offset + width].copy().view(dtype)

        def load_constant(active: Active) -> None:
            for i, target in targets:
                if active.where is None:
                    target[...] = constants[i]
                else:
                    np.putmask(target, active.where, constants[i].astype(target.dtype))

        return load_constant

    def load(active: Active) -> None:
        clocks.now += 1
        addresses = address(active)
        values = memory.load(addresses, width, active, strong)
        if order is not None:
            order(active, addresses)
        if strong:
            m.polled = True
        if many == 1:
            typed = values.view(dtype)
            target = targets[0][1] if targets else None
            if target is not None:
                if active.full:
                    target[...] = typed
                else:
                    target[active.index] = typed
            return
        columns = values.view(dtype).reshape(-1, many)
        if active.full:
            for i, target in targets:
                target[...] = columns[:, i]
        else:
            index = active.index
            for i, target in targets:
                target[index] = columns[:, i]

    return load


@opcode("st")
def _bind_store(ins: Instruction, m: Machine) -> Step:
    kind = ins.type
    _check_mods(ins, kind)
    space = space_of(ins)
    if space == "param":
        if not _is_call_parameter(m, ins, ins.operands[0]):
            raise UnsupportedPtx("a store into the kernel's parameters")
        space = "local"
    many, part = _vector(ins), size_of(kind)
    address, memory = address_of(m, ins.operands[0]), memory_of(m, space)
    strong = any(mod in _STRONG for mod in ins.mods)
    order = order_access(m, ins, space, False, True) if strong else None
    source = ins.operands[1]
    items = source.items if isinstance(source, Vec) else (source,)
    rows = [m.regs.source(item, f"b{8 * part}") for item in items]
    width = part * many
    if len(rows) != many or width > 16:
        raise UnsupportedPtx("a vector of another length")
    clocks = m.clocks
    element, whole = UNSIGNED[part], UNSIGNED[width]

    def store(active: Active) -> None:
        clocks.now += 1
        addresses = address(active)
        if many == 1:
            values = active.take(rows[0])
        else:
            columns = np.empty((active.count, many), element)
            for i, row in enumerate(rows):
                columns[:, i] = active.take(row)
            values = columns.view(whole)[:, 0]
        if order is not None:
            order(active, addresses)
        memory.store(addresses, width, values, active, strong)

    return store


@opcode("prefetch", "prefetchu", "createpolicy", "discard", "applypriority")
def _bind_hint(ins: Instruction, m: Machine) -> Step:
    """Hints change no values; a cache policy is 0."""
    if ins.opcode != "createpolicy":
        if ins.opcode == "discard":
            raise UnsupportedPtx("discard")
        return lambda active: None
    target = m.regs.target(ins.operands[0], "b64")

    def step(active: Active) -> None:
        active.put(target, np.zeros(active.count, np.uint64))

    return step


@opcode("membar", "fence")
def _bind_fence(ins: Instruction, m: Machine) -> Step:
    """Bind a fence, which orders memory between CTAs.

    ``fence.proxy.async`` orders shared memory before the asynchronous proxy.
    """
    known = (
        "gl", "sys", "cta", "gpu", "cluster", "sc", "acq_rel", "acquire", "release", "proxy", "async", "async::generic",
        "shared::cta", "shared::cluster", "global", "mbarrier_init", "tensormap::generic", "alias", "sync_restrict",
        "async.shared::cta",
    )  # fmt: skip
    for mod in ins.mods:
        if mod not in known:
            raise UnsupportedPtx(f"modifier .{mod}")
    clocks, engine = m.clocks, m.engine
    proxy = ins.has("proxy")
    wide = not proxy and not ins.has("cta")

    def fence(active: Active) -> None:
        clocks.now += 1
        if proxy:
            engine.proxy_fence(active.index)
        elif wide and clocks.cross is not None:
            clocks.cross.fence(active.index)

    return fence


@opcode("nanosleep")
def _bind_sleep(ins: Instruction, m: Machine) -> Step:
    def step(active: Active) -> None:
        m.polled = True

    return step
