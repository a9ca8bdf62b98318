"""atom and red: read, modify, write, lane by lane in lane order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active
from tests.ptxsim.declarations import size_of
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.memory import WINDOW, check_alignment
from tests.ptxsim.numerics import bf16_to_f32, f32_to_bf16
from tests.ptxsim.ops_memory import address_of, order_access, space_of
from tests.ptxsim.registry import Step, opcode
from tests.ptxsim.syntax import Instruction, Operand, Reg, Vec
from tests.ptxsim.types import UNSIGNED, dtype_of

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_OPS = ("add", "min", "max", "inc", "dec", "exch", "cas", "and", "or", "xor")
_KNOWN = (
    *_OPS, "global", "shared", "shared::cta", "relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys",
    "cluster", "noftz", "v2", "v4", "L2::cache_hint",
)  # fmt: skip
# Operations whose result does not depend on the order of lanes, as unbuffered ufuncs.
_UFUNCS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


@opcode("atom", "red")
def _bind_atomic(ins: Instruction, m: Machine) -> Step:
    kind = ins.type
    for mod in ins.mods:
        if mod not in _KNOWN and mod != kind:
            raise UnsupportedPtx(f"modifier .{mod}")
    op = next(mod for mod in ins.mods if mod in _OPS)
    returns = ins.opcode == "atom"
    operands: list[Operand] = list(ins.operands)
    destination = operands.pop(0) if returns else None
    packed = kind in ("f16x2", "bf16x2")
    element = kind.removesuffix("x2")
    container = kind if element == kind else "b32"
    address = address_of(m, operands[0])
    if isinstance(operands[1], Vec) or any(mod in ("v2", "v4") for mod in ins.mods):
        raise UnsupportedPtx("vector atomics")
    value = m.regs.source(operands[1], container)
    third = m.regs.source(operands[2], container) if op == "cas" else None
    sink = destination is None or (isinstance(destination, Reg) and destination.name == "_")
    target = None if sink else m.regs.target(destination, container)  # type: ignore[arg-type]
    width = size_of(kind)
    space = space_of(ins)
    order = order_access(m, ins, space, True, True)
    update = _packed_update(op, element) if packed else _update(op, kind)

    def step(active: Active) -> None:
        m.clocks.now += 1
        addresses = address(active)
        first = np.array(active.take(value))
        second = None if third is None else np.array(active.take(third))
        m.polled = True
        for part, here in _by_space(m, space, addresses, active):
            memory = part
            lanes = active.index[here]
            some = active if isinstance(here, slice) else m.active(_mask(m, lanes))
            local = addresses[here] & ((1 << WINDOW) - 1)
            if memory is m.shared:
                flat = m.shared.flat(local, width, some)
                if m.shared.shadow is not None:
                    _shared_checks(m, flat, width, lanes)
                cells: Any = m.shared.views[width]
                index = flat // width
            else:
                check_alignment(m, local, width, lanes, "global")
                m.global_memory.prepare_store(local, width, lanes, True)
                if m.global_memory.granule is not None:
                    m.global_memory.each(
                        m.global_memory.find(local, width, lanes), local, lanes,
                        lambda i, a, who: m.global_memory.read_check(i, a, width, who, True),
                    )  # fmt: skip
                cells, index = None, local
            before, changed = update(m, cells, index, width, first[here], None if second is None else second[here])
            m.progress += changed
            if target is not None:
                target[lanes] = before.view(target.dtype)
        if order is not None:
            order(active, addresses)

    return step


def _mask(m: Machine, lanes: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(m.lanes, bool)
    mask[lanes] = True
    return mask


def _by_space(m: Machine, space: str, addresses: NDArray[np.int64], active: Active) -> list[tuple[Any, Any]]:
    if space != "generic":
        return [(m.shared if space == "shared" else m.global_memory, slice(None))]
    window = addresses >> WINDOW
    out: list[tuple[Any, Any]] = []
    for number, memory in ((0, m.global_memory), (1, m.shared)):
        here = window == number
        if here.all():
            return [(memory, slice(None))]
        if here.any():
            out.append((memory, here))
    if ((window != 0) & (window != 1)).any():
        raise UnsupportedPtx("an atomic outside global and shared memory")
    return out


def _shared_checks(m: Machine, flat: NDArray[np.int64], width: int, lanes: NDArray[np.int64]) -> None:
    shadow = m.shared.shadow
    assert shadow is not None
    rows, many = m.shared.rows(flat, width)
    shadow.read(rows, many, lanes, True)
    shadow.write(rows, many, lanes, True)


def _update(op: str, kind: str) -> Callable[..., tuple[Row, int]]:
    """Apply lane by lane; addresses that occur once are done at once."""
    dtype = dtype_of(kind)

    def update(m: Machine, cells: Any, index: Row, width: int, values: Row, compare: Row | None) -> tuple[Row, int]:
        order = np.argsort(index, kind="stable")
        places, start, counts = np.unique(index[order], return_index=True, return_counts=True)
        raw = cells[places] if cells is not None else m.global_memory.raw(places, width)
        current = raw.view(dtype).copy()
        before = np.empty(len(index), dtype)
        for turn in range(int(counts.max())):
            has = counts > turn
            lanes = order[start[has] + turn]
            old = current[has]
            before[lanes] = old
            current[has] = _apply(
                op, kind, old, values.view(dtype)[lanes], None if compare is None else compare.view(dtype)[lanes]
            )
        bits = current.view(UNSIGNED[width])
        changed = int((bits != raw).any())
        if cells is not None:
            cells[places] = bits
        else:
            m.global_memory.raw_store(places, width, bits)
        return before, changed

    return update


def _apply(op: str, kind: str, old: Row, value: Row, third: Row | None) -> Row:
    """Apply an atomic with one lane per address, all at once.

    For cas, ``value`` is compared and the third operand stored.
    """
    if op == "exch":
        return value
    if op == "cas":
        assert third is not None
        return np.where(old.view(f"u{old.itemsize}") == value.view(f"u{old.itemsize}"), third, old)
    if op == "inc":
        return np.where(old >= value, 0, old + old.dtype.type(1)).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > value), value, old - old.dtype.type(1)).astype(old.dtype)
    if kind == "bf16":
        a, b = bf16_to_f32(old), bf16_to_f32(value)
        return f32_to_bf16({"add": np.add, "min": np.fmin, "max": np.fmax}[op](a, b))
    if kind[0] == "f" and op in ("min", "max"):
        return (np.fmin if op == "min" else np.fmax)(old, value)
    return _UFUNCS[op](old, value)


def _packed_update(op: str, element: str) -> Callable[..., tuple[Row, int]]:
    """Two 16-bit floats: each half on its own."""
    kind = element

    def update(m: Machine, cells: Any, index: Row, width: int, values: Row, compare: Row | None) -> tuple[Row, int]:
        order = np.argsort(index, kind="stable")
        places, start, counts = np.unique(index[order], return_index=True, return_counts=True)
        raw = cells[places] if cells is not None else m.global_memory.raw(places, width)
        dtype = dtype_of(kind)
        current = np.ascontiguousarray(raw).view(dtype).reshape(-1, 2).copy()
        given = np.ascontiguousarray(values).view(dtype).reshape(-1, 2)
        before = np.empty((len(index), 2), dtype)
        for turn in range(int(counts.max())):
            has = counts > turn
            lanes = order[start[has] + turn]
            old = current[has]
            before[lanes] = old
            current[has] = _apply(op, kind, old, given[lanes], None)
        bits = current.view(UNSIGNED[width])[:, 0]
        changed = int((bits != raw).any())
        if cells is not None:
            cells[places] = bits
        else:
            m.global_memory.raw_store(places, width, bits)
        return before.view(np.uint32)[:, 0], changed

    return update
