"""Release and acquire between CTAs, through accesses to one address.

The accesses are atomics, volatile and qualified ones.

A thread's fence makes releasable what is ordered before it: its own writes, those that its CTA's barriers put before
it, and those that other threads fenced themselves before they met it at a barrier. Its next strong store or atomic
publishes them at that address. A thread that later reads the address and then fences is ordered after them; so are the
threads that meet it at a barrier, once one of them has fenced. What is learnt at an mbarrier about other CTAs is
not passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Lanes, Mask

if TYPE_CHECKING:
    from tests.ptxsim.clocks import Clocks

Times = NDArray[np.int64]


class _Rows:
    """One row of times per lane, over all lanes of the grid.

    Lanes that know the same share a row.
    """

    def __init__(self, lanes: int) -> None:
        self.slot = np.zeros(lanes, np.int64)
        self.table = np.zeros((1, lanes), np.int64)

    def learn(self, lanes: Lanes, row: Times) -> None:
        """Lanes know, besides what they knew, what a row says."""
        self._compact()
        before = self.slot[lanes]
        for slot in np.unique(before).tolist():
            self.slot[lanes[before == slot]] = len(self.table)
            self.table = np.concatenate([self.table, np.maximum(self.table[slot], row)[None]])

    def share(self, givers: Lanes, takers: Lanes) -> None:
        """Takers learn what givers know."""
        slots = np.unique(self.slot[givers])
        if len(slots) == 1 and slots[0] == 0:
            return
        self.learn(takers, self.table[slots].max(axis=0))

    def forget(self, lanes: Lanes) -> None:
        """Lanes know nothing."""
        self.slot[lanes] = 0

    def _compact(self) -> None:
        """Drop rows that no lane has any more."""
        used = np.union1d(self.slot, [0])
        if len(self.table) > 2 * len(used) + 16:
            self.table = self.table[used]
            self.slot = np.searchsorted(used, self.slot)


class CrossClocks:
    """What each thread knows of other CTAs, and what has been published where."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        lanes, ctas, threads = clocks.lanes, clocks.ctas, clocks.threads
        self.fence_time = np.zeros(lanes, np.int64)  # last fence of each lane
        self.fence_cta_time = np.zeros(lanes, np.int64)  # its CTA's last barrier at that fence
        self.fenced = np.zeros(
            (ctas, threads), np.int64
        )  # at the CTA's last barrier: last fence of each of its threads
        fine = clocks.fine is not None
        self.fenced_fine = np.zeros((lanes, threads), np.int64) if fine else None  # the same as each lane knows it
        self.known, self.pending = _Rows(lanes), _Rows(lanes)
        self.published: dict[int, Times] = {}

    def cta_barrier(self, ctas: NDArray[np.int64] | slice) -> None:
        """All threads of CTAs met."""
        threads = self.clocks.threads
        times = self.fence_time.reshape(-1, threads)[ctas]
        self.fenced[ctas] = np.maximum(self.fenced[ctas], times)
        if self.fenced_fine is not None:
            rows = self.fenced_fine.reshape(-1, threads, threads)[ctas]
            self.fenced[ctas] = np.maximum(self.fenced[ctas], rows.max(axis=1))
        for table in (self.known, self.pending):
            if not table.slot.any():
                continue
            for cta in np.arange(self.clocks.ctas)[ctas].tolist():
                lanes = np.arange(cta * threads, (cta + 1) * threads)
                if table.slot[lanes].any():
                    table.share(lanes, lanes)

    def partial_barrier(self, participants: Mask, waiters: Mask) -> None:
        """Some threads of some CTAs met."""
        threads = self.clocks.threads
        ctas = np.flatnonzero(participants.reshape(-1, threads).any(axis=1))
        for cta in ctas.tolist():
            lanes = np.arange(cta * threads, (cta + 1) * threads)
            givers, takers = lanes[participants[lanes]], lanes[waiters[lanes]]
            self.known.share(givers, takers)
            self.pending.share(givers, takers)
            if self.fenced_fine is not None:
                row = self.fenced_fine[givers].max(axis=0)
                own = givers % threads
                row[own] = np.maximum(row[own], self.fence_time[givers])
                self.fenced_fine[takers] = np.maximum(self.fenced_fine[takers], row)

    def fence(self, lanes: Lanes) -> None:
        """membar or fence, at GPU or system scope."""
        clocks = self.clocks
        cta = lanes // clocks.threads
        self.fence_time[lanes] = clocks.now
        self.fence_cta_time[lanes] = clocks.cta_time[cta]
        if self.fenced_fine is not None and clocks.fine is not None:
            known = clocks.fine[cta, lanes % clocks.threads, : clocks.threads]
            self.fenced_fine[lanes] = np.maximum(self.fenced_fine[lanes], known)
        waiting = lanes[self.pending.slot[lanes] > 0]
        if waiting.size:
            for slot in np.unique(self.pending.slot[waiting]).tolist():
                self.known.learn(waiting[self.pending.slot[waiting] == slot], self.pending.table[slot])
            self.pending.forget(waiting)

    def access(self, lanes: Lanes, addresses: NDArray[np.int64], reads: bool, writes: bool) -> None:
        """Do a strong access by each lane, in lane order.

        It takes what was published and publishes what is fenced.
        """
        threads = self.clocks.threads
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            there = self.published.get(address)
            if reads and there is not None:
                self.pending.learn(np.array([lane]), there)
            if not writes:
                continue
            if not self.fence_time[lane]:
                if not reads:
                    self.published.pop(address, None)
                continue
            cta = lane // threads
            row = self.known.table[self.known.slot[lane]].copy()
            own = row[cta * threads : (cta + 1) * threads]
            np.maximum(own, self.fenced[cta], out=own)
            np.maximum(own, self.fence_cta_time[lane], out=own)
            if self.fenced_fine is not None:
                np.maximum(own, self.fenced_fine[lane], out=own)
            own[lane % threads] = self.fence_time[lane]
            if there is not None and reads:
                row = np.maximum(row, there)
            self.published[address] = row

    def ordered(self, who: Lanes, time: NDArray[Any], me: Lanes) -> Mask:
        """Elementwise, for threads of different CTAs."""
        threads_only = np.minimum(who, self.clocks.lanes - 1)
        result: Mask = (time <= self.known.table[self.known.slot[me], threads_only]) & (who < self.clocks.lanes)
        return result
