"""cp.async: 4, 8 or 16 bytes from global to shared memory, in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active
from tests.ptxsim.errors import AsyncCopyError, UnsupportedPtx
from tests.ptxsim.ops_bulk import bind_bulk
from tests.ptxsim.ops_mbarrier import places
from tests.ptxsim.ops_memory import address_of
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Imm, Instruction
from tests.ptxsim.types import UNSIGNED

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_HINTS = ("L2::64B", "L2::128B", "L2::256B", "L2::cache_hint")


@opcode("cp")
def _bind_cp(ins: Instruction, m: Machine) -> Step:
    if ins.has("commit_group") and not ins.has("bulk"):
        return m.engine.copies.commit
    if ins.has("wait_group") and not ins.has("bulk"):
        allowed = ins.operands[0]
        if not isinstance(allowed, Imm):
            raise UnsupportedPtx("cp.async.wait_group of a register")
        return _wait(m, int(allowed.text, 0))
    if ins.has("wait_all"):
        return _wait(m, None)
    if ins.has("bulk"):
        return bind_bulk(ins, m)
    if ins.has("mbarrier"):
        return _arrive_when_done(ins, m)
    return _copy(ins, m)


def _wait(m: Machine, allowed: int | None) -> Step:
    def wait(active: Active) -> None:
        m.clocks.now += 1
        m.engine.copies.wait(active, allowed)

    return wait


def _arrive_when_done(ins: Instruction, m: Machine) -> Step:
    """cp.async.mbarrier.arrive: each lane arrives when its earlier copies have landed.

    They land at the last moment.
    """
    require(ins, "async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64")
    find, included = places(m, ins, ins.operands[0]), ins.has("noinc")

    def arrive(active: Active) -> None:
        m.clocks.now += 1
        flat, lanes = find(active), active.index
        for place, lane in zip(flat.tolist(), lanes.tolist(), strict=True):
            barrier = m.engine.at(place, lane)
            if not included:
                barrier.pending += 1
        m.engine.arrive_after_copies(active, flat, ins)

    return arrive


def _copy(ins: Instruction, m: Machine) -> Step:
    require(ins, "async", "ca", "cg", "shared", "shared::cta", "global", *_HINTS)
    operands = list(ins.operands)
    if ins.has("L2::cache_hint"):
        operands.pop()
    size = operands[2]
    if not isinstance(size, Imm) or int(size.text, 0) not in (4, 8, 16):
        raise UnsupportedPtx("cp.async of this size")
    width = int(size.text, 0)
    if ins.has("cg") and width != 16:
        raise UnsupportedPtx("cp.async.cg of another size than 16")
    destination, source = address_of(m, operands[0]), address_of(m, operands[1])
    given = m.regs.source(operands[3], "u32") if len(operands) > 3 else None

    def copy(active: Active) -> None:
        m.clocks.now += 1
        flat = m.shared.flat(destination(active), width, active)
        addresses = source(active)
        if given is None:
            data = m.global_memory.load(addresses, width, active)
        else:
            data = _partial(m, active, addresses, width, np.broadcast_to(active.take(given), (active.count,)))
        if m.stats is not None:
            m.stats.shared_access(m, destination(active), width, active.index)
        m.engine.copies.issue(active, flat, width, data, ins)

    return copy


def _partial(m: Machine, active: Active, addresses: NDArray[np.int64], width: int, sizes: Row) -> Row:
    """Each lane reads its source size; the rest of its destination is zero."""
    whole = sizes == width
    if whole.all():
        return m.global_memory.load(addresses, width, active)
    if (sizes > width).any():
        lane = int(active.index[int(np.argmax(sizes > width))])
        raise AsyncCopyError(f"cp.async of {m.describe(lane)} reads more bytes than it writes")
    data = np.zeros(active.count, UNSIGNED[width])
    if whole.any():
        mask = np.zeros(m.lanes, bool)
        mask[active.index[whole]] = True
        data[whole] = m.global_memory.load(addresses[whole], width, m.active(mask))
    octets = data.view(np.uint8).reshape(-1, width)
    for place in range(width - 1):
        some = ~whole & (sizes > place)
        if some.any():
            mask = np.zeros(m.lanes, bool)
            mask[active.index[some]] = True
            octets[some, place] = m.global_memory.load(addresses[some] + place, 1, m.active(mask))
    return data
