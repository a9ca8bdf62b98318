"""Scans the headers of a store: several threads read them, and arrays are checked at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from pagedkv.threads.crew import Crew
from pagedkv.tiers.base import Record
from pagedkv.tiers.disk.format import SLOT_MAGIC, SlotFormat, fields_of, intact
from pagedkv.tiers.disk.segments import Segments

PART_BYTES = 4 << 20  # of headers read by one call without the GIL
THREADS = 8  # a cold header is one small random read: devices want several at a time


@dataclass(frozen=True, slots=True)
class Found:
    """Live records of some slots, ascending.

    Attributes
    ----------
    slots : int64 [n]
    generations : uint64 [n]
    keys, namespaces : uint64 [n, 4], each row the 32 bytes of a digest.
    doubtful : int64 [m], slots whose headers count for nothing now, but may another day: unread, damaged, or of an
        epoch whose beginning did not reach the superblock.
    """

    slots: NDArray[np.int64]
    generations: NDArray[np.uint64]
    keys: NDArray[np.uint64]
    namespaces: NDArray[np.uint64]
    doubtful: NDArray[np.int64]


class Scan:
    """Reads headers of a store's slots; payloads are not looked at.

    Parameters
    ----------
    segments : the open files.
    form : what counts as a live record.
    others : fingerprints of the store's other lanes, whose headers may lie there.
    """

    def __init__(self, segments: Segments, form: SlotFormat, others: Collection[bytes] = ()) -> None:
        self._segments, self._form = segments, form
        self._others = [np.void(fingerprint) for fingerprint in others]

    def everything(self, on_progress: Callable[[int, int], object] | None = None) -> Found:
        """All live records; ``on_progress(done, total)`` counts slots."""
        total = self._form.geometry.num_blocks
        done, parts = 0, []
        every = list(self.parts(np.arange(total, dtype=np.int64)))
        with Crew(self._find, every, THREADS) as crew:
            for part, found in zip(every, crew, strict=True):
                parts.append(found)
                done += part.size
                if on_progress is not None:
                    on_progress(done, total)
        return Found(
            **{item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Found)}
        )

    def parts(self, slots: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """`slots` in pieces of a size for one call."""
        size = max(1, PART_BYTES // self._form.geometry.header_bytes)
        return (slots[start : start + size] for start in range(0, slots.size, size))

    def records(self, slots: NDArray[np.int64]) -> list[tuple[int, int, Record]]:
        """``(slot, generation, record)`` of those of `slots` that are live."""
        live, headers, _ = self._read(slots)
        generations = fields_of(headers)["generation"].tolist()
        return [
            (slot, generation, self._form.record(header))
            for slot, generation, header in zip(slots[live].tolist(), generations, headers)
        ]

    def _find(self, slots: NDArray[np.int64]) -> Found:
        live, headers, doubtful = self._read(slots)
        found = fields_of(headers)
        keys, namespaces = (found[name].copy().view("<u8").reshape(-1, 4) for name in ("key", "namespace"))
        return Found(slots[live], found["generation"].astype(np.uint64), keys, namespaces, slots[doubtful])

    def _read(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.uint8], NDArray[np.bool_]]:
        """Which slots are live, the headers of those, and which are doubtful."""
        headers, sums, outcomes = self._segments.read_headers(slots)
        whole = outcomes == headers.shape[1]
        live = whole & self._form.live(slots, headers, sums)
        doubtful = ~whole
        sealed, found = intact(headers, sums), fields_of(headers)
        damaged = np.flatnonzero(whole & ~sealed)
        if self._form.geometry.extent_slots:  # another lane's page may lie there, or a header that it judges itself
            is_header = found["magic"] == np.void(SLOT_MAGIC)
            for fingerprint in self._others:
                is_header &= found["fingerprint"] != fingerprint
            doubtful[damaged[is_header[damaged]]] = True
        else:
            doubtful[damaged[headers[damaged].any(axis=1)]] = True  # all zeros: never written
        doubtful |= whole & sealed & (found["epoch"] > self._form.epoch)  # would count in a later epoch
        return live, headers[live], doubtful
