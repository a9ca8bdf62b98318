"""Segment files of a disk tier as one row of slots: offsets and batched transfers.

Writes go through ``pwrite``: a store into a mapping of a full disk is SIGBUS, a failed write is an error
code. Reads go through ``preadv``, past the page cache (O_DIRECT) where files, arenas and sizes allow that, or through
a mapping that the kernel reads for us (``process_vm_readv`` on ourselves); all turn a truncated file or a media error
into an outcome. An outcome is bytes transferred, or ``-errno``.

A block that was written to disk, or read from it, is seldom read from there again soon: with ``page_cache="drop"`` the
kernel is told to write it now and to forget it, so that a disk tier does not eat the memory of everything else.
"""

from __future__ import annotations

import errno
import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers.disk import _io
from pagedkv.tiers.disk.format import PAGE, Geometry, sum_of
from pagedkv.tiers.disk.segment_files import SegmentFiles

BEING_WRITTEN = 32 << 20  # bytes the kernel may still be writing; older ones are forgotten


class Segments:
    """The slots of one size in a store's segment files.

    Parameters
    ----------
    files : open; several of these may share them.
    geometry : of the slots.
    """

    def __init__(self, files: SegmentFiles, geometry: Geometry) -> None:
        self.files, self.geometry = files, geometry
        self._being_written: deque[NDArray[np.int32]] = deque()
        self._lock = threading.Lock()
        self._goes_direct = not geometry.block_bytes % PAGE

    def new_headers(self, count: int) -> NDArray[np.uint8]:
        """uint8 [count, header_bytes], zeros, at a page's begin: room for `read`."""
        width = self.geometry.header_bytes
        room = np.zeros(count * width + PAGE, np.uint8)
        start = -room.ctypes.data % PAGE
        return room[start : start + count * width].reshape(count, width)

    def read(
        self,
        slots: NDArray[np.int32],
        headers: NDArray[np.uint8],
        rows: NDArray[np.uint8],
        indices: NDArray[np.int32],
        seeds: NDArray[np.uint64],
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Headers of n slots into `headers` [>= n, *], payloads into ``rows[indices]``.

        Returns
        -------
        outcomes : int64 [n]
        sums : uint64 [n, shards], seeded with ``seeds[i] ^ shard``; only where the outcome is a whole slot.
        """
        segment, offsets = self.geometry.places(slots)
        outcomes = np.zeros(slots.size, np.int64)
        sums = self._room_for_sums(slots.size)
        fds = self.files.fd_of[segment]
        places = (rows.ctypes.data, rows.strides[0], headers.ctypes.data)
        direct = self.files.direct_of[segment] if self._goes_direct and len(self.files.direct_of) else None
        if direct is not None and not any(place % PAGE for place in places):
            _io.file_read(direct, offsets, headers, rows, indices, outcomes, seeds, sums, whole=True)
        elif self.files.read_path == "mapping":
            _io.mapping_read(self.files.base[segment] + offsets, headers, rows, indices, outcomes, seeds, sums)
        else:
            _io.file_read(fds, offsets, headers, rows, indices, outcomes, seeds, sums)
        if direct is not None or self.files.read_path == "mapping":
            wanted = headers.shape[1] + rows.shape[1]
            for i in np.flatnonzero(outcomes != wanted):  # cut, or the way is barred: ask the file
                one = slice(i, i + 1)
                _io.file_read(
                    fds[one], offsets[one], headers[one], rows, indices[one], outcomes[one], seeds[one], sums[one]
                )
        if self.files.page_cache == "drop" and direct is None:
            _io.drop_cached(fds, offsets, self.geometry.slot_bytes)
        return outcomes, self._complete(sums, rows, indices, seeds)

    def _room_for_sums(self, count: int) -> NDArray[np.uint64]:
        """uint64 [n, shards], or [n, 0] if shards are too short to be summed along the way."""
        g = self.geometry
        along = g.block_bytes // g.shards > _io.MIN_SUMMED
        return np.zeros((count, g.shards if along else 0), np.uint64)

    def _complete(
        self,
        sums: NDArray[np.uint64],
        rows: NDArray[np.uint8],
        indices: NDArray[np.int32],
        seeds: NDArray[np.uint64],
    ) -> NDArray[np.uint64]:
        """`sums`, or if it is [n, 0] the sums of short shards, taken now."""
        if sums.shape[1]:
            return sums
        shards = self.geometry.shards
        found = np.zeros((indices.size, shards), np.uint64)
        for i, (row, seed) in enumerate(zip(indices.tolist(), seeds.tolist())):
            for shard, part in enumerate(rows[row].reshape(shards, -1)):
                found[i, shard] = sum_of(part, seed ^ shard)
        return found

    def read_headers(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.int64]]:
        """Headers of n slots, their sums and the outcomes.

        uint8 [n, header_bytes], sums for `SlotFormat.live` [n], outcomes [n].
        """
        segment, offsets = self.geometry.places(slots)
        headers = np.zeros((slots.size, self.geometry.header_bytes), np.uint8)
        outcomes, sums = np.zeros(slots.size, np.int64), np.zeros(slots.size, np.uint64)
        _io.headers_read(self.files.fd_of[segment], offsets, headers, outcomes, slots.astype(np.uint64), sums)
        return headers, sums, outcomes

    def write_headers(self, slots: NDArray[np.int32], headers: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Row i of `headers` [n, header_bytes] in front of slot i; outcomes [n]."""
        segment, offsets = self.geometry.places(slots)
        outcomes = np.zeros(slots.size, np.int64)
        if self.files.over_limit():
            return outcomes - errno.EFBIG
        every = np.arange(slots.size, dtype=np.int32)
        seeds, none = np.zeros(slots.size, np.uint64), np.zeros((slots.size, 0), np.uint64)
        _io.file_write(self.files.fd_of[segment], offsets, headers, every, outcomes, seeds, none)
        return outcomes

    def write_payloads(
        self,
        slots: NDArray[np.int32],
        rows: NDArray[np.uint8],
        indices: NDArray[np.int32],
        seeds: NDArray[np.uint64],
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Row ``indices[i]`` of `rows` into slot i behind its header; outcomes and sums as `read`."""
        segment, offsets = self.geometry.places(slots)
        outcomes = np.zeros(slots.size, np.int64)
        sums = self._room_for_sums(slots.size)
        if self.files.over_limit():
            return outcomes - errno.EFBIG, sums
        offsets += self.geometry.header_bytes
        _io.file_write(self.files.fd_of[segment], offsets, rows, indices, outcomes, seeds, sums)
        return outcomes, self._complete(sums, rows, indices, seeds)

    def settle(self, slots: NDArray[np.int32]) -> None:
        """Start writeback of complete slots, and drop written ones from the page cache."""
        if self.files.page_cache == "keep" or not slots.size:
            return
        segment, offsets = self.geometry.places(slots)
        _io.start_writeback(self.files.fd_of[segment], offsets, self.geometry.slot_bytes)
        batches = max(1, BEING_WRITTEN // (slots.size * self.geometry.slot_bytes))
        with self._lock:
            self._being_written.append(slots)
            surplus = len(self._being_written) - batches
            written = [self._being_written.popleft() for _ in range(surplus)]
        self._forget(written)

    def forget_written(self) -> None:
        """All that was written has been synced: drop it from the page cache."""
        with self._lock:
            written = list(self._being_written)
            self._being_written.clear()
        self._forget(written)

    def _forget(self, written: list[NDArray[np.int32]]) -> None:
        for slots in written:
            segment, offsets = self.geometry.places(slots)
            _io.drop_cached(self.files.fd_of[segment], offsets, self.geometry.slot_bytes)
