"""Asynchronous work: cp.async groups, mbarriers, and what waits for them.

Everything lands at the latest permitted moment: cp.async data at the wait that completes its group, bulk copies when no thread
can go on without them. Until then the destination is marked in flight, and touching it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes, Mask
from tests.ptxsim.errors import AsyncCopyError, MbarrierError
from tests.ptxsim.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]


@dataclass(slots=True)
class PendingCopy:
    """One cp.async instruction: lanes, their group numbers, destinations (flat shared bytes) and data."""

    lanes: Lanes
    group: NDArray[np.int64]
    flat: NDArray[np.int64]
    width: int
    data: Row
    ins: Instruction


@dataclass(slots=True)
class Mbarrier:
    """One mbarrier object.

    Attributes
    ----------
    expected : arrivals per phase.
    pending : arrivals still missing in this phase.
    transactions : bytes still expected in this phase.
    phase : number of completed phases.
    clock : what the arrivals of this phase knew; ``done``: of all completed phases.
    init_lane, init_time : who initialised it, and when.
    """

    expected: int
    pending: int
    init_lane: int
    init_time: int
    transactions: int = 0
    phase: int = 0
    clock: NDArray[np.int64] | None = None
    done: NDArray[np.int64] | None = None
    extra: int = 0


@dataclass(slots=True)
class Waiter:
    """Lanes that wait for phases of mbarriers."""

    mask: Mask
    ins: Instruction
    ready: Callable[[Lanes], NDArray[np.bool_]]
    go_on: Callable[[Active], None]


@dataclass(slots=True)
class Deferred:
    """Work of the asynchronous engine, to be done at the last moment."""

    run: Callable[[], None]
    ins: Instruction
    name: str = field(default="")


class AsyncEngine:
    """The asynchronous state of a launch."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.committed = np.zeros(0, np.int64)
        self.copies: list[PendingCopy] = []
        self.mbarriers: dict[int, Mbarrier] = {}
        self.waiting: list[Waiter] = []
        self.deferred: list[Deferred] = []
        self.proxy_time = np.zeros(m.lanes, np.int64)

    # cp.async

    def issue(self, active: Active, flat: NDArray[np.int64], width: int, data: Row, ins: Instruction) -> None:
        """Copies join the open group of their lanes."""
        if not len(self.committed):
            self.committed = np.zeros(self.m.lanes, np.int64)
        shared = self.m.shared
        if shared.shadow is not None:
            granules = shared.granules(flat, width)
            shared.shadow.check_write(granules, active.index)
            shared.shadow.mark_in_flight(granules, active.index)
        self.copies.append(PendingCopy(active.index, self.committed[active.index], flat, width, data, ins))

    def commit(self, active: Active) -> None:
        """Close the open group."""
        if not len(self.committed):
            self.committed = np.zeros(self.m.lanes, np.int64)
        self.committed[active.index] += 1

    def wait(self, active: Active, allowed: int | None) -> None:
        """Complete all groups of the lanes but the newest ``allowed``; None completes uncommitted copies too."""
        keep = []
        for copy in self.copies:
            due = active.mask[copy.lanes]
            if allowed is not None:
                due = due & (copy.group < self.committed[copy.lanes] - allowed)
            if due.all():
                self._land(copy.lanes, copy.flat, copy.width, copy.data)
                continue
            if due.any():
                self._land(copy.lanes[due], copy.flat[due], copy.width, copy.data[due])
                rest = ~due
                copy = PendingCopy(copy.lanes[rest], copy.group[rest], copy.flat[rest], copy.width, copy.data[rest], copy.ins)
            keep.append(copy)
        self.copies = keep

    def _land(self, lanes: Lanes, flat: NDArray[np.int64], width: int, data: Row) -> None:
        shared = self.m.shared
        shared.views[width][flat // width] = data
        if shared.shadow is not None:
            shared.shadow.record(shared.granules(flat, width), lanes)

    # mbarriers

    def at(self, flat: int, lane: int) -> Mbarrier:
        """The mbarrier at a shared byte.

        Raises
        ------
        MbarrierError
            There is none, or nothing orders its init before this use.
        """
        barrier = self.mbarriers.get(flat)
        if barrier is None:
            raise MbarrierError(f"{self.m.describe(lane)} uses an mbarrier that was not initialised")
        me = np.array([lane])
        if lane < self.m.lanes and not self.m.clocks.ordered(
            np.array([barrier.init_lane]), np.array([barrier.init_time]), me
        ).all():
            raise MbarrierError(
                f"{self.m.describe(lane)} uses an mbarrier whose init by {self.m.describe(barrier.init_lane)} is not ordered "
                "before it (a barrier is missing after the init)"
            )
        return barrier

    def arrive(self, barrier: Mbarrier, count: int, clock: NDArray[np.int64] | None) -> None:
        """Arrivals at the current phase, then its completion if they were the last."""
        if clock is not None:
            barrier.clock = clock.copy() if barrier.clock is None else np.maximum(barrier.clock, clock)
        if count > barrier.pending:
            raise MbarrierError(
                f"{count} arrivals at an mbarrier that expects {barrier.pending} more in its phase {barrier.phase}"
            )
        barrier.pending -= count
        self.complete(barrier)

    def complete(self, barrier: Mbarrier) -> None:
        """End the phase if nothing is missing."""
        if barrier.pending or barrier.transactions:
            return
        barrier.phase += 1
        barrier.pending = barrier.expected
        if barrier.clock is not None:
            barrier.done = barrier.clock if barrier.done is None else np.maximum(barrier.done, barrier.clock)
            barrier.clock = None
        self.m.progress += 1

    def proxy_fence(self, lanes: Lanes) -> None:
        """fence.proxy.async: the lanes' earlier writes are visible to asynchronous copies and wgmma."""
        self.proxy_time[lanes] = self.m.clocks.now

    # The scheduler's side.

    def release(self) -> bool:
        """Let waiters go whose phase is complete."""
        released = False
        for waiter in self.waiting[:]:
            lanes = np.flatnonzero(waiter.mask)
            good = waiter.ready(lanes)
            if not good.any():
                continue
            released = True
            mask = np.zeros_like(waiter.mask)
            mask[lanes[good]] = True
            waiter.mask = waiter.mask & ~mask
            if not waiter.mask.any():
                self.waiting.remove(waiter)
            waiter.go_on(self.m.active(mask))
        return released

    def deliver(self) -> bool:
        """Nobody can go on: release whoever may, else let the oldest asynchronous operation land."""
        if self.release():
            return True
        while self.deferred:
            self.deferred.pop(0).run()
            if self.release():
                return True
        return False

    def waiters(self) -> list[tuple[Mask, Instruction]]:
        """Who waits at mbarriers."""
        return [(waiter.mask, waiter.ins) for waiter in self.waiting]

    def finish(self) -> None:
        """At the kernel's end.

        Raises
        ------
        AsyncCopyError
            A cp.async was never waited for.
        """
        while self.deferred:
            self.deferred.pop(0).run()
        if self.copies:
            copy = self.copies[0]
            raise AsyncCopyError(
                f"cp.async of {self.m.describe(int(copy.lanes[0]))} is still in flight when the kernel ends"
                f"\n  at {copy.ins.source}: {copy.ins.text} (PTX line {copy.ins.line})"
            )
