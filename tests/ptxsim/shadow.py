"""The race checker of a memory.

For every granule it knows who wrote it last and when, and what has been read since.

An access of ``many`` granules is naturally aligned, so lane i's granules are row ``rows[i]`` of the tables seen as rows
of that length: whole rows are taken and stored, which costs little more than single elements.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Lanes
from tests.ptxsim.clocks import Clocks
from tests.ptxsim.errors import DataRace, UninitialisedRead
from tests.ptxsim.read_log import ReadLog, Rows

# A granule's state: the time of its last write in the upper 32 bits, the writer's lane in the lower ones.
UNWRITTEN, IN_FLIGHT = 2**31 - 1, 2**31 - 2  # instead of a time
_WHO = 2**32 - 1
BLOCK = 16  # bytes of a block of the table of reads

Describe = Callable[[int], str]


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
        self.state = np.full(granules, UNWRITTEN << 32, np.int64) if shared else np.zeros(granules, np.int64)
        self.strong = np.zeros(granules, bool)
        self.any_strong = False
        self.log = ReadLog(granules)
        self.engine_log = ReadLog(granules)  # reads of the asynchronous engines, which no barrier settles
        self.engine_writes = False
        self.warps = clocks.threads // 32
        # Last read of each block by each warp and engine of its CTA: a quick test that settles most writes.
        columns = self.warps + 2
        self.block_reads = np.zeros((granules // self.per_block, columns), np.int32) if shared else None
        self.block_reads_flat = None if self.block_reads is None else self.block_reads.reshape(-1)

    def _row(self, table: NDArray[np.generic], many: int) -> NDArray[np.generic]:
        return table if many == 1 else table.reshape(-1, many)

    def _settled(self) -> int:
        """Return the time up to which writes need no look.

        Every thread that can meet those writes is ordered after them.
        """
        return self.clocks.settled if self.shared and not self.engine_writes else 0

    def read(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False) -> None:
        """Check a read against the last writes, and log it."""
        state = self._row(self.state, many).take(rows, 0)
        if state.max(initial=0) >> 32 > self._settled():
            self._check_after_write(rows, many, lanes, state, strong, "read")
        self.log_read(rows, many, lanes, strong)

    def log_read(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False) -> None:
        """Remember a read."""
        clocks = self.clocks
        if self.block_reads_flat is not None:
            if self.log.entries and self.log.last <= clocks.settled:
                self.log.clear()
            blocks = rows if many == self.per_block else rows * many // self.per_block
            columns = clocks.warp_column(lanes)
            self.block_reads_flat[blocks * (self.warps + 2) + columns] = clocks.now
        log = self.engine_log if lanes.size and lanes[0] >= clocks.lanes else self.log
        log.add(rows, many, lanes, clocks.now, strong)
        log.prune(self.state, clocks.settled if self.shared and log is self.log else 0)

    def write(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False) -> None:
        """Check a write against earlier accesses, and record it."""
        self.check_write(rows, many, lanes, strong)
        self.record(rows, many, lanes, strong)

    def check_write(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False) -> None:
        """Check a write against the last writes and the reads since."""
        state = self._row(self.state, many).take(rows, 0)
        if state.max(initial=0) >> 32 > self._settled():
            self._check_after_write(rows, many, lanes, state, strong, "write")
        if self.log.entries or self.engine_log.entries:
            self._check_after_reads(rows, many, lanes, strong)

    def record(self, rows: Rows, many: int, lanes: Lanes, strong: bool = False, time: int = 0) -> None:
        """Record a write, by default of now; two lanes may not write one place in one instruction."""
        self.engine_writes |= bool(lanes.size) and bool(lanes[0] >= self.clocks.lanes)
        state = lanes | (time or self.clocks.now) << 32
        self._row(self.state, many)[rows] = state if many == 1 else state[:, None]
        if strong or self.any_strong:
            self.any_strong = True
            self._row(self.strong, many)[rows] = strong
        if strong:
            return
        first = self.state.take(rows * many if many > 1 else rows)
        clash = first != state
        if clash.any():
            at = int(np.argmax(clash))
            one, other = self.thread(int(lanes[at])), self.thread(int(first[at]) & _WHO)
            place = self.place(int(rows[at]) * many)
            raise DataRace(f"data race in {self.space} memory: {one} and {other} write {place} in one instruction")

    def mark_in_flight(self, rows: Rows, many: int, lanes: Lanes) -> None:
        """Note that an asynchronous copy will write here.

        No thread may touch it until the copy is waited for.
        """
        self.record(rows, many, lanes, time=IN_FLIGHT)

    def writers(self, granules: Rows) -> tuple[Lanes, NDArray[np.int64]]:
        """Lane and time of the last writes."""
        state = self.state.take(granules)
        return state & _WHO, state >> 32

    def _check_after_write(
        self, rows: Rows, many: int, lanes: Lanes, state: NDArray[np.int64], strong: bool, verb: str
    ) -> None:
        """Raise unless the last write of each granule is ordered before its lane."""
        spots = rows * many
        if many > 1:
            if (state == state[:, :1]).all():
                state = state[:, 0]
            else:
                state = state.reshape(-1)
                spots = (spots[:, None] + np.arange(many)).reshape(-1)
                lanes = np.repeat(lanes, many)
        time, who = state >> 32, state & _WHO
        flying = time >= IN_FLIGHT
        if flying.any():
            if verb == "write":
                flying &= time != UNWRITTEN
            if flying.any():
                self._raise_in_flight(spots, lanes, time, who, int(np.argmax(flying)), verb)
        late = time > (self.clocks.cta_time[self.clocks.cta_of(lanes)] if self.shared else 0)
        if self.engine_writes:
            late |= who >= self.clocks.lanes
        if verb == "write" and self.shared:
            late &= time != UNWRITTEN
        if not late.any():
            return
        if not late.all():
            spots, lanes, time, who = spots[late], lanes[late], time[late], who[late]
        fine = self.clocks.ordered(who, time, lanes)
        if strong:
            fine |= self.strong.take(spots)
        if not fine.all():
            first = int(np.argmin(fine))
            raise DataRace(
                f"data race in {self.space} memory: {self.thread(int(lanes[first]))} {verb}s "
                f"{self.place(int(spots[first]))} after an unsynchronised write by {self.thread(int(who[first]))}"
            )

    def _raise_in_flight(
        self, spots: Rows, lanes: Lanes, time: NDArray[np.int64], who: Lanes, first: int, verb: str
    ) -> None:
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
                if not self.engine_log.entries:
                    return
            blocks = rows if many == self.per_block else rows * many // self.per_block
            late = self.block_reads.take(blocks, 0) > clocks.warp_knowledge(lanes)
            if not late.any():
                return
            some = late.any(axis=1)
            if not some.all():
                rows, lanes = rows[some], lanes[some]
        self._check_log(self.log, clocks.settled if self.shared else 0, rows, many, lanes, strong)
        self._check_log(self.engine_log, 0, rows, many, lanes, strong)

    def _check_log(self, log: ReadLog, settled: int, rows: Rows, many: int, lanes: Lanes, strong: bool) -> None:
        """The same, entry by entry."""
        clocks = self.clocks
        found = log.conflicts(rows, many, lanes, settled) if log.entries else None
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
