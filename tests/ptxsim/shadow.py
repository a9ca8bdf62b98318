"""The race checker: for every granule of a memory, who wrote it last and when, and who has read it since.

Reads are logged, not stored: a log entry matters only until all its readers are ordered before everybody, which is at the
next barrier in most kernels. A write looks through what is left of the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Lanes
from tests.ptxsim.clocks import Clocks
from tests.ptxsim.errors import DataRace, UninitialisedRead

UNWRITTEN = np.int32(2**31 - 1)
IN_FLIGHT = np.int32(2**31 - 2)
_NO_LANES = np.zeros(0, np.int64)

Rows = NDArray[np.int64]
Describe = Callable[[int], str]


class Shadow:
    """State of one memory's granules.

    Parameters
    ----------
    granules : how many.
    clocks : tells which events are ordered.
    unwritten : whether the memory starts without contents (shared memory).
    space : name for messages.
    place, thread : words for a granule and for a lane.
    """

    def __init__(
        self, granules: int, clocks: Clocks, unwritten: bool, space: str, place: Describe, thread: Describe
    ) -> None:
        self.clocks, self.space, self.place, self.thread = clocks, space, place, thread
        self.time = np.zeros(granules, np.int32)  # costs nothing where a huge pool is never touched
        if unwritten:
            self.time[...] = UNWRITTEN
        self.who = np.zeros(granules, np.int32)
        self.strong = np.zeros(granules, bool)
        self.any_strong = False
        self._marks: NDArray[np.int32] | None = None
        self._log: list[tuple[Rows, Lanes, int, bool]] = []
        self._log_columns: tuple[Rows, Lanes, NDArray[np.int64], NDArray[np.bool_]] | None = None

    def log_read(self, granules: Rows, lanes: Lanes, strong: bool = False) -> None:
        """Remember a read; ``granules`` is (lanes,) or (lanes, k)."""
        if self._log and self._log[-1][2] <= self.clocks.settled and self._single_cta_order():
            self._log.clear()
        self._log.append((granules, lanes, self.clocks.now, strong))

    def _single_cta_order(self) -> bool:
        """Whether a CTA barrier settles reads: in shared memory always, in global memory never between CTAs."""
        return self.space == "shared"

    def read(self, granules: Rows, lanes: Lanes, strong: bool = False) -> None:
        """Check a read against the last writes, and log it."""
        time = self.time.take(granules)
        if time.size and (time.max() > self.clocks.settled or self.space != "shared"):
            late = time > 0 if self.space != "shared" else time > self.clocks.settled
            if late.any():
                self._check_after_write(granules, lanes, late, strong, "read")
        self.log_read(granules, lanes, strong)

    def write(self, granules: Rows, lanes: Lanes, strong: bool = False) -> None:
        """Check a write against earlier accesses, and record it."""
        self.check_write(granules, lanes, strong)
        self.record(granules, lanes, strong)

    def check_write(self, granules: Rows, lanes: Lanes, strong: bool = False) -> None:
        """Check a write against the last writes and the reads since."""
        time = self.time.take(granules)
        late = (time > (self.clocks.settled if self.space == "shared" else 0)) & (time != UNWRITTEN)
        if late.any():
            self._check_after_write(granules, lanes, late, strong, "write")
        if self._log:
            self._check_after_reads(granules, lanes, strong)

    def record(self, granules: Rows, lanes: Lanes, strong: bool = False) -> None:
        """Record a write without checking anything but itself."""
        who = np.broadcast_to(lanes[:, None], granules.shape) if granules.ndim == 2 else lanes
        self.who[granules] = who
        self.time[granules] = self.clocks.now
        if strong or self.any_strong:
            self.any_strong = True
            self.strong[granules] = strong
        if not strong:
            clash = self.who.take(granules) != who
            if clash.any():
                place = np.argwhere(clash)[0]
                granule = int(granules[tuple(place)])
                other = int(self.who[granule])
                raise DataRace(
                    f"data race in {self.space} memory: {self.thread(int(lanes[place[0]]))} and {self.thread(other)} "
                    f"write {self.place(granule)} in one instruction"
                )

    def mark_in_flight(self, granules: Rows, lanes: Lanes) -> None:
        """An asynchronous copy will write here: nobody may touch it until the copy is waited for."""
        self.record(granules, lanes)
        self.time[granules] = IN_FLIGHT

    def _check_after_write(
        self, granules: Rows, lanes: Lanes, late: NDArray[np.bool_], strong: bool, verb: str
    ) -> None:
        """Raise unless each late granule's last write is ordered before its lane."""
        if granules.ndim == 2:
            owner = np.broadcast_to(lanes[:, None], granules.shape)[late]
        else:
            owner = lanes[late]
        spots = granules[late]
        time, who = self.time.take(spots), self.who.take(spots).astype(np.int64)
        flying = time >= IN_FLIGHT
        if flying.any():
            first = int(np.argmax(flying))
            spot, me = int(spots[first]), self.thread(int(owner[first]))
            if time[first] == UNWRITTEN:
                raise UninitialisedRead(f"uninitialised read: {me} reads {self.place(spot)}, which nothing has written")
            error = UninitialisedRead if verb == "read" else DataRace
            raise error(
                f"{verb} of bytes in flight: {me} {verb}s {self.place(spot)} before the asynchronous copy issued by "
                f"{self.thread(int(who[first]))} has been waited for"
            )
        fine = self.clocks.ordered(who, time, owner)
        if strong:
            fine |= self.strong.take(spots)
        if not fine.all():
            first = int(np.argmin(fine))
            raise DataRace(
                f"data race in {self.space} memory: {self.thread(int(owner[first]))} {verb}s "
                f"{self.place(int(spots[first]))} after an unsynchronised write by {self.thread(int(who[first]))}"
            )

    def _check_after_reads(self, granules: Rows, lanes: Lanes, strong: bool) -> None:
        """Raise unless all logged reads of the written granules are ordered before their writers."""
        if self.space == "shared" and self._log[-1][2] <= self.clocks.settled:
            self._log.clear()
            self._log_columns = None
            return
        spots, readers, times, strongs = self._columns()
        if not spots.size:
            return
        if self._marks is None:
            self._marks = np.zeros(len(self.time), np.int32)
        flat = granules.reshape(-1)
        self._marks[flat] = np.arange(1, flat.size + 1, dtype=np.int32)
        marked = self._marks.take(spots)
        self._marks[flat] = 0
        hit = np.flatnonzero(marked)
        if not hit.size:
            return
        per_lane = 1 if granules.ndim == 1 else granules.shape[1]
        writers = lanes[(marked[hit] - 1) // per_lane]
        fine = self.clocks.ordered(readers[hit], times[hit], writers)
        if strong:
            fine |= strongs[hit]
        if not fine.all():
            first = int(np.argmin(fine))
            raise DataRace(
                f"data race in {self.space} memory: {self.thread(int(writers[first]))} writes "
                f"{self.place(int(spots[hit[first]]))} after an unsynchronised read by "
                f"{self.thread(int(readers[hit[first]]))}"
            )
        keep = marked == 0  # whoever is ordered after this write is ordered after those reads
        self._log_columns = (spots[keep], readers[keep], times[keep], strongs[keep])

    def _columns(self) -> tuple[Rows, Lanes, NDArray[np.int64], NDArray[np.bool_]]:
        """The log as four flat columns; new entries are appended to what is consolidated."""
        done = self._log_columns
        parts: list[tuple[Any, ...]] = [] if done is None else [done]
        limit = self.clocks.settled if self.space == "shared" else -1
        for spots, lanes, time, strong in self._log:
            if time <= limit:
                continue
            if spots.ndim == 2:
                lanes = np.repeat(lanes, spots.shape[1])
            flat = spots.reshape(-1)
            parts.append((flat, lanes, np.full(flat.size, time, np.int64), np.full(flat.size, strong)))
        if self._log and (done is None or len(parts) > 1):
            self._log = self._log[-1:]  # its time tells when the whole log is settled
            self._log[0] = (_NO_LANES, _NO_LANES, self._log[0][2], False)
            columns = [np.concatenate([part[i] for part in parts]) for i in range(4)] if parts else None
            if columns is None:
                columns = [_NO_LANES, _NO_LANES, _NO_LANES, np.zeros(0, bool)]
            self._log_columns = (columns[0], columns[1], columns[2], columns[3])
        assert self._log_columns is not None
        return self._log_columns
