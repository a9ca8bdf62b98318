"""Growth of a store that exists; the next opening undoes one that a crash interrupted.

The steps, each synced before the next begins:

1. the empty file GROWING says that files may be larger than the superblock says, or too many;
2. the last file is extended, new ones are made, every byte allocated;
3. the superblock says the new size;
4. GROWING is deleted.

Before the superblock says the new size, no slot beyond the old one holds anything. So an opening that finds GROWING
cuts the files to the size in the superblock, whichever that is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from pagedkv.errors import TierError
from pagedkv.tiers.disk import file_system
from pagedkv.tiers.disk.descriptors import close_quietly
from pagedkv.tiers.disk.directory import GROWING, Directory
from pagedkv.tiers.disk.format import Geometry


def grow(directory: Directory, old: Geometry, new: Geometry, save: Callable[[], object]) -> None:
    """Give a store the slots of `new`; both geometries differ in their number of blocks alone.

    Parameters
    ----------
    directory : open and locked, without the remains of an interrupted growth.
    old, new : the store's size, and a larger one.
    save : writes `new` into the superblock and syncs it.

    Raises
    ------
    TierError
        No space, over the file size limit, or not writable; the store has its old size.
    OSError
        The device refused; the store has its old size, or after a crash perhaps the new one.
    """
    wanted, free = new.total_bytes - old.total_bytes, directory.free_bytes()
    if wanted > free:
        raise TierError(
            f"disk tier {directory.path} needs {wanted} bytes more to grow from {old.num_blocks} to {new.num_blocks} "
            f"blocks, {free} are free; ask for less, or for the size it has"
        )
    close_quietly(directory.make_file(GROWING, 0))
    try:
        file_system.sync(directory.fd)
        for segment in range(old.num_segments - 1, new.num_segments):
            name, size = segment_name(segment), new.segment_bytes(segment)
            fd = directory.extend_file(name, size) if segment < old.num_segments else directory.make_file(name, size)
            try:
                file_system.sync(fd)
            finally:
                close_quietly(fd)
        file_system.sync(directory.fd)
    except BaseException:  # the superblock says the old size
        with contextlib.suppress(OSError, TierError):
            cut(directory, old)
        raise
    save()
    finish(directory)


def cut(directory: Directory, geometry: Geometry) -> None:
    """Undo an interrupted growth: files as the superblock says, and no GROWING.

    Raises
    ------
    OSError
    """
    there = directory.names()
    for name in there:
        if name.startswith("data.") and name not in {segment_name(i) for i in range(geometry.num_segments)}:
            os.unlink(name, dir_fd=directory.fd)
    last = geometry.num_segments - 1
    if segment_name(last) in there:
        fd = directory.open_file(segment_name(last))
        try:
            if os.fstat(fd).st_size > geometry.segment_bytes(last):
                os.ftruncate(fd, geometry.segment_bytes(last))
            file_system.sync(fd)
        finally:
            close_quietly(fd)
    finish(directory)


def finish(directory: Directory) -> None:
    """Delete GROWING: every file is as the superblock says.

    Raises
    ------
    OSError
    """
    file_system.sync(directory.fd)
    os.unlink(GROWING, dir_fd=directory.fd)
    file_system.sync(directory.fd)


def segment_name(segment: int) -> str:
    """Name of a segment's file."""
    return f"data.{segment:04d}"
