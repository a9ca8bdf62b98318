"""The open segment files of a disk tier: descriptors, mappings and syncs.

segments.py reads and writes through them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Literal

import numpy as np

from pagedkv.errors import StoreDamaged, TierError
from pagedkv.tiers.disk import file_system
from pagedkv.tiers.disk.descriptors import close_quietly, file_size_limit
from pagedkv.tiers.disk.directory import RESTART, Directory
from pagedkv.tiers.disk.format import PAGE, Geometry
from pagedkv.tiers.disk.growth import segment_name

ReadPath = Literal["auto", "direct", "pread", "mapping"]
PageCache = Literal["drop", "keep"]
CLOSED = -2  # no descriptor; -1 means an address to _io


class SegmentFiles:
    """Open segment files ``data.0000``, ``data.0001``, ... of a directory.

    Parameters
    ----------
    directory : the open and locked directory.
    geometry : sizes; each file must have exactly the size they say.
    make : True to make the files, every byte allocated; False to open existing ones.
    read_path : ``"pread"``, ``"direct"`` (past the page cache where that can be), ``"mapping"`` (on Linux), else
        ``"pread"``; or ``"auto"``: direct if the page cache is to drop pages read anyway.
    page_cache : ``"drop"`` or ``"keep"`` the pages written or read.

    Attributes
    ----------
    fd_of : int32 [num_segments], descriptors; CLOSED once they are closed.
    direct_of : int32 [num_segments], further descriptors of the same files, for reads past the page cache; or [0].
    base : int64 [num_segments], addresses of mappings; zeros without any.

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
        self.geometry, self.page_cache = geometry, page_cache
        self._refused: OSError | None = None  # by a sync
        self._fds: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._direct: list[int] = []
        self.direct_of = np.zeros(0, np.int32)
        if read_path == "mapping" and not file_system.reads_mappings():
            read_path = "pread"
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
            self.fd_of = np.array(self._fds, np.int32)
            self.base = np.zeros(len(self._fds), np.int64)
            if self.read_path == "mapping":
                self._map()
            elif self.read_path == "direct":
                self._open_direct(directory)
        except BaseException:
            self.close()
            raise

    def _check_space(self, directory: Directory) -> None:
        g, free = self.geometry, directory.free_bytes()
        if g.total_bytes > free:  # before allocating, so that other programs do not meet a full disk for a moment
            raise TierError(
                f"disk tier {directory.path} needs {g.total_bytes} bytes ({g.num_blocks} blocks of {g.slot_bytes} with "
                f"headers), {free} are free; give it a smaller size or another disk"
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
            self.base[segment] = np.frombuffer(mapping, np.uint8, 1).ctypes.data

    def _open_direct(self, directory: Directory) -> None:
        """Descriptors for O_DIRECT reads; none where sizes or the file system do not allow them."""
        if self.geometry.block_bytes % PAGE and not self.geometry.extent_slots:
            return
        for segment, fd in enumerate(self._fds):
            again = directory.open_again(segment_name(segment), fd, file_system.flags("O_DIRECT"))
            if again < 0:
                break
            self._direct.append(again)
            if not (hasattr(os, "O_DIRECT") or file_system.past_the_cache(again)):
                self._close_direct()
                break
        if len(self._direct) < len(self._fds):
            self._close_direct()
        self.direct_of = np.array(self._direct, np.int32)

    def _close_direct(self) -> None:
        fds, self._direct = self._direct, []
        self.direct_of = np.zeros(0, np.int32)
        for fd in fds:
            close_quietly(fd)

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

    def _sync_one(self, fd: int) -> None:
        try:
            file_system.sync_data(fd)
        except OSError as problem:
            self._refused = self._refused or problem

    def close(self) -> None:
        """Close the files. No other call may be inside."""
        maps, self._maps = self._maps, []
        for mapping in maps:
            mapping.close()
        self._close_direct()
        fds, self._fds = self._fds, []
        self.fd_of = np.full(len(fds), CLOSED, np.int32)  # the numbers may soon be other files'
        for fd in fds:
            close_quietly(fd)

    def forget_cached(self) -> None:
        """Let the page cache forget the files, except pages that the kernel has yet to write."""
        for fd in self._fds:
            file_system.forget_pages(fd)

    def over_limit(self) -> bool:
        """Whether a write would meet this process's limit of file sizes, and perhaps a signal."""
        return self.geometry.segment_bytes(0) > file_size_limit()
