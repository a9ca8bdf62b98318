"""mbarrier objects in shared memory: init, arrivals, expected bytes, waits.

A waiting thread is set aside until its phase is complete (``try_wait`` may suspend), so loops around it do not spin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes
from tests.ptxsim.engine import Mbarrier, Waiter
from tests.ptxsim.errors import MbarrierError, UnsupportedPtx
from tests.ptxsim.memory import SHARED_WINDOW, WINDOW
from tests.ptxsim.ops_memory import address_of, space_of
from tests.ptxsim.registry import Step, opcode, require
from tests.ptxsim.syntax import Instruction, Operand, Reg

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
_QUALIFIERS = ("release", "acquire", "relaxed", "cta", "cluster", "shared", "shared::cta", "shared::cluster", "b64")


def places(m: Machine, ins: Instruction, operand: Operand) -> Callable[[Active], NDArray[np.int64]]:
    """Return the flat shared bytes of the mbarriers that the active lanes name.

    Generic addresses are taken too.
    """
    address = address_of(m, operand)
    generic = space_of(ins) == "generic"

    def find(active: Active) -> NDArray[np.int64]:
        addresses = address(active)
        if generic:
            if (addresses >> WINDOW != SHARED_WINDOW >> WINDOW).any():
                raise MbarrierError(f"an mbarrier at {int(addresses[0]):#x}, which is not in shared memory")
            addresses = addresses - SHARED_WINDOW
        return m.shared.flat(addresses, 8, active)

    return find


def _grouped(flat: NDArray[np.int64], lanes: Lanes) -> Iterator[tuple[int, Lanes, NDArray[np.bool_]]]:
    """Each mbarrier with the lanes that name it."""
    if len(flat) == 1:
        yield int(flat[0]), lanes, np.ones(1, bool)
        return
    for place in np.unique(flat).tolist():
        here = flat == place
        yield place, lanes[here], here


def _operand(m: Machine, operand: Operand | None, default: int) -> Row:
    return np.array(default, np.uint32) if operand is None else m.regs.source(operand, "u32")


@opcode("mbarrier")
def _bind_mbarrier(ins: Instruction, m: Machine) -> Step:
    action = ins.mods[0]
    binders: dict[str, Callable[[Instruction, Machine], Step]] = {
        "init": _bind_init, "inval": _bind_inval, "arrive": _bind_arrive, "arrive_drop": _bind_arrive,
        "expect_tx": _bind_transactions, "complete_tx": _bind_transactions, "test_wait": _bind_test_wait,
    }  # fmt: skip
    if action not in binders:
        raise UnsupportedPtx(f"mbarrier.{action}")
    return binders[action](ins, m)


def _bind_init(ins: Instruction, m: Machine) -> Step:
    require(ins, "init", *_QUALIFIERS)
    find, count = places(m, ins, ins.operands[0]), m.regs.source(ins.operands[1], "u32")

    def init(active: Active) -> None:
        m.clocks.now += 1
        flat = find(active)
        lanes = active.index
        if m.shared.shadow is not None:
            m.shared.shadow.write(*m.shared.rows(flat, 8), lanes)
        m.shared.views[8][flat // 8] = 0
        counts = np.broadcast_to(active.take(count), flat.shape)
        for place, lane, number in zip(flat.tolist(), lanes.tolist(), counts.tolist(), strict=True):
            if not 1 <= number < 1 << 20:
                raise MbarrierError(f"{m.describe(lane)} initialises an mbarrier with the count {number}")
            m.engine.mbarriers[place] = Mbarrier(number, number, lane, m.clocks.now)

    return init


def _bind_inval(ins: Instruction, m: Machine) -> Step:
    require(ins, "inval", *_QUALIFIERS)
    find = places(m, ins, ins.operands[0])

    def inval(active: Active) -> None:
        m.clocks.now += 1
        for place, lane in zip(find(active).tolist(), active.index.tolist(), strict=True):
            m.engine.at(place, lane)
            del m.engine.mbarriers[place]

    return inval


def _bind_arrive(ins: Instruction, m: Machine) -> Step:
    """arrive, arrive.expect_tx, arrive_drop; the state they return is the number of the phase."""
    require(ins, "arrive", "arrive_drop", "expect_tx", "noComplete", *_QUALIFIERS)
    drops, expects = ins.has("arrive_drop"), ins.has("expect_tx")
    operands = list(ins.operands)
    state = operands.pop(0) if isinstance(operands[0], Reg) else None
    sink = state is None or (isinstance(state, Reg) and state.name == "_")
    target = None if sink else m.regs.target(state, "b64")  # type: ignore[arg-type]
    find = places(m, ins, operands[0])
    extra = operands[1] if len(operands) > 1 else None
    count, bytes_ = _operand(m, None if expects else extra, 1), _operand(m, extra if expects else None, 0)
    orders = not ins.has("relaxed")

    def arrive(active: Active) -> None:
        m.clocks.now += 1
        flat, lanes = find(active), active.index
        counts = np.broadcast_to(active.take(count), flat.shape)
        transactions = np.broadcast_to(active.take(bytes_), flat.shape)
        clock = m.clocks.release(lanes) if m.clocks.fine is not None and orders else None
        states = np.zeros(len(lanes), np.uint64)
        for place, some, here in _grouped(flat, lanes):
            barrier = m.engine.at(place, int(some[0]))
            states[here] = barrier.phase
            barrier.transactions += int(transactions[here].sum())
            if drops:
                barrier.expected -= int(counts[here].sum())
            m.engine.arrive(barrier, int(counts[here].sum()), None if clock is None else clock[here].max(axis=0))
        if target is not None:
            active.put(target, states)

    return arrive


def _bind_transactions(ins: Instruction, m: Machine) -> Step:
    """expect_tx and complete_tx."""
    require(ins, "expect_tx", "complete_tx", *_QUALIFIERS)
    find, count = places(m, ins, ins.operands[0]), m.regs.source(ins.operands[1], "u32")
    sign = 1 if ins.has("expect_tx") else -1

    def change(active: Active) -> None:
        m.clocks.now += 1
        flat, lanes = find(active), active.index
        counts = np.broadcast_to(active.take(count), flat.shape)
        for place, some, here in _grouped(flat, lanes):
            barrier = m.engine.at(place, int(some[0]))
            barrier.transactions += sign * int(counts[here].sum())
            if sign < 0:
                m.engine.complete(barrier)

    return change


def _phases(m: Machine, ins: Instruction) -> tuple[Callable[[Active], NDArray[np.int64]], Callable[..., Row], Row]:
    """Return the mbarriers waited for, the test of a phase, and the register with the phase.

    The test says whether the phase is over; the register may hold the phase's parity instead.
    """
    find = places(m, ins, ins.operands[1])
    if ins.has("parity"):
        row = m.regs.source(ins.operands[2], "u32")
        return find, lambda barrier, given: (barrier.phase & 1) != (given & 1), row
    row = m.regs.source(ins.operands[2], "b64")
    return find, lambda barrier, given: barrier.phase > given, row


def _ready(
    m: Machine, flat: Row, given: Row, over: Callable[..., Row], lanes: Lanes, orders: bool
) -> NDArray[np.bool_]:
    """Which lanes' phases are over; they learn what the arrivals knew."""
    out = np.zeros(len(lanes), bool)
    for place, some, here in _grouped(flat, lanes):
        barrier = m.engine.at(place, int(some[0]))
        done = np.asarray(over(barrier, given[here]))
        out[here] = done
        if orders and barrier.done is not None and m.clocks.fine is not None and done.any():
            m.clocks.acquire(some[done], barrier.done)
    return out


def _bind_test_wait(ins: Instruction, m: Machine) -> Step:
    require(ins, "test_wait", "parity", *_QUALIFIERS)
    find, over, row = _phases(m, ins)
    target = m.regs.target(ins.operands[0], "pred")
    orders = not ins.has("relaxed")

    def test(active: Active) -> None:
        m.clocks.now += 1
        flat = find(active)
        given = np.broadcast_to(active.take(row), flat.shape).astype(np.int64)
        done = _ready(m, flat, given, over, active.index, orders)
        if not done.all():
            m.polled = True
        active.put(target, done)

    return test


def bind_try_wait(ins: Instruction, number: int, m: Machine) -> Step:
    """mbarrier.try_wait: ends a block, because lanes whose phase is not over are set aside."""
    require(ins, "try_wait", "parity", *_QUALIFIERS)
    find, over, row = _phases(m, ins)
    target = m.regs.target(ins.operands[0], "pred")
    orders = not ins.has("relaxed")

    def go_on(active: Active) -> None:
        active.put(target, np.ones(active.count, bool))
        m.send(number + 1, active)

    def wait(active: Active) -> None:
        m.clocks.now += 1
        flat, lanes = find(active), active.index
        given = np.broadcast_to(active.take(row), flat.shape).astype(np.int64)
        done = _ready(m, flat, given, over, lanes, orders)
        if done.all():
            go_on(active)
            return
        flat_of, given_of = np.zeros(m.lanes, np.int64), np.zeros(m.lanes, np.int64)
        flat_of[lanes], given_of[lanes] = flat, given
        mask = active.mask.copy()
        mask[lanes[done]] = False
        m.engine.waiting.append(
            Waiter(mask, ins, lambda some: _ready(m, flat_of[some], given_of[some], over, some, orders), go_on)
        )
        if done.any():
            ready = np.zeros(m.lanes, bool)
            ready[lanes[done]] = True
            go_on(m.active(ready))

    return wait
