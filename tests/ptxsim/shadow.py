"""The race checker: for every granule of a memory, who wrote it last and when, and what has been read since.

An access of ``many`` granules is naturally aligned, so lane i's granules are row ``rows[i]`` of the tables seen as rows of that
length: whole rows are taken and stored, which costs little more than single elements.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Lanes
from tests.ptxsim.clocks import Clocks
from tests.ptxsim.errors import DataRace, UninitialisedRead
from tests.ptxsim.read_log import ReadLog, Rows

UNWRITTEN = np.int32(2**31 - 1)
IN_FLIGHT = np.int32(2**31 - 2)
BLOCK = 16  # bytes of a block of the table of reads

Describe = Callable[[int], str]
Times = NDArray[np.int32]


class Shadow:
    """State of one memory's granules.

    Parameters
    ----------
    granules, granule : how many, and their bytes. Whole blocks of 16 bytes.
    clocks : tells which events are ordered.
    shared : the memory is shared memory: it starts unwritten, and only threads of one CTA meet in it.
    place, thread : words for a granule and for a lane.
    """

    def __init__(
        self, granules: int, granule: int, clocks: Clocks, shared: bool, place: Describe, thread: Describe
    ) -> None:
        self.clocks, self.shared, self.place, self.thread = clocks, shared, place, thread
        self.space = "shared" if shared else "global"
        self.per_block = BLOCK // granule
        # Zeros cost nothing until they are touched: arrays of gigabytes stay cheap.
        self.time = np.full(granules, UNWRITTEN, np.int32) if shared else np.zeros(granules, np.int32)
        self.who = np.zeros(granules, np.int32)
        self.strong = np.zeros(granules, bool)
        self.any_strong = False
        self.log = ReadLog(granules)
        self.warps = clocks.threads // 32
        # Last read of each block by each warp of its CTA (and by its engines): a quick test that settles most writes.
        columns = self.warps + 1
        self.block_reads = np.zeros((granules // self.per_block, columns), np.int32) if shared else None
        self.block_reads_flat = None if self.block_reads is None else self.block_reads.reshape(-1)

    def _row(self, table: NDArray[np.generic], many: int) -> NDArray[np.generic]:
        return table if many == 1 else table.reshape(-1, many)

    def _settled(self) -> int:
        """Writes up to this time need no look: every thread that can meet them is ordered after them."""
        return self.clocks.settled if self.shared else 0

    def read(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False) -> None:
        """Check a read against the last writes, and log it."""
        time = self._row(self.time, many).take(rows, 0)
        if time.max(initial=0) > self._settled():
            self._check_after_write(rows, many, lanes, time, strong, "read")
        self.log_read(rows, many, lanes, strong)

    def log_read(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False) -> None:
        """Remember a read."""
        clocks = self.clocks
        if self.block_reads_flat is not None:
            if self.log.entries and self.log.last <= clocks.settled:
                self.log.clear()
            blocks = rows if many == self.per_block else rows * many // self.per_block
            columns = clocks.warp_column(lanes)
            self.block_reads_flat[blocks * (self.warps + 1) + columns] = clocks.now
        self.log.add(rows, many, lanes, clocks.now, strong)
        self.log.prune(self.time, self._settled())

    def write(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False) -> None:
        """Check a write against earlier accesses, and record it."""
        self.check_write(rows, many, lanes, strong)
        self.record(rows, many, lanes, strong)

    def check_write(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False) -> None:
        """Check a write against the last writes and the reads since."""
        time = self._row(self.time, many).take(rows, 0)
        if time.max(initial=0) > self._settled():
            self._check_after_write(rows, many, lanes, time, strong, "write")
        if self.log.entries:
            self._check_after_reads(rows, many, lanes, strong)

    def record(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False) -> None:
        """Record a write; two lanes may not write one place in one instruction."""
        who = self._row(self.who, many)
        who[rows] = lanes if many == 1 else lanes[:, None]
        self._row(self.time, many)[rows] = self.clocks.now
        if strong or self.any_strong:
            self.any_strong = True
            self._row(self.strong, many)[rows] = strong
        if strong:
            return
        first = self.who.take(rows * many) if many > 1 else who.take(rows)
        clash = first != lanes
        if clash.any():
            place = int(np.argmax(clash))
            raise DataRace(
                f"data race in {self.space} memory: {self.thread(int(lanes[place]))} and "
                f"{self.thread(int(first[place]))} write {self.place(int(rows[place]) * many)} in one instruction"
            )

    def mark_in_flight(self, rows: Rows, many: int, lanes: Lanes) -> None:
        """An asynchronous copy will write here: nobody may touch it until the copy is waited for."""
        self.record(rows, many, lanes)
        self._row(self.time, many)[rows] = IN_FLIGHT

    def _check_after_write(self, rows: Rows, many: int, lanes: Lanes, time: Times, strong: bool, verb: str) -> None:
        """Raise unless the last write of each granule is ordered before its lane."""
        who = self._row(self.who, many).take(rows, 0)
        spots = rows * many
        if many > 1:
            if (time == time[:, :1]).all() and (who == who[:, :1]).all():
                time, who = time[:, 0], who[:, 0]
            else:
                time, who = time.reshape(-1), who.reshape(-1)
                spots = (spots[:, None] + np.arange(many)).reshape(-1)
                lanes = np.repeat(lanes, many)
        flying = time >= IN_FLIGHT
        if flying.any():
            if verb == "write":
                flying &= time != UNWRITTEN
            if flying.any():
                self._raise_in_flight(spots, lanes, time, who, int(np.argmax(flying)), verb)
        late = time > (self.clocks.cta_time[lanes // self.clocks.threads] if self.shared else 0)
        if verb == "write" and self.shared:
            late &= time != UNWRITTEN
        if not late.any():
            return
        if not late.all():
            spots, lanes, time, who = spots[late], lanes[late], time[late], who[late]
        fine = self.clocks.ordered(who.astype(np.int64), time, lanes)
        if strong:
            fine |= self.strong.take(spots)
        if not fine.all():
            first = int(np.argmin(fine))
            raise DataRace(
                f"data race in {self.space} memory: {self.thread(int(lanes[first]))} {verb}s "
                f"{self.place(int(spots[first]))} after an unsynchronised write by {self.thread(int(who[first]))}"
            )

    def _raise_in_flight(self, spots: Rows, lanes: Lanes, time: Times, who: Times, first: int, verb: str) -> None:
        place, me = self.place(int(spots[first])), self.thread(int(lanes[first]))
        if time[first] == UNWRITTEN:
            raise UninitialisedRead(f"uninitialised read: {me} reads {place}, which nothing has written")
        error = UninitialisedRead if verb == "read" else DataRace
        raise error(
            f"{verb} of bytes in flight: {me} {verb}s {place} before the asynchronous copy issued by "
            f"{self.thread(int(who[first]))} has been waited for"
        )

    def _check_after_reads(self, rows: Rows, many: int, lanes: Lanes, strong: bool) -> None:
        """Raise unless all reads of the written granules are ordered before their writers."""
        clocks = self.clocks
        if self.block_reads is not None:
            if self.log.last <= clocks.settled:
                self.log.clear()
                return
            blocks = rows if many == self.per_block else rows * many // self.per_block
            late = self.block_reads.take(blocks, 0) > clocks.warp_knowledge(lanes)
            if not late.any():
                return
            some = late.any(axis=1)
            if not some.all():
                rows, lanes = rows[some], lanes[some]
        found = self.log.conflicts(rows, many, lanes, self._settled())
        if found is None:
            return
        fine = clocks.ordered(found.readers, found.times, found.writers)
        if strong:
            fine |= found.strong
        if not fine.all():
            first = int(np.argmin(fine))
            raise DataRace(
                f"data race in {self.space} memory: {self.thread(int(found.writers[first]))} writes "
                f"{self.place(int(found.granules[first]))} after an unsynchronised read by "
                f"{self.thread(int(found.readers[first]))}"
            )
