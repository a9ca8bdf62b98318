"""Calls that macOS and Windows lack or name differently, forced on Linux.

The other systems themselves are untested: docs/install.md.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import TierError
from pagedkv.tiers.disk import file_system
from pagedkv.tiers.disk.directory import Directory
from pagedkv.tiers.disk.format import Geometry
from pagedkv.tiers.disk.segment_files import SegmentFiles

MACOS = ("posix_fallocate", "posix_fadvise", "fdatasync", "O_DIRECT", "O_NOATIME", "RWF_NOWAIT")
F_FULLFSYNC, F_NOCACHE = 51, 48  # their numbers on macOS


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Linux without the calls that macOS lacks, and with its commands of fcntl, which it notes."""
    for name in MACOS:
        monkeypatch.delattr(os, name, raising=False)
    asked, real = [], fcntl.fcntl

    def noting(fd: int, command: int, argument: int = 0) -> int:
        if command in (F_FULLFSYNC, F_NOCACHE):
            asked.append(command)
            os.fsync(fd)
            return 0
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "F_NOCACHE", F_NOCACHE, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", noting)
    return asked


def stored(path: Path) -> int:
    """Run a prompt through a cache on a disk tier and flush it; tokens that were hits.

    Its blocks are whole pages, so that reads can go past the page cache.
    """
    spec = pk.KVSpec(1, 2, 64, "float32", block_size=8, model="m@1")
    with pk.KVCache(spec, device_memory=pk.Blocks(32), disk=pk.Disk(path, pk.Blocks(64))) as cache:
        with cache.sequence(range(64)) as seq:
            hits = sum(seq.hit_tokens.values())
            new = np.arange(seq.num_computed, 64, dtype=np.float32)[:, None, None] + np.zeros((1, 2, 64), np.float32)
            seq.scatter(new[None], new[None])
            k, _ = seq.gather()
            assert np.array_equal(k[0, :, 0, 0], np.arange(64, dtype=np.float32))
        cache.flush()
    return hits


def test_a_store_works_with_the_calls_of_macos(macos: list[int], tmp_path: Path) -> None:
    assert stored(tmp_path / "kv") == 0
    assert F_FULLFSYNC in macos
    assert F_NOCACHE in macos
    segment = os.stat(tmp_path / "kv" / "data.0000")
    assert segment.st_blocks * 512 >= segment.st_size  # never sparse
    assert stored(tmp_path / "kv") > 0


def test_without_any_advice_or_direct_reads_a_store_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in MACOS:
        monkeypatch.delattr(os, name, raising=False)
    assert stored(tmp_path / "kv") == 0
    assert stored(tmp_path / "kv") > 0


def test_files_are_whole_without_posix_fallocate_and_keep_their_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"there before")
    file_system.allocate(fd, file_system.ZEROS + 5000)
    assert os.fstat(fd).st_size == file_system.ZEROS + 5000
    assert os.fstat(fd).st_blocks * 512 >= file_system.ZEROS + 5000
    assert os.pread(fd, 20, 0) == b"there before" + bytes(8)
    file_system.allocate(fd, 10)  # never shorter
    assert os.fstat(fd).st_size == file_system.ZEROS + 5000
    os.close(fd)


def test_a_full_disk_without_posix_fallocate_is_a_named_error_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(TierError, match=r"cannot allocate .* No space left on device"):
        stored(tmp_path / "kv")
    assert not (tmp_path / "kv").exists()


def test_a_file_system_that_does_not_know_the_full_sync_gets_the_plain_one(
    macos: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(fd: int, command: int) -> int:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    synced: list[int] = []
    monkeypatch.setattr(fcntl, "fcntl", refuses)
    monkeypatch.setattr(os, "fsync", synced.append)
    file_system.sync(5)
    file_system.sync_data(6)
    assert synced == [5, 6]


def without_posix(monkeypatch: pytest.MonkeyPatch, locking: object) -> None:
    """Windows: neither fcntl nor resource, and locks of bytes."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))


def test_windows_locks_a_byte_that_no_text_reaches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    locked: list[tuple[int, int, int]] = []

    def locking(fd: int, mode: int, count: int) -> None:
        at = os.lseek(fd, 0, os.SEEK_CUR)
        if locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        locked.append((at, mode, count))

    without_posix(monkeypatch, locking)
    fd = os.open(tmp_path / "LOCK", os.O_RDWR | os.O_CREAT)
    file_system.lock(fd)
    assert locked == [(file_system.LOCKED_BYTE, 2, 1)]
    with pytest.raises(BlockingIOError):
        file_system.lock(fd)
    os.close(fd)


def test_a_lock_is_waited_for_where_the_system_does_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tries: list[int] = []

    def locking(fd: int, mode: int, count: int) -> None:
        tries.append(fd)
        if len(tries) < 3:
            raise PermissionError(errno.EACCES, "Permission denied")

    without_posix(monkeypatch, locking)
    fd = os.open(tmp_path / "LOCK", os.O_RDWR | os.O_CREAT)
    file_system.wait_and_lock(fd)
    assert tries == [fd] * 3
    os.close(fd)


def test_a_lock_that_fails_for_another_reason_is_no_other_owner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def locking(fd: int, mode: int, count: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    without_posix(monkeypatch, locking)
    fd = os.open(tmp_path / "LOCK", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="Input/output") as raised:
        file_system.lock(fd)
    assert not isinstance(raised.value, BlockingIOError)
    os.close(fd)


def test_a_system_without_limits_of_file_sizes_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    without_posix(monkeypatch, None)
    assert file_system.limit_of_file_size() == float("inf")


def test_flags_that_a_system_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system.flags("O_NOFOLLOW", "O_CLOEXEC") == os.O_NOFOLLOW | os.O_CLOEXEC
    monkeypatch.delattr(os, "O_NOFOLLOW")
    assert file_system.flags("O_NOFOLLOW", "O_CLOEXEC") == os.O_CLOEXEC


def test_where_the_kernel_copies_from_no_mapping_reads_are_plain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = Directory(tmp_path / "kv")
    geometry = Geometry(num_blocks=4, block_bytes=4096, block_tokens=16, shards=1, segment_slots=4)
    SegmentFiles(directory, geometry, make=True, read_path="mapping", page_cache="keep").close()
    monkeypatch.setattr(sys, "platform", "darwin")
    files = SegmentFiles(directory, geometry, make=False, read_path="mapping", page_cache="keep")
    assert (files.read_path, files.base.any()) == ("pread", False)
    files.close()
    directory.close()
