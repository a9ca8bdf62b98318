"""Who is ordered after whom.

Time is the count of memory and synchronising instructions run so far. An event of thread ``u`` at time ``t`` is ordered
before thread ``v`` if both are one thread, or if a barrier that both took part in came after ``t``: the CTA's last
``__syncthreads`` (``cta_time``), the warp's last ``__syncwarp`` (``warp_time``), or a chain of mbarriers and named
barriers (``fine``, exact per pair of threads, kept only for kernels that use them), or a release and an acquire between
CTAs (``known``, kept only for kernels that fence).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes, Mask
from tests.ptxsim.cross_clocks import CrossClocks


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
        # Column `threads` is the copy engine (TMA), whose lane number is lanes + cta; the column after it is the
        # tensor cores' reading of shared memory (wgmma), lanes + ctas + cta.
        self.fine = np.zeros((ctas, threads, threads + 2), np.int64) if fine else None
        self.cross = CrossClocks(self) if cross else None
        everyone = np.arange(self.lanes + 2 * ctas)  # threads, then the copy engines, then the tensor cores
        engine = everyone >= self.lanes
        self._cta = np.where(engine, (everyone - self.lanes) % ctas, everyone // threads)
        self._thread = np.where(engine, threads + (everyone - self.lanes) // ctas, everyone % threads)
        self._warp = np.where(engine, (threads >> 5) + (everyone - self.lanes) // ctas, everyone % threads >> 5)
        self._version = 0  # counts what changes the answer of warp_knowledge
        self._knowledge: tuple[int, Lanes, NDArray[np.int64]] | None = None

    def cta_of(self, lanes: Lanes) -> Lanes:
        """CTA of each lane; also of an engine's lane number."""
        return self._cta.take(lanes)

    def thread_of(self, lanes: Lanes) -> Lanes:
        """Column of a thread in its CTA's clocks; the engines' come last."""
        return self._thread.take(lanes)

    def warp_column(self, lanes: Lanes) -> Lanes:
        """Warp within its CTA; the engines' columns come last."""
        return self._warp.take(lanes)

    def changed(self) -> None:
        """Note that ``fine`` was written."""
        self._version += 1

    def warp_knowledge(self, lanes: Lanes) -> NDArray[np.int64]:
        """Return up to when all of a warp's events are ordered before each lane.

        There is one time for each lane and each warp of its CTA.

        The last two columns are for the engines. A lane's own events count as those of its warp, which is safe.
        """
        if self._knowledge is not None and self._knowledge[0] == self._version and self._knowledge[1] is lanes:
            return self._knowledge[2]
        cta, warps = self.cta_of(lanes), self.threads // 32
        out = np.empty((len(lanes), warps + 2), np.int64)
        if self.fine is None:
            out[...] = self.cta_time[cta][:, None]
        else:
            known = self.fine[cta, self.thread_of(lanes)]
            out[:, warps:] = known[:, self.threads :]
            out[:, :warps] = known[:, : self.threads].reshape(-1, warps, 32).min(axis=2)
            np.maximum(out[:, :warps], self.cta_time[cta][:, None], out=out[:, :warps])
        place = np.arange(len(lanes)), self.warp_column(lanes)
        out[place] = np.maximum(out[place], self.warp_time[lanes >> 5])
        self._knowledge = (self._version, lanes, out)
        return out

    def cta_barrier(self, ctas: NDArray[np.int64] | slice, live_ctas: Mask | None = None) -> None:
        """All threads of some CTAs met."""
        self._version += 1
        self.now += 1
        self.cta_time[ctas] = self.now
        self.settled = int(self.cta_time.min() if live_ctas is None else self.cta_time[live_ctas].min(initial=self.now))
        if self.fine is not None:  # what one thread knows of the engines, now all know
            known = self.fine[ctas, :, self.threads :]
            self.fine[ctas, :, self.threads :] = known.max(axis=1, keepdims=True)
        if self.cross is not None:
            self.cross.cta_barrier(ctas)

    def warp_barrier(self, active: Active, live: Mask) -> None:
        """The lanes of each active warp met (all its active lanes)."""
        self._version += 1
        self.now += 1
        warps = active.warps
        if warps is not None:
            self.warp_time[warps] = self.now
        else:
            warps = np.unique(active.index >> 5)
            whole = (active.mask | ~live).reshape(-1, 32)[warps].all(axis=1)
            self.warp_time[warps[whole]] = self.now  # a part of a warp is ordered by the fine clocks only
        if self.fine is not None:
            self._join(active, warps)

    def partial_barrier(self, ctas: NDArray[np.int64], participants: Mask, waiters: Mask) -> None:
        """Some threads of some CTAs met at a named barrier.

        Only ``waiters`` learn what all ``participants`` knew.
        """
        self._version += 1
        self.now += 1
        if self.cross is not None:
            self.cross.partial_barrier(participants, waiters)
        if self.fine is None:
            return
        self.stamp(np.flatnonzero(participants))
        for cta in ctas.tolist():
            rows = self.fine[cta]
            inside = participants.reshape(self.ctas, -1)[cta]
            learn = waiters.reshape(self.ctas, -1)[cta]
            rows[learn] = np.maximum(rows[inside].max(axis=0), self.cta_time[cta])

    def _join(self, active: Active, warps: Lanes | slice) -> None:
        assert self.fine is not None
        self.stamp(active.index)
        rows = self.fine.reshape(-1, 32, self.threads + 2)
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
        self._version += 1
        cta, thread = lanes // self.threads, lanes % self.threads
        self.fine[cta, thread] = np.maximum(self.fine[cta, thread], rows)

    def ordered(self, who: Lanes, time: NDArray[Any], me: Lanes) -> Mask:
        """Whether an event of ``who`` at ``time`` is ordered before what ``me`` does now.

        Works elementwise.
        """
        mine, theirs = self.cta_of(me), self.cta_of(who)
        same = mine == theirs
        result = who == me
        result |= same & (time <= self.cta_time[mine]) & (who < self.lanes)
        result |= (who >> 5 == me >> 5) & (time <= self.warp_time[me >> 5]) & (who < self.lanes)
        if self.fine is not None:
            result |= same & (time <= self.fine[mine, self.thread_of(me), self.thread_of(who)])
        if self.cross is not None:
            result |= ~same & self.cross.ordered(who, time, me)
        return result
