"""Read-only view of a cache directory: changes and locks nothing.

It works while a cache has the directory open.

A tier refuses a directory in doubt; this opens whatever it can and lists the doubts (`StoreReader.problems`). Only what
is no cache directory at all is an error.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch, TierError
from pagedkv.spec.paths import path_text
from pagedkv.tiers.disk import _io, file_system
from pagedkv.tiers.disk.directory import KEY, LEARNED, LOCK, SECRET_BYTES, SUPER
from pagedkv.tiers.disk.format import PAGE, SlotFormat, sum_of
from pagedkv.tiers.disk.lane import lane_fingerprint, lane_geometries
from pagedkv.tiers.disk.superblock import MAJOR, MAJOR_WITH_LANES, Superblock, key_check, parse_super

KeyState = Literal["ok", "missing", "unreadable", "wrong"]
_FLAGS = file_system.flags("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK")
NO_FILE = -2  # in place of a descriptor; to `_io`, -1 would mean memory
MAX_SEGMENTS = 1 << 20  # more files than a process may have open: no tier has made them
NAMED = 10  # segments that are missing or cut, named one by one


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a tier would refuse the directory, or has lost some of it.

    Attributes
    ----------
    reason : one word.
    detail : the finding.
    """

    reason: str
    detail: str


class StoreReader:
    """The files of a store, opened for reading only. A context manager.

    Parameters
    ----------
    path : the directory.

    Attributes
    ----------
    superblock, form : the newer intact copy, and the header format that it implies.
    key, secret : of the file KEY; the secret only where it is this store's.
    open_by : pid of the process that has the store open; None if none is seen (one in another container is not).
    readable : int64 [num_segments], slots of each file that begin before its end; the others are lost.
    lane : of a store for groups of layers, the group whose slots these are; `lanes` has all of them.
    problems : list of Problem

    Raises
    ------
    TierError, LayoutMismatch
        There is no cache directory, it may not be read, or its superblock cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path_text(path, "a cache directory's path")).absolute()
        self.problems: list[Problem] = []
        self.fd = -1
        self.fds: NDArray[np.int32] = np.zeros(0, np.int32)
        try:
            self._open_directory()
            self.superblock = self._read_super()
            self.form, self.lane = self._form_of(0), 0
            self.key, self.secret = self._read_key()
            self.open_by = self._holder()
            self.fds, sizes = self._open_segments()
            self._sizes = sizes
            self.readable = self._readable()
        except OSError as problem:
            self.close()
            raise TierError(f"cannot read {self.path}: {problem.strerror}") from problem
        except BaseException:
            self.close()
            raise

    def lanes(self) -> Iterator[StoreReader]:
        """This, and a view of the same files for each further group of layers."""
        yield self
        for lane in range(1, len(self.superblock.lanes)):
            view = copy.copy(self)
            view.form, view.lane = self._form_of(lane), lane
            view.readable = view._readable()
            yield view

    def _form_of(self, lane: int) -> SlotFormat:
        state = self.superblock
        geometry = lane_geometries(state.geometry, state.lanes)[lane]
        fingerprint = lane_fingerprint(state.fingerprint, lane) if state.lanes else state.fingerprint
        return SlotFormat(geometry, state.uuid, fingerprint, state.epoch)

    def _readable(self) -> NDArray[np.int64]:
        g = self.form.geometry
        slots = np.minimum(g.segment_slots, g.num_blocks - np.arange(g.num_segments) * g.segment_slots)
        if not g.extent_slots:
            readable: NDArray[np.int64] = np.minimum(-(-self._sizes // g.slot_bytes), slots)
            return readable
        extents, rest = np.divmod(self._sizes, g.extent_bytes)
        begun = extents * g.extent_slots + np.minimum(-(-rest // g.slot_bytes), g.extent_slots)
        readable = np.minimum(begun, slots)
        return readable

    def headers(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint64]]:
        """Headers of n slots, [n, header_bytes]; read outcomes [n]; sums of the bytes read [n]."""
        fds, offsets = self._places(slots)
        headers = np.zeros((slots.size, self.form.geometry.header_bytes), np.uint8)
        outcomes, sums = np.zeros(slots.size, np.int64), np.zeros(slots.size, np.uint64)
        _io.headers_read(fds, offsets, headers, outcomes, slots.astype(np.uint64), sums)
        return headers, outcomes, sums

    def slots(
        self, slots: NDArray[np.int32], rows: NDArray[np.uint8], seeds: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint64]]:
        """Headers, outcomes and sums of n slots.

        Their payloads go into `rows`; see `Segments.read`.
        """
        g = self.form.geometry
        fds, offsets = self._places(slots)
        headers = np.zeros((slots.size, g.header_bytes), np.uint8)
        outcomes = np.zeros(slots.size, np.int64)
        along = g.block_bytes // g.shards > _io.MIN_SUMMED
        sums = np.zeros((slots.size, g.shards if along else 0), np.uint64)
        _io.file_read(fds, offsets, headers, rows, np.arange(slots.size, dtype=np.int32), outcomes, seeds, sums)
        return headers, outcomes, sums if along else short_sums(rows[: slots.size], g.shards, seeds)

    def forget_cached(self, slots: NDArray[np.int32]) -> None:
        """Drop the pages read from the page cache, so that reading a store evicts nothing else."""
        fds, offsets = self._places(slots)
        _io.drop_cached(fds, offsets, self.form.geometry.slot_bytes)

    def disk_bytes(self) -> tuple[int, int]:
        """Bytes of the directory's files, and how many of them are allocated."""
        infos = [os.stat(name, dir_fd=self.fd, follow_symlinks=False) for name in os.listdir(self.fd)]
        return sum(info.st_size for info in infos), sum(info.st_blocks * 512 for info in infos)

    def learned(self) -> list[str]:
        """Kinds of namespaces whose learned tables lie in the directory, sorted."""
        found = (LEARNED.fullmatch(name) for name in os.listdir(self.fd))
        return sorted(match[1] for match in found if match)

    def free_bytes(self) -> int:
        """Bytes free on the file system for this user."""
        info = os.fstatvfs(self.fd)
        return info.f_bavail * info.f_frsize

    def close(self) -> None:
        """Close every descriptor. Twice is fine."""
        for fd in (*self.fds.tolist(), self.fd):
            if fd >= 0:
                os.close(fd)
        self.fd, self.fds = -1, np.zeros(0, np.int32)

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _places(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        segments, offsets = self.form.geometry.places(slots)
        return self.fds[segments], offsets

    def _open_directory(self) -> None:
        info = os.lstat(self.path)
        if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):
            raise TierError(f"{self.path} is not a directory (links are not followed); name a cache directory")
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        self._check_private(os.fstat(self.fd), "the directory")

    def _open(self, name: str) -> int:
        """A descriptor of a plain file, leaving its access time alone where that is allowed."""
        try:
            fd = os.open(name, os.O_RDONLY | file_system.flags("O_NOATIME") | _FLAGS, dir_fd=self.fd)
        except PermissionError:  # only a file's owner may ask for that
            fd = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=self.fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is not a plain file")
        self._check_private(info, name)
        return fd

    def _check_private(self, info: os.stat_result, what: str) -> None:
        if info.st_mode & 0o077:
            self.problems.append(Problem("mode", f"{what} is open to other users (mode {info.st_mode & 0o777:o})"))
        owner = os.fstat(self.fd).st_uid
        if info.st_uid != owner:
            self.problems.append(Problem("owner", f"{what} belongs to user {info.st_uid}, the directory to {owner}"))

    def _read_super(self) -> Superblock:
        if SUPER not in os.listdir(self.fd):
            raise TierError(f"{self.path} is not a cache directory: it has no {SUPER}")
        try:
            fd = self._open(SUPER)
        except OSError as problem:
            raise TierError(f"cannot read {SUPER} of {self.path}: {_why(problem)}") from problem
        try:
            data = os.pread(fd, 2 * PAGE, 0)
        finally:
            os.close(fd)
        pages = [data[:PAGE], data[PAGE:]]
        try:
            copies = [parse_super(page) for page in pages]
        except InvalidArgument as problem:
            raise LayoutMismatch(f"{SUPER} of {self.path}: {problem}") from None
        intact = [copy for copy in copies if copy is not None]
        if not intact:
            raise TierError(f"{SUPER} of {self.path} is damaged, both copies: nothing in the directory can be used")
        self.problems += [
            Problem("superblock", f"copy {number} of {SUPER} is damaged")
            for number, (page, copy) in enumerate(zip(pages, copies, strict=True))
            if copy is None and any(page)  # all zeros: the second was never written
        ]
        state = max(intact, key=lambda copy: copy.seqno)
        if not state.is_known:
            raise LayoutMismatch(
                f"{self.path} has format {state.major} (feature bits {state.incompat:#x}), this pagedkv knows formats "
                f"{MAJOR} and {MAJOR_WITH_LANES} and no feature bits"
            )
        return state

    def _read_key(self) -> tuple[KeyState, bytes | None]:
        try:
            fd = self._open(KEY)
        except FileNotFoundError:
            self.problems.append(Problem("key", f"{KEY} is missing: no block can be named, so none is ever served"))
            return "missing", None
        except OSError as problem:
            self.problems.append(Problem("key", f"{KEY} cannot be read: {_why(problem)}"))
            return "unreadable", None
        try:
            secret = os.pread(fd, SECRET_BYTES + 1, 0)
        finally:
            os.close(fd)
        if len(secret) != SECRET_BYTES or key_check(self.superblock.uuid, secret) != self.superblock.key_check:
            self.problems.append(Problem("key", f"{KEY} is not the key this store was made with"))
            return "wrong", None
        return "ok", secret

    def _open_segments(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Descriptors of the segments, and the bytes of each that can be read."""
        g, there = self.superblock.geometry, set(os.listdir(self.fd))
        if g.num_segments > MAX_SEGMENTS:
            raise LayoutMismatch(f"{SUPER} of {self.path} speaks of {g.num_segments} files, more than any tier has")
        fds = self.fds = np.full(g.num_segments, NO_FILE, np.int32)
        sizes = np.zeros(g.num_segments, np.int64)
        troubles = []
        for segment in range(g.num_segments):
            name, wanted = f"data.{segment:04d}", g.segment_bytes(segment)
            if name not in there:
                troubles.append(f"{name} is missing")
                continue
            try:
                fds[segment] = self._open(name)
            except OSError as problem:
                if problem.errno == errno.EMFILE:
                    raise TierError(f"{self.path} has {g.num_segments} files; raise the limit (ulimit -n)") from None
                troubles.append(f"{name} cannot be read: {_why(problem)}")
                continue
            found = os.fstat(fds[segment]).st_size
            sizes[segment] = min(found, wanted)
            if found != wanted:
                troubles.append(f"{name} has {found} bytes instead of {wanted}")
        ours = {f"data.{segment:04d}" for segment in range(g.num_segments)}
        troubles += [f"{name} does not belong to this store" for name in sorted(there - ours) if name[:5] == "data."]
        if len(troubles) > NAMED:
            troubles[NAMED:] = [f"{len(troubles) - NAMED} more files are missing, cut, unreadable or surplus"]
        self.problems += [Problem("segment", trouble) for trouble in troubles]
        return fds, sizes

    def _holder(self) -> int | None:
        """The process that holds LOCK or the directory's own lock, by the kernel's list.

        Trying to lock one of them could turn away a process that is opening the store.
        """
        locked = [os.fstat(self.fd)]
        with contextlib.suppress(FileNotFoundError):  # the next opener makes one
            info = os.stat(LOCK, dir_fd=self.fd, follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode):
                self.problems.append(Problem("lock", f"{LOCK} is not a plain file"))
                return None
            self._check_private(info, LOCK)
            locked.append(info)
        try:
            with open("/proc/locks", encoding="ascii") as file:
                lines = file.read().splitlines()
        except OSError:
            return None
        places = {f"{os.major(one.st_dev):02x}:{os.minor(one.st_dev):02x}:{one.st_ino}" for one in locked}
        for line in lines:
            fields = line.split()
            if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] in places:
                return int(fields[4])
        return None


def short_sums(rows: NDArray[np.uint8], shards: int, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sums of shards that are too short to be summed while they are read."""
    found = np.zeros((rows.shape[0], shards), np.uint64)
    for i, seed in enumerate(seeds.tolist()):
        for shard, part in enumerate(rows[i].reshape(shards, -1)):
            found[i, shard] = sum_of(part, seed ^ shard)
    return found


def _why(problem: OSError) -> str:
    if problem.errno == errno.ELOOP:
        return "it is a link"
    return str(problem.strerror).lower()
