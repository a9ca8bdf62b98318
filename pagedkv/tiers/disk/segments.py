"""Segment files of a disk tier as one row of slots: offsets and batched transfers.

Writes go through ``pwrite``: a store into a mapping of a full disk is SIGBUS, a failed write is an error
code. Reads go through ``preadv``, past the page cache (O_DIRECT) where files, arenas and sizes allow that, or through
a mapping that the kernel reads for us (``process_vm_readv`` on ourselves); all turn a truncated file or a media error
into an outcome. An outcome is bytes transferred, or ``-errno``.

A block that was written to disk, or read from it, is seldom read from there again soon: with ``page_cache="drop"`` the
kernel is told to write it now and to forget it, so that a disk tier does not eat the memory of everything else.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections import deque
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import StoreDamaged, TierError
from pagedkv.tiers.disk import _io
from pagedkv.tiers.disk.descriptors import close_quietly, file_size_limit
from pagedkv.tiers.disk.directory import RESTART, Directory
from pagedkv.tiers.disk.format import PAGE, Geometry, sum_of
from pagedkv.tiers.disk.growth import segment_name

ReadPath = Literal["auto", "direct", "pread", "mapping"]
PageCache = Literal["drop", "keep"]
CLOSED = -2  # no descriptor; -1 means an address to _io
BEING_WRITTEN = 32 << 20  # bytes the kernel may still be writing; older ones are forgotten


class Segments:
    """Open segment files ``data.0000``, ``data.0001``, ... of a directory.

    Parameters
    ----------
    directory : the open and locked directory.
    geometry : sizes; each file must have exactly the size they say.
    make : True to make the files, every byte allocated; False to open existing ones.
    read_path : ``"pread"``, ``"direct"`` (past the page cache where that can be; else ``"pread"``), ``"mapping"``, or
        ``"auto"``: direct if the page cache is to drop pages read anyway.
    page_cache : ``"drop"`` or ``"keep"`` the pages written or read.

    Raises
    ------
    StoreDamaged
        A file is missing, too short, too long, or one too many.
    TierError
        No space, or a file is not ours. Files made so far are closed, not deleted.
    """

    def __init__(
        self, directory: Directory, geometry: Geometry, *, make: bool, read_path: ReadPath, page_cache: PageCache
    ) -> None:
        self.geometry = geometry
        self._page_cache = page_cache
        self._being_written: deque[NDArray[np.int32]] = deque()
        self._lock = threading.Lock()
        self._refused: OSError | None = None  # by a sync
        self._fds: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._direct: list[int] = []  # further descriptors of the same files, for reads past the page cache
        self.read_path = ("direct" if page_cache == "drop" else "pread") if read_path == "auto" else read_path
        try:
            if make:
                self._check_space(directory)
            else:
                self._check_names(directory)
            for segment in range(geometry.num_segments):
                name, size = segment_name(segment), geometry.segment_bytes(segment)
                fd = directory.make_file(name, size) if make else directory.open_file(name)
                self._fds.append(fd)
                found = os.fstat(fd).st_size
                if found != size:
                    raise StoreDamaged(
                        f"{name} of disk tier {directory.path} has {found} bytes instead of {size}, so it was cut or "
                        f"replaced: {RESTART}"
                    )
            self._fd_of = np.array(self._fds, np.int32)
            self._base = np.zeros(len(self._fds), np.int64)
            if self.read_path == "mapping":
                self._map()
            elif self.read_path == "direct":
                self._open_direct(directory)
        except BaseException:
            self.close()
            raise

    def _check_space(self, directory: Directory) -> None:
        wanted = self.geometry.num_blocks * self.geometry.slot_bytes
        free = directory.free_bytes()
        if wanted > free:  # before allocating, so that other programs do not meet a full disk for a moment
            raise TierError(
                f"disk tier {directory.path} needs {wanted} bytes ({self.geometry.num_blocks} blocks of "
                f"{self.geometry.slot_bytes} with headers), {free} are free; give it a smaller size or "
                f"another disk"
            )

    def _check_names(self, directory: Directory) -> None:
        ours = {segment_name(segment) for segment in range(self.geometry.num_segments)}
        others = [name for name in directory.names() if name.startswith("data.") and name not in ours]
        if others:
            raise StoreDamaged(f"{others[0]} of disk tier {directory.path} does not belong to its store: {RESTART}")

    def _map(self) -> None:
        for segment, fd in enumerate(self._fds):
            mapping = mmap.mmap(fd, self.geometry.segment_bytes(segment), prot=mmap.PROT_READ)
            with contextlib.suppress(OSError, AttributeError):
                mapping.madvise(mmap.MADV_DONTFORK)
            self._maps.append(mapping)
            self._base[segment] = np.frombuffer(mapping, np.uint8, 1).ctypes.data

    def _open_direct(self, directory: Directory) -> None:
        """Descriptors for O_DIRECT reads; none where sizes or the file system do not allow them."""
        g = self.geometry
        if g.block_bytes % PAGE or g.header_bytes % PAGE or not hasattr(os, "O_DIRECT"):
            return
        for segment, fd in enumerate(self._fds):
            again = directory.open_again(segment_name(segment), fd, os.O_DIRECT)
            if again < 0:
                break
            self._direct.append(again)
        if len(self._direct) < len(self._fds):
            self._close_direct()

    def _close_direct(self) -> None:
        fds, self._direct = self._direct, []
        for fd in fds:
            close_quietly(fd)

    def new_headers(self, count: int) -> NDArray[np.uint8]:
        """uint8 [count, header_bytes], zeros, at a page's begin: room for `read`."""
        width = self.geometry.header_bytes
        room = np.zeros(count * width + PAGE, np.uint8)
        start = -room.ctypes.data % PAGE
        return room[start : start + count * width].reshape(count, width)

    def _places(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        segment, index = np.divmod(slots.astype(np.int64), self.geometry.segment_slots)
        return segment, index * self.geometry.slot_bytes

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
        segment, offsets = self._places(slots)
        outcomes = np.zeros(slots.size, np.int64)
        sums = self._room_for_sums(slots.size)
        fds = self._fd_of[segment]
        places = (rows.ctypes.data, rows.strides[0], headers.ctypes.data)
        if self._direct and not any(place % PAGE for place in places):
            direct = np.array(self._direct, np.int32)[segment]
            _io.file_read(direct, offsets, headers, rows, indices, outcomes, seeds, sums, whole=True)
        elif self.read_path == "mapping":
            _io.mapping_read(self._base[segment] + offsets, headers, rows, indices, outcomes, seeds, sums)
        else:
            _io.file_read(fds, offsets, headers, rows, indices, outcomes, seeds, sums)
        if self._direct or self.read_path == "mapping":
            wanted = headers.shape[1] + rows.shape[1]
            for i in np.flatnonzero(outcomes != wanted):  # cut, or the way is barred: ask the file
                one = slice(i, i + 1)
                _io.file_read(
                    fds[one], offsets[one], headers[one], rows, indices[one], outcomes[one], seeds[one], sums[one]
                )
        if self._page_cache == "drop" and not self._direct:
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
        segment, index = np.divmod(slots, self.geometry.segment_slots)
        headers = np.zeros((slots.size, self.geometry.header_bytes), np.uint8)
        outcomes, sums = np.zeros(slots.size, np.int64), np.zeros(slots.size, np.uint64)
        offsets, seeds = index * self.geometry.slot_bytes, slots.astype(np.uint64)
        _io.headers_read(self._fd_of[segment], offsets, headers, outcomes, seeds, sums)
        return headers, sums, outcomes

    def write_headers(self, slots: NDArray[np.int32], headers: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Row i of `headers` [n, header_bytes] in front of slot i; outcomes [n]."""
        segment, offsets = self._places(slots)
        outcomes = np.zeros(slots.size, np.int64)
        if self._over_limit():
            return outcomes - errno.EFBIG
        every = np.arange(slots.size, dtype=np.int32)
        seeds, none = np.zeros(slots.size, np.uint64), np.zeros((slots.size, 0), np.uint64)
        _io.file_write(self._fd_of[segment], offsets, headers, every, outcomes, seeds, none)
        return outcomes

    def write_payloads(
        self,
        slots: NDArray[np.int32],
        rows: NDArray[np.uint8],
        indices: NDArray[np.int32],
        seeds: NDArray[np.uint64],
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Row ``indices[i]`` of `rows` into slot i behind its header; outcomes and sums as `read`."""
        segment, offsets = self._places(slots)
        outcomes = np.zeros(slots.size, np.int64)
        sums = self._room_for_sums(slots.size)
        if self._over_limit():
            return outcomes - errno.EFBIG, sums
        offsets += self.geometry.header_bytes
        _io.file_write(self._fd_of[segment], offsets, rows, indices, outcomes, seeds, sums)
        return outcomes, self._complete(sums, rows, indices, seeds)

    def settle(self, slots: NDArray[np.int32]) -> None:
        """Start writeback of complete slots, and drop written ones from the page cache."""
        if self._page_cache == "keep" or not slots.size:
            return
        segment, offsets = self._places(slots)
        _io.start_writeback(self._fd_of[segment], offsets, self.geometry.slot_bytes)
        batches = max(1, BEING_WRITTEN // (slots.size * self.geometry.slot_bytes))
        with self._lock:
            self._being_written.append(slots)
            surplus = len(self._being_written) - batches
            written = [self._being_written.popleft() for _ in range(surplus)]
        self._forget(written)

    def sync(self) -> None:
        """Wait until the device has all written bytes.

        Raises
        ------
        OSError
            The device refused some of it, now or in an earlier call. Linux reports that once and may drop the pages, so
            a later success says nothing about earlier writes: they are in doubt until the store is opened again.
        """
        for fd in self._fds:
            self._sync_one(fd)
        if self._refused is not None:
            raise OSError(self._refused.errno, f"{self._refused.strerror} (of this sync or an earlier one)")
        with self._lock:
            written = list(self._being_written)
            self._being_written.clear()
        self._forget(written)

    def _sync_one(self, fd: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError as problem:
            self._refused = self._refused or problem

    def close(self) -> None:
        """Close the files. No other call may be inside."""
        maps, self._maps = self._maps, []
        for mapping in maps:
            mapping.close()
        self._close_direct()
        fds, self._fds = self._fds, []
        self._fd_of = np.full(len(fds), CLOSED, np.int32)  # the numbers may soon be other files'
        for fd in fds:
            close_quietly(fd)

    def forget_cached(self) -> None:
        """Let the page cache forget the files, except pages that the kernel has yet to write."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _forget(self, written: list[NDArray[np.int32]]) -> None:
        for slots in written:
            segment, offsets = self._places(slots)
            _io.drop_cached(self._fd_of[segment], offsets, self.geometry.slot_bytes)

    def _over_limit(self) -> bool:
        """Whether a write would meet this process's limit of file sizes, and perhaps a signal."""
        return self.geometry.segment_bytes(0) > file_size_limit()
