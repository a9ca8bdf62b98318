"""The slots of all lanes of a store, in extents that one lane has at a time.

A slot's header says nothing of its extent's other uses. So before a lane writes into an extent that another one had,
the other's headers there are buried; and of two lanes whose headers a crash has left in one extent, the one that wrote
last has it, and the other's are buried, with the slots that they lie in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers.base import Record
from pagedkv.tiers.disk.ages import Ages
from pagedkv.tiers.disk.circuit_breaker import CircuitBreaker
from pagedkv.tiers.disk.format import SlotFormat
from pagedkv.tiers.disk.scan import Found, Scan
from pagedkv.tiers.disk.segments import Segments
from pagedkv.tiers.disk.settle import NO_LANE, settle
from pagedkv.tiers.disk.slots import Slots
from pagedkv.tiers.disk.stats import DiskStats, stats_of

LOOK_S = 0.1  # between two looks whether the thread that hands extents over hangs


class Lanes:
    """The slots of one open store, by lane; of a store without lanes, lane 0.

    Parameters
    ----------
    segments : of each lane.
    forms : their header formats.
    ages, breaker, where : see `Slots`.
    """

    def __init__(
        self,
        segments: Sequence[Segments],
        forms: Sequence[SlotFormat],
        ages: Ages,
        breaker: CircuitBreaker,
        where: str,
    ) -> None:
        self.ages, self._segments, self._breaker = ages, tuple(segments), breaker
        self.slots = tuple(Slots(*each, ages, breaker, where) for each in zip(segments, forms, strict=True))
        g = forms[0].geometry
        self._per_extent = [form.geometry.extent_slots for form in forms]
        self._lane_of = np.full(g.num_blocks // (g.extent_slots or g.num_blocks), NO_LANE, np.int8)  # by extent
        self._handing = threading.Lock()
        self._is_sure = True  # no header that could not be read lies amid another lane's pages, where it stays

    @property
    def epoch(self) -> int:
        """Records of another one count no more."""
        return self.slots[0].form.epoch

    # ---- the contents of a reopened store

    def take_over(self, on_progress: Callable[[int, int], object] | None) -> None:
        """Find what there is; ``on_progress(done, total)`` counts slots."""
        totals = [each.form.geometry.num_blocks for each in self.slots]
        found = []
        for lane, each in enumerate(self.slots):
            before = sum(totals[:lane])
            tell = None if on_progress is None else _counting_on(on_progress, before, sum(totals))
            others = [other.form.fingerprint for other in self.slots if other is not each]
            found.append(Scan(self._segments[lane], each.form, others).everything(tell))
        if len(found) > 1:
            found = self._settle(found)
        for each, one in zip(self.slots, found, strict=True):
            each.adopt(one)

    def _settle(self, found: list[Found]) -> list[Found]:
        """Give each extent to the lane that wrote there last; without what others left there."""
        sizes = [each.form.geometry for each in self.slots]
        settled = settle([one.slots for one in found], [one.generations for one in found], sizes, self.ages.next)
        self._lane_of[:] = settled.owners
        kept = []
        for lane, one in enumerate(found):
            void = np.concatenate((settled.torn[lane], settled.lost[lane]))
            of_doubtful = settled.owners[one.doubtful // self._per_extent[lane]]
            may_be_buried = (of_doubtful == lane) | (of_doubtful == NO_LANE)
            self._is_sure = self._is_sure and bool(may_be_buried.all())
            kept.append(_part(one, ~np.isin(one.slots, void), may_be_buried))
        for slots in (settled.torn, settled.lost):  # a torn page's header first: it may seem whole
            for lane, some in enumerate(slots):
                self._bury_or_close(lane, some.astype(np.int32))
        return kept

    def _bury_or_close(self, lane: int, slots: NDArray[np.int32]) -> None:
        """Bury headers, perhaps in other lanes' extents.

        No lane writes into their extents before that is done.
        """
        self.slots[lane].doubt(slots.astype(np.int64))
        left = slots[~self.slots[lane].bury(slots)]
        self._lane_of[left // self._per_extent[lane]] = NO_LANE

    # ---- transfers

    def write(
        self,
        lane: int,
        slots: NDArray[np.int32],
        records: Sequence[Record],
        arena: NDArray[np.uint8],
        rows: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """As `Slots.write`; False, too, in an extent that cannot be taken from another lane."""
        has = self._take_extents(lane, slots)
        if has.all():
            return self.slots[lane].write(slots, records, arena, rows)
        stored = np.zeros(slots.size, np.bool_)
        self.slots[lane].refuse_write(slots[~has])
        chosen = np.flatnonzero(has)
        stored[chosen] = self.slots[lane].write(slots[has], [records[i] for i in chosen.tolist()], arena, rows[has])
        return stored

    def _take_extents(self, lane: int, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The lane has the extents of these slots from now on; which of n slots it may write."""
        if len(self.slots) == 1:
            return np.ones(slots.size, np.bool_)
        extents = slots // self._per_extent[lane]
        has: NDArray[np.bool_] = self._lane_of[extents] == lane
        while not has.all() and not self._handing.acquire(timeout=LOOK_S):
            if self._breaker.hangs:  # perhaps the thread that has it
                return has
        if has.all():
            return has
        try:
            for extent in np.unique(extents).tolist():
                if self._lane_of[extent] != lane and self._is_buried(extent, lane):
                    self._lane_of[extent] = lane
        finally:
            self._handing.release()
        return np.equal(self._lane_of[extents], lane)

    def _is_buried(self, extent: int, lane: int) -> bool:
        """Whether no header of another lane in an extent counts, or may count another day."""
        for other, size in enumerate(self._per_extent):
            there = np.arange(extent * size, (extent + 1) * size, dtype=np.int32)
            if other != lane and not self.slots[other].bury(there).all():
                return False
        return True

    # ---- purges

    def bury_void(self) -> bool:
        """As `Slots.bury_void`, in all lanes, with a sync; whether the barriers could go."""
        done = [each.bury_void() for each in self.slots]
        self.sync()
        is_done = all(done) and self._is_sure
        if is_done:
            self.ages.barriers.clear()
        return is_done

    def forget_all(self) -> None:
        """Every slot holds nothing, and a new epoch begins. Who may be inside: as `bury_void`."""
        epoch = self.ages.begin_epoch(self.epoch)
        for each in self.slots:
            each.forget_all(epoch)
        self._lane_of[:] = NO_LANE
        self._is_sure = True  # headers of another epoch count no more

    def sync(self) -> None:
        """Wait until the device has all written bytes.

        Raises
        ------
        OSError
            As `SegmentFiles.sync`.
        """
        self._segments[0].files.sync()
        for each in self._segments:
            each.forget_written()

    def stats(self) -> DiskStats:
        """Counters so far, of all lanes."""
        return stats_of(self._breaker.state, [each.counts() for each in self.slots])


def _part(found: Found, chosen: NDArray[np.bool_], doubtful: NDArray[np.bool_]) -> Found:
    """Some of the records, and some of the doubtful slots."""
    arrays = {item.name: getattr(found, item.name)[chosen] for item in fields(Found) if item.name != "doubtful"}
    return replace(found, **arrays, doubtful=found.doubtful[doubtful])


def _counting_on(tell: Callable[[int, int], object], before: int, total: int) -> Callable[[int, int], object]:
    """Progress of one lane's scan among all."""
    return lambda done, _: tell(before + done, total)
