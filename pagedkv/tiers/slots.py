"""How blocks are written into slots and read back: the protocols of the disk tier, and its counters.

    write: tombstone over a live slot, payload, header with a new generation
    read:  header and payload into place, then compare everything

The caller owns the slots of a call; different slots may be written and read by several threads at once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers.base import Record
from pagedkv.tiers.disk_format import SlotFormat
from pagedkv.tiers.segments import Segments

log = logging.getLogger("pagedkv.tiers.disk")

BATCH_BYTES = 16 << 20  # moved by one call without the GIL
MISS_REASONS = ("empty", "io_error", "short", "header", "misplaced", "stale", "identity", "tokens", "payload")


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counters since the tier was opened, in blocks.

    Attributes
    ----------
    blocks_read, blocks_written : served and stored.
    misses : by reason, one of `MISS_REASONS` each.
    write_errors : by the name of the errno.
    """

    blocks_read: int
    blocks_written: int
    misses: dict[str, int]
    write_errors: dict[str, int]


class Slots:
    """Slots of one open store. Generation 0 means that a slot holds nothing, whatever lies on disk.

    Parameters
    ----------
    segments : the open files.
    form : the store's header format.
    next_generation : lower bound for the generation of the next write.
    where : the directory's name, for the log.
    """

    def __init__(self, segments: Segments, form: SlotFormat, next_generation: int, where: str) -> None:
        self._segments = segments
        self._form = form
        self._where = where
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._generations: NDArray[np.uint64] = np.zeros(form.geometry.num_blocks, np.uint64)
        self.next_generation = next_generation

    def scan(self) -> None:
        """Find the live slots of a store that existed. Of slots with one key the latest counts, the rest are buried."""
        keys: dict[int, bytes] = {}
        for slot in range(self._form.geometry.num_blocks):
            found = self._form.parse(slot, self._segments.read_header(slot))
            if found is not None:
                self._generations[slot], keys[slot] = found[0], found[1].key
                self.next_generation = max(self.next_generation, found[0] + 1)
        latest = {keys[slot]: slot for slot in sorted(keys, key=self._generations.__getitem__)}
        self.bury(np.array(sorted(keys.keys() - latest.values()), np.int32))

    def name(self, slot: int) -> tuple[int, Record] | None:
        """Generation and record of a slot, read from its header; None if it holds nothing."""
        generation = int(self._generations[slot])
        if not generation:
            return None
        found = self._form.parse(slot, self._segments.read_header(slot))
        return found if found is not None and found[0] == generation else None

    def write(
        self,
        slots: NDArray[np.int32],
        records: Sequence[Record],
        arena: NDArray[np.uint8],
        rows: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Store ``arena[rows]`` under `records`; bool [n], False where the slot holds nothing now."""
        stored = np.zeros(slots.size, np.bool_)
        for part in self._batches(slots.size):
            stored[part] = self._write_batch(slots[part], records[part], arena, rows[part])
        return stored

    def read(
        self,
        slots: NDArray[np.int32],
        expected: Sequence[Record],
        arena: NDArray[np.uint8],
        rows: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Fill ``arena[rows]``; bool [n], True where the row is what was stored under that record."""
        hit = np.zeros(slots.size, np.bool_)
        for part in self._batches(slots.size):
            hit[part] = self._read_batch(slots[part], expected[part], arena, rows[part])
        return hit

    def bury(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Write tombstones over live slots; bool [n] says which slots hold nothing now, on disk too."""
        ok = np.ones(slots.size, np.bool_)
        live = self._generations[slots] != 0
        if live.any():
            buried = slots[live]
            stones = [self._form.tombstone(int(slot), int(self._generations[slot])) for slot in buried]
            self._generations[buried] = 0
            headers = np.frombuffer(b"".join(stones), np.uint8).reshape(buried.size, -1)
            outcomes = self._segments.write_headers(buried, headers)
            ok[live] = outcomes >= 0
            self._count_failures(outcomes)
        return ok

    def stats(self) -> DiskStats:
        """Counters so far."""
        with self._lock:
            counts = dict(self._counts)
        return DiskStats(
            blocks_read=counts.get("read", 0),
            blocks_written=counts.get("written", 0),
            misses={reason: counts.get(f"miss {reason}", 0) for reason in MISS_REASONS},
            write_errors={what.removeprefix("write "): n for what, n in counts.items() if what.startswith("write ")},
        )

    def _batches(self, count: int) -> Iterator[slice]:
        size = max(1, BATCH_BYTES // self._form.geometry.block_bytes)
        return (slice(start, start + size) for start in range(0, count, size))

    def _write_batch(
        self,
        slots: NDArray[np.int32],
        records: Sequence[Record],
        arena: NDArray[np.uint8],
        rows: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        with self._lock:
            first = self.next_generation
            self.next_generation += slots.size
        ok = self.bury(slots)
        slots, rows, chosen = slots[ok], rows[ok], np.flatnonzero(ok)
        named = [(first + i, records[i]) for i in chosen.tolist()]
        seeds = np.array([self._form.seed(*name) for name in named], np.uint64)
        outcomes, sums = self._segments.write_payloads(slots, arena, rows, seeds)
        now = int(time.time())
        headers = [
            self._form.header(slot, generation, record, sums[i], now)
            for i, (slot, (generation, record)) in enumerate(zip(slots.tolist(), named))
        ]
        packed = np.frombuffer(b"".join(headers), np.uint8).reshape(slots.size, self._form.geometry.header_bytes)
        written = outcomes >= 0
        outcomes[written] = self._segments.write_headers(slots[written], packed[written])
        written = outcomes >= 0
        self._count_failures(outcomes)
        self._generations[slots[written]] = first + chosen[written].astype(np.uint64)
        ok[chosen[~written]] = False
        with self._lock:
            self._counts["written"] += int(ok.sum())
        return ok

    def _read_batch(
        self,
        slots: NDArray[np.int32],
        expected: Sequence[Record],
        arena: NDArray[np.uint8],
        rows: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        g = self._form.geometry
        hit = np.zeros(slots.size, np.bool_)
        generations = self._generations[slots]
        headers = np.empty((slots.size, g.header_bytes), np.uint8)
        pairs = zip(generations.tolist(), expected)
        seeds = np.array([self._form.seed(generation, record) for generation, record in pairs], np.uint64)
        outcomes, sums = self._segments.read(slots, headers, arena, rows, seeds)
        for i, record in enumerate(expected):
            slot, generation = int(slots[i]), int(generations[i])
            reason: str | None
            if not generation:
                reason = "empty"
            elif outcomes[i] < 0:
                reason = "io_error"
            elif outcomes[i] != g.header_bytes + g.block_bytes:
                reason = "short"
            elif self._generations[slot] != generation:
                reason = "stale"
            else:
                reason = self._form.mismatch(slot, generation, record, memoryview(headers[i]), sums[i])
            if reason is None:
                hit[i] = True
            else:
                self._count(f"miss {reason}", f"block {slot} is a miss: {reason}", quiet=reason == "empty")
        with self._lock:
            self._counts["read"] += int(hit.sum())
        return hit

    def _count_failures(self, outcomes: NDArray[np.int64]) -> None:
        for outcome in outcomes[outcomes < 0]:
            number = -int(outcome)
            name = errno.errorcode.get(number, str(number))
            self._count(f"write {name}", f"a write failed: {os.strerror(number)}")

    def _count(self, what: str, message: str, *, quiet: bool = False) -> None:
        """Count, and log the first of each kind: a dying disk must not fill the log."""
        with self._lock:
            self._counts[what] += 1
            first = what not in self._logged and not quiet
            self._logged.add(what)
        if first:
            log.warning("disk tier %s: %s (others of this kind are only counted)", self._where, message)
