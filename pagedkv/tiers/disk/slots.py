"""Writes and reads the blocks of a disk tier in their slots, and counts.

    write: tombstone over a live slot, payload, header with a new generation
    read:  header and payload into place, then compare everything
    void:  from now on nothing of a namespace with an earlier generation counts, whatever lies in the slots

The caller owns the slots of a call; different slots may be written and read by several threads at once.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagedkv.observe.callbacks import Log
from pagedkv.tiers.base import Record
from pagedkv.tiers.disk.ages import Ages
from pagedkv.tiers.disk.circuit_breaker import HANGS, CircuitBreaker
from pagedkv.tiers.disk.format import SlotFormat
from pagedkv.tiers.disk.scan import Found
from pagedkv.tiers.disk.segments import Segments

log = Log(logging.getLogger("pagedkv.tiers.disk"))

BATCH_BYTES = 16 << 20  # moved by one call without the GIL


class Slots:
    """Slots of one open store.

    Generation 0 means that a slot holds nothing, whatever lies on disk.

    Parameters
    ----------
    segments : the open files.
    form : the store's header format.
    ages : shared by all slots of a store.
    breaker : asked before every transfer and told of its outcome.
    where : the directory's name, for the log.
    """

    def __init__(
        self,
        segments: Segments,
        form: SlotFormat,
        ages: Ages,
        breaker: CircuitBreaker,
        where: str,
    ) -> None:
        self._segments, self._form, self._breaker, self._where = segments, form, breaker, where
        self._ages, self._lock = ages, ages.lock
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()
        count = form.geometry.num_blocks
        self._generations: NDArray[np.uint64] = np.zeros(count, np.uint64)
        self._namespaces: NDArray[np.int32] = np.full(count, -1, np.int32)  # index into _digests, of live slots
        self._digests: dict[bytes, int] = {}
        self._doubtful: set[int] = set()  # slots that hold nothing, but whose header on disk may say otherwise

    # ---- the contents of a reopened store

    def adopt(self, found: Found) -> None:
        """Take over live records found on disk, and bury the rest.

        Void records, and those of a generation that no write has had, are buried. Of the others with one key the latest
        counts, and the older ones are buried.
        """
        slots = found.slots
        self._generations[slots] = found.generations
        rows, which = _distinct(found.namespaces)
        digests = [row.astype("<u8").tobytes() for row in rows]
        self._namespaces[slots] = np.array([self._number_of(digest) for digest in digests], np.int32)[which]
        barriers = np.array([self._ages.barriers.get(digest, 0) for digest in digests], np.uint64)[which]
        surplus = (found.generations < barriers) | (found.generations >= self._ages.next)
        order = np.lexsort((found.generations, *found.keys.T))
        order = order[~surplus[order]]
        keys = found.keys[order]
        surplus[order[:-1][(keys[1:] == keys[:-1]).all(axis=1)]] = True
        self._doubtful.update(found.doubtful.tolist())  # they hold nothing, but may say otherwise another day
        self.bury(slots[surplus].astype(np.int32))

    @property
    def form(self) -> SlotFormat:
        """The header format now; another one after `forget_all`."""
        return self._form

    def live(self) -> NDArray[np.int64]:
        """Slots that hold something, ascending."""
        return np.flatnonzero(self._generations).astype(np.int64)

    def holds(self, slot: int, generation: int, record: Record) -> bool:
        """Whether a slot holds this record, and not void."""
        return int(self._generations[slot]) == generation and not self._is_void(record, generation)

    # ---- transfers

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
        """Fill ``arena[rows]``; bool [n], True where the row is the block stored under that record."""
        hit = np.zeros(slots.size, np.bool_)
        for part in self._batches(slots.size):
            hit[part] = self._read_batch(slots[part], expected[part], arena, rows[part])
        return hit

    def refuse_write(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Write nothing; the slots hold nothing now, also while another caller is exclusive."""
        self._hold_nothing(slots[self._generations[slots] != 0])
        with self._lock:
            self._counts["refused"] += slots.size
        return np.zeros(slots.size, np.bool_)

    def refuse_read(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Read nothing; as `refuse_write`."""
        with self._lock:
            self._counts["miss off"] += slots.size
        return np.zeros(slots.size, np.bool_)

    def bury(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Write tombstones over live slots.

        Returns bool [n]: which slots hold nothing now, on disk too.
        """
        with self._lock:
            says_something = bool(self._generations[slots].any()) or not self._doubtful.isdisjoint(slots.tolist())
        return self._bury(slots, says_something and self._breaker.may_write())

    # ---- purges

    def doubt(self, slots: NDArray[np.int64]) -> None:
        """These hold nothing, but their headers on disk may say otherwise."""
        with self._lock:
            self._doubtful.update(slots.tolist())

    def bury_void(self) -> bool:
        """Write tombstones over all void slots; whether none is left.

        No other call may be inside, except one that refuses.

        Raises
        ------
        OSError
            The device refused.
        """
        with self._lock:
            surplus = self._void_or_doubtful()
        return bool(self.bury(surplus).all())

    def forget_all(self, epoch: int) -> None:
        """Every slot holds nothing, and a new epoch begins. Who may be inside: as `bury_void`."""
        self._form = replace(self._form, epoch=epoch)
        with self._lock:
            self._generations[:] = 0
            self._namespaces[:] = -1
            self._doubtful.clear()

    def counts(self) -> Counter[str]:
        """Counters so far, for `stats_of`."""
        with self._lock:
            return Counter(self._counts)

    def count_hung(self, num_blocks: int) -> None:
        """A call for so many blocks hangs."""
        with self._lock:
            self._counts["hung"] += num_blocks

    # ---- inside

    def _void_or_doubtful(self) -> NDArray[np.int32]:
        """Slots that hold void blocks, or none although their headers may say otherwise."""
        purged = self._ages.barriers
        numbers = [self._digests[digest] for digest in purged if digest in self._digests]
        void: NDArray[np.intp] = np.flatnonzero(np.isin(self._namespaces, numbers) & (self._generations != 0))
        names = {number: digest for digest, number in self._digests.items()}
        barriers = np.array([purged[names[number]] for number in self._namespaces[void].tolist()], np.uint64)
        doubtful = np.array(sorted(self._doubtful), np.int64)
        return np.union1d(void[self._generations[void] < barriers], doubtful).astype(np.int32)

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
        if not self._breaker.may_write():
            return self.refuse_write(slots)
        first = self._ages.take(slots.size)
        ok, form = self._bury(slots, True), self._form
        chosen = np.flatnonzero(ok)
        slots, named = slots[ok], [(first + i, records[i]) for i in chosen.tolist()]
        seeds = np.array([form.seed(*name) for name in named], np.uint64)
        outcomes, sums = self._segments.write_payloads(slots, arena, rows[ok], seeds)
        if self._breaker.hangs:  # perhaps this call: then its rows may have been reused before they were written
            outcomes[:] = -HANGS
        now = int(time.time())
        headers = [form.header(slot, *name, sums[i], now) for i, (slot, name) in enumerate(zip(slots.tolist(), named))]
        packed = np.frombuffer(b"".join(headers), np.uint8).reshape(slots.size, form.geometry.header_bytes)
        written = outcomes >= 0
        with self._lock:  # from its first byte on, a header on disk may say something
            self._doubtful.update(slots[written].tolist())
        outcomes[written] = self._segments.write_headers(slots[written], packed[written])
        self._learn_of_writes(outcomes)
        ok[chosen[outcomes < 0]] = False
        with self._lock:
            for i in np.flatnonzero(outcomes >= 0).tolist():
                slot, (generation, record) = int(slots[i]), named[i]
                self._generations[slot], self._namespaces[slot] = generation, self._number_of(record.namespace)
                self._doubtful.discard(slot)
                ok[chosen[i]] = not self._is_void(record, generation)
            self._counts["written"] += int(ok.sum())
        self._segments.settle(slots)
        return ok

    def _read_batch(
        self,
        slots: NDArray[np.int32],
        expected: Sequence[Record],
        arena: NDArray[np.uint8],
        rows: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        if not self._breaker.may_read():
            return self.refuse_read(slots)
        g = self._form.geometry
        hit = np.zeros(slots.size, np.bool_)
        generations = self._generations[slots]
        headers = self._segments.new_headers(slots.size)
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
            elif self._is_void(record, generation):
                reason = "purged"
            else:
                reason = self._form.mismatch(slot, generation, record, memoryview(headers[i]), sums[i])
            if reason is None:
                hit[i] = True
            else:
                self._count(f"miss {reason}", f"block {slot} is a miss: {reason}", quiet=reason in ("empty", "purged"))
        arrived = outcomes == g.header_bytes + g.block_bytes
        failures = [-int(outcome) if outcome < 0 else errno.EIO for outcome in outcomes[~arrived]]
        self._breaker.read(int(arrived.sum()), failures)
        with self._lock:
            self._counts["read"] += int(hit.sum())
        return hit

    def _bury(self, slots: NDArray[np.int32], writes: bool) -> NDArray[np.bool_]:
        with self._lock:
            doubtful = np.array([slot in self._doubtful for slot in slots.tolist()], np.bool_)
            said = (self._generations[slots] != 0) | doubtful
        buried = slots[said]
        ok: NDArray[np.bool_] = ~said
        stones = [self._form.tombstone(int(slot), int(self._generations[slot])) for slot in buried]
        self._hold_nothing(buried)
        if writes and buried.size:
            headers = np.frombuffer(b"".join(stones), np.uint8).reshape(buried.size, -1)
            outcomes = self._segments.write_headers(buried, headers)
            ok[said] = outcomes >= 0
            self._learn_of_writes(outcomes)
            with self._lock:
                self._doubtful.difference_update(buried[outcomes >= 0].tolist())
        return ok

    def _hold_nothing(self, slots: NDArray[np.int32]) -> None:
        """Slots whose headers on disk say something that counts no more."""
        with self._lock:
            self._generations[slots] = 0
            self._namespaces[slots] = -1
            self._doubtful.update(slots.tolist())

    def _is_void(self, record: Record, generation: int) -> bool:
        """Whether a record's namespace was purged after it was written."""
        return generation < self._ages.barriers.get(record.namespace, 0)

    def _number_of(self, namespace: bytes) -> int:
        return self._digests.setdefault(namespace, len(self._digests))

    def _learn_of_writes(self, outcomes: NDArray[np.int64]) -> None:
        failures = [-int(outcome) for outcome in outcomes[outcomes < 0]]
        for number in failures:
            name = errno.errorcode.get(number, str(number))
            self._count(f"write {name}", f"a write failed: {os.strerror(number)}")
        self._breaker.wrote(int(outcomes.size) - len(failures), failures)

    def _count(self, what: str, message: str, *, quiet: bool = False) -> None:
        """Count, and log the first of each kind: a dying disk must not fill the log."""
        with self._lock:
            self._counts[what] += 1
            first = what not in self._logged and not quiet
            self._logged.add(what)
        if first:
            log.warning("disk tier %s: %s (others of this kind are only counted)", self._where, message)


def _distinct(rows: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """The distinct rows of [n, 4], and which of them each row is.

    ``np.unique(axis=0)`` would turn a signal's exception into a TypeError.
    """
    order = np.lexsort(rows.T)
    ordered = rows[order]
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    which = np.empty(len(rows), np.intp)
    which[order] = np.cumsum(is_first) - 1
    return ordered[is_first], which
