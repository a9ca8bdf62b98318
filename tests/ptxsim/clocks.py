"""Who is ordered after whom.

Time is the count of memory and synchronising instructions run so far. An event of thread ``u`` at time ``t`` is ordered
before thread ``v`` if both are one thread, or if a barrier that both took part in came after ``t``: the CTA's last
``__syncthreads`` (``cta_time``), the warp's last ``__syncwarp`` (``warp_time``), or a chain of mbarriers and named barriers
(``fine``, exact per pair of threads, kept only for kernels that use them), or a release and an acquire between CTAs
(``known``, kept only for kernels that fence).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes, Mask


class Clocks:
    """Happens-before between the threads of one launch.

    Parameters
    ----------
    ctas, threads : CTAs of the grid, threads per CTA (padded to whole warps).
    fine : keep exact clocks between the threads of a CTA.
    cross : keep clocks between CTAs.
    """

    def __init__(self, ctas: int, threads: int, fine: bool, cross: bool) -> None:
        self.now = 1
        self.ctas, self.threads, self.lanes = ctas, threads, ctas * threads
        self.cta_time = np.zeros(ctas, np.int64)
        self.warp_time = np.zeros(self.lanes // 32, np.int64)
        self.settled = 0  # everything up to this time is ordered before every thread, within its own CTA
        # Column `threads` is the asynchronous engine (TMA), whose lane number is lanes + cta.
        self.fine = np.zeros((ctas, threads, threads + 1), np.int64) if fine else None
        self.cross = CrossClocks(self) if cross else None

    def cta_of(self, lanes: Lanes) -> Lanes:
        """CTA of each lane; also of an engine's lane number."""
        return np.where(lanes >= self.lanes, lanes - self.lanes, lanes // self.threads)

    def thread_of(self, lanes: Lanes) -> Lanes:
        """Thread within its CTA; ``threads`` for the engine."""
        return np.where(lanes >= self.lanes, self.threads, lanes % self.threads)

    def cta_barrier(self, ctas: NDArray[np.int64] | slice, live_ctas: Mask | None = None) -> None:
        """All threads of some CTAs met."""
        self.now += 1
        self.cta_time[ctas] = self.now
        self.settled = int(self.cta_time.min() if live_ctas is None else self.cta_time[live_ctas].min(initial=self.now))
        if self.cross is not None:
            self.cross.cta_barrier(ctas)

    def warp_barrier(self, active: Active, masks: NDArray[np.uint32] | None = None) -> None:
        """The lanes of each active warp met (all its active lanes)."""
        self.now += 1
        warps = active.warps
        if warps is None:
            warps = np.unique(active.index >> 5)
        self.warp_time[warps] = self.now
        if self.fine is not None:
            self._join(active, warps)

    def partial_barrier(self, ctas: NDArray[np.int64], everybody: Mask, waiters: Mask) -> None:
        """Some threads of some CTAs met at a named barrier; only ``waiters`` learn what ``everybody`` knew."""
        self.now += 1
        if self.fine is None:
            return
        self.stamp(np.flatnonzero(everybody))
        for cta in ctas.tolist():
            rows = self.fine[cta]
            inside = everybody.reshape(self.ctas, -1)[cta]
            learn = waiters.reshape(self.ctas, -1)[cta]
            rows[learn] = np.maximum(rows[inside].max(axis=0), self.cta_time[cta])

    def _join(self, active: Active, warps: Lanes | slice) -> None:
        assert self.fine is not None
        self.stamp(active.index)
        rows = self.fine.reshape(-1, 32, self.threads + 1)
        member = active.mask.reshape(-1, 32)[warps]
        known = rows[warps]
        joined = np.where(member[:, :, None], known, 0).max(axis=1, keepdims=True)
        rows[warps] = np.where(member[:, :, None], joined, known)

    def stamp(self, lanes: Lanes) -> None:
        """Each lane knows all it did itself."""
        if self.fine is not None:
            self.fine[lanes // self.threads, lanes % self.threads, lanes % self.threads] = self.now

    def release(self, lanes: Lanes) -> NDArray[np.int64]:
        """What each lane passes on when it arrives at a barrier: a row of clocks per lane."""
        assert self.fine is not None
        self.stamp(lanes)
        cta = lanes // self.threads
        return np.maximum(self.fine[cta, lanes % self.threads], self.cta_time[cta][:, None])

    def acquire(self, lanes: Lanes, rows: NDArray[np.int64]) -> None:
        """Each lane learns a row of clocks."""
        assert self.fine is not None
        cta, thread = lanes // self.threads, lanes % self.threads
        self.fine[cta, thread] = np.maximum(self.fine[cta, thread], rows)

    def ordered(self, who: Lanes, time: NDArray[Any], me: Lanes) -> Mask:
        """Whether an event of ``who`` at ``time`` is ordered before what ``me`` does now; elementwise."""
        mine, theirs = me // self.threads, self.cta_of(who)
        same = mine == theirs
        result = who == me
        result |= same & (time <= self.cta_time[mine])
        result |= (who >> 5 == me >> 5) & (time <= self.warp_time[me >> 5]) & (who < self.lanes)
        if self.fine is not None:
            result |= same & (time <= self.fine[mine, me % self.threads, self.thread_of(who)])
        if self.cross is not None:
            result |= ~same & self.cross.ordered(who, time, me, theirs)
        return result


class CrossClocks:
    """Release and acquire between CTAs, through atomics, volatile and qualified accesses on one address.

    A thread's fence makes releasable what is ordered before it: all its own writes, and those of its CTA before the last
    ``__syncthreads``. The next strong store or atomic of that thread publishes them at its address. A thread that later
    reads the address and then fences is ordered after them; so are the threads that meet it at a barrier and then fence.
    If all threads of a CTA fenced their writes before a ``__syncthreads``, any of them may publish after it.
    """

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        lanes, ctas = clocks.lanes, clocks.ctas
        self.fence_time = np.zeros(lanes, np.int64)  # last fence of each lane
        self.fence_cta_time = np.zeros(lanes, np.int64)  # its CTA's last barrier at that fence
        self.write_time = np.zeros(lanes, np.int64)  # last global write of each lane
        self.clean_time = np.zeros(ctas, np.int64)  # last barrier at which all the CTA's writes were fenced
        self.known = np.zeros((lanes, ctas), np.int64)
        self.pending = np.zeros((lanes, ctas), np.int64)  # read at an address, but not fenced yet
        self.exact: dict[int, dict[int, int]] = {}  # lane -> {other lane: time}
        self.exact_pending: dict[int, dict[int, int]] = {}
        self.published: dict[int, tuple[NDArray[np.int64], dict[int, int]]] = {}

    def cta_barrier(self, ctas: NDArray[np.int64] | slice) -> None:
        """The threads of a CTA share what each knew."""
        threads = self.clocks.threads
        for table in (self.known, self.pending):
            rows = table.reshape(-1, threads, self.clocks.ctas)
            rows[ctas] = rows[ctas].max(axis=1, keepdims=True)
        clean = (self.write_time <= self.fence_time).reshape(-1, threads).all(axis=1)
        here = np.zeros(self.clocks.ctas, bool)
        here[ctas] = True
        self.clean_time[clean & here] = self.clocks.now
        for table in (self.exact, self.exact_pending):
            for lane in list(table):
                if here[lane // threads]:
                    first = lane // threads * threads
                    for other in range(first, first + threads):
                        table.setdefault(other, {}).update(table[lane])

    def fence(self, lanes: Lanes) -> None:
        """membar or fence, at GPU or system scope."""
        self.fence_time[lanes] = self.clocks.now
        self.fence_cta_time[lanes] = self.clocks.cta_time[lanes // self.clocks.threads]
        self.known[lanes] = np.maximum(self.known[lanes], self.pending[lanes])
        if self.exact_pending:
            for lane in lanes.tolist():
                if lane in self.exact_pending:
                    self.exact.setdefault(lane, {}).update(self.exact_pending.pop(lane))

    def access(self, lanes: Lanes, addresses: NDArray[np.int64], reads: bool, writes: bool) -> None:
        """A strong access by each lane, in lane order: it takes what was published and publishes what is fenced."""
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            there = self.published.get(address)
            if reads and there is not None:
                self.pending[lane] = np.maximum(self.pending[lane], there[0])
                if there[1]:
                    self.exact_pending.setdefault(lane, {}).update(there[1])
            if not writes:
                continue
            if not self.fence_time[lane]:
                if not reads:
                    self.published.pop(address, None)
                continue
            cta = lane // self.clocks.threads
            row, exact = self.known[lane].copy(), dict(self.exact.get(lane, {}))
            row[cta] = max(row[cta], self.fence_cta_time[lane], self.clean_time[cta])
            exact[lane] = int(self.fence_time[lane])
            if there is not None and reads:
                row, exact = np.maximum(row, there[0]), exact | there[1]
            self.published[address] = (row, exact)

    def ordered(self, who: Lanes, time: NDArray[Any], me: Lanes, ctas: Lanes) -> Mask:
        """Elementwise, for threads of different CTAs."""
        result = time <= self.known[me, ctas]
        if self.exact:
            for place in np.flatnonzero(~result).tolist():
                other = self.exact.get(int(me[place]), {})
                result[place] = int(time[place]) <= other.get(int(who[place]), -1)
        return result
