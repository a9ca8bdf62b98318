"""Asynchronous work: mbarriers, bulk copies and matrix products, and what waits for them.

Everything lands at the latest permitted moment: cp.async data at the wait that completes its group, bulk copies when no
thread can go on without them. Until then the destination is marked in flight, and touching it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes, Mask
from tests.ptxsim.copy_groups import CopyGroups
from tests.ptxsim.errors import AsyncCopyError, MbarrierError
from tests.ptxsim.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]
POISON = np.uint32(0x7FFF7FFF)  # NaN as f32 and as two f16


@dataclass(slots=True, eq=False)
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


@dataclass(slots=True, eq=False)
class Waiter:
    """Lanes that wait for phases of mbarriers."""

    mask: Mask
    ins: Instruction
    ready: Callable[[Lanes], NDArray[np.bool_]]
    go_on: Callable[[Active], None]


@dataclass(slots=True, eq=False)
class Sums:
    """A register that products add to.

    Until their group is waited for, it holds POISON, and ``real`` has what it will hold.

    Attributes
    ----------
    row : the register's bits.
    real : the same when all products issued so far are done.
    group : number of the last group that writes it, -1 if none is under way.
    """

    row: NDArray[np.uint32]
    real: NDArray[np.uint32]
    group: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Deferred:
    """Work of the asynchronous engine, to be done at the last moment."""

    run: Callable[[], None]
    ins: Instruction
    name: str = field(default="")


class AsyncEngine:
    """The asynchronous state of a launch."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.copies = CopyGroups(m)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.waiting: list[Waiter] = []
        self.deferred: list[Deferred] = []
        self.proxy_time = np.zeros(m.lanes, np.int64)
        self.store_groups: dict[int, list[int]] = {}  # per lane, the issue times of its groups
        self.product_groups: dict[int, list[int]] = {}  # the same per warpgroup
        self.sums: dict[str, Sums] = {}  # by the register's name

    def arrive_after_copies(self, active: Active, flat: NDArray[np.int64], ins: Instruction) -> None:
        """Later, all copies issued so far by the lanes land, and each lane arrives at its mbarrier."""
        issued = self.copies.of(active)
        lanes = active.index

        def land() -> None:
            m = self.m
            m.clocks.now += 1
            self.copies.land_some(issued, active)
            # The arrival makes the copies visible to who waits, though the lane itself has not waited for them.
            clock = m.clocks.release(lanes) if m.clocks.fine is not None else None
            for place in np.unique(flat).tolist():
                here = flat == place
                self.arrive(
                    self.at(place, int(lanes[here][0])),
                    int(here.sum()),
                    None if clock is None else clock[here].max(axis=0),
                )

        self.deferred.append(Deferred(land, ins))

    # Bulk stores: groups per lane, all complete at the wait.

    def stores_issued(self, lanes: Lanes) -> None:
        """Lanes have stores in their open group."""
        for lane in np.unique(lanes).tolist():
            self.store_groups.setdefault(lane, [0])[-1] = self.m.clocks.now

    def commit_stores(self, active: Active) -> None:
        """Close the lanes' open groups."""
        for lane in active.index.tolist():
            self.store_groups.setdefault(lane, [0]).append(0)

    def wait_stores(self, active: Active, allowed: int) -> None:
        """Note that all of the lanes' groups but the newest ``allowed`` have been read and written."""
        for lane in active.index.tolist():
            groups = self.store_groups.get(lane, [0])
            done = groups[: max(0, len(groups) - 1 - allowed)]
            if done and self.m.clocks.fine is not None:
                row = self.m.clocks.fine[lane // self.m.threads, lane % self.m.threads]
                row[self.m.threads] = max(row[self.m.threads], *done)
        self.m.clocks.changed()

    # wgmma groups, per warpgroup (its first lane).

    def products_issued(self, leaders: Lanes) -> None:
        """Warpgroups have products in their open group."""
        for lane in leaders.tolist():
            self.product_groups.setdefault(lane, [0])[-1] = self.m.clocks.now

    def sums_in(self, name: str, row: NDArray[np.uint32]) -> Sums:
        """What is known of a register that products add to."""
        if name not in self.sums:
            self.sums[name] = Sums(row, np.zeros_like(row), np.full(len(row), -1, np.int64))
        return self.sums[name]

    def open_groups(self, leaders: Lanes) -> NDArray[np.int64]:
        """Numbers of the warpgroups' open groups."""
        return np.array([len(self.product_groups.get(lane, [0])) - 1 for lane in leaders.tolist()], np.int64)

    def untouched(self, sums: Sums, name: str, lanes: Lanes) -> None:
        """Raise if these lanes' register was written while a product into it was under way."""
        bad = sums.row[lanes] != POISON
        if bad.any():
            who = self.m.describe(int(lanes[bad][0]))
            raise AsyncCopyError(f"{who} wrote {name} while a wgmma that writes it was in flight")

    def commit_products(self, active: Active) -> None:
        """Close the open groups."""
        for lane in active.index[::128].tolist():
            self.product_groups.setdefault(lane, [0]).append(0)

    def wait_products(self, active: Active, allowed: int) -> None:
        """Wait for all of the warpgroups' groups but the newest ``allowed``.

        Those groups have read shared memory and written their sums.
        """
        fine = self.m.clocks.fine
        due = np.repeat(np.maximum(self.open_groups(active.index[::128]) - allowed, 0), 128)
        for name, sums in self.sums.items():
            group = sums.group[active.index]
            landing = active.index[(group >= 0) & (group < due)]
            self.untouched(sums, name, landing)
            sums.row[landing] = sums.real[landing]
            sums.group[landing] = -1
        for lane in active.index[::128].tolist():
            groups = self.product_groups.get(lane, [0])
            done = groups[: max(0, len(groups) - 1 - allowed)]
            if done and fine is not None:
                first = lane % self.m.threads
                column = fine[lane // self.m.threads, first : first + 128, self.m.threads + 1]
                np.maximum(column, max(done), out=column)
        self.m.clocks.changed()

    def check_proxy(self, rows: NDArray[np.int64], many: int, lanes: Lanes, what: str) -> None:
        """Raise if the rows' last ordinary stores lack a fence of the asynchronous proxy.

        The thread that stored has to fence it.
        """
        shadow = self.m.shared.shadow
        assert shadow is not None
        granules = rows[:, None] * many + np.arange(many)
        who, time = shadow.writers(granules)
        ordinary = who < self.m.lanes
        bad = ordinary & (time > self.proxy_time[np.where(ordinary, who, 0)])
        if bad.any():
            place = tuple(np.argwhere(bad)[0])
            raise AsyncCopyError(
                f"{what} by {self.m.describe(int(lanes[place[0]]))} reads {shadow.place(int(granules[place]))}, which "
                f"{self.m.describe(int(who[place]))} wrote without a fence.proxy.async after it"
            )

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
        if (
            lane < self.m.lanes
            and not self.m.clocks.ordered(np.array([barrier.init_lane]), np.array([barrier.init_time]), me).all()
        ):
            raise MbarrierError(
                f"{self.m.describe(lane)} uses an mbarrier whose init by {self.m.describe(barrier.init_lane)} is not "
                "ordered before it (a barrier is missing after the init)"
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
        """fence.proxy.async: publish the lanes' earlier writes.

        Asynchronous copies and wgmma see them.
        """
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
        """No lane can go on: release the waiters that may.

        Without any, let the oldest asynchronous operation land.
        """
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
        self.copies.require_none()
