"""The learned state of the policy ``hazard``, seen from the cache.

Its clock, its kinds of namespaces, and its files.

One small file for each kind, ``learned.NAME``: a header (:data:`HEADER`), the tables of ``HazardPolicy.tables`` as
float32, and a BLAKE2b-256 of both. They are numbers by age, depth, gap and length; nothing of any prompt, and nothing
that decides whether a block is right. So a file that cannot be used is left alone, counted, and learned anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import struct
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.policies.hazard.face import HazardPolicy
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.observe.callbacks import Log
from pagedkv.tiers.disk.descriptors import close_quietly, file_size_limit, read_start
from pagedkv.tiers.mover.hangs import HANG_S, ends_within

log = Log(logging.getLogger("pagedkv.learned"))

DEFAULT = "default"  # the kind of namespaces that were given none: table 0
MAX_KINDS = 8
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
FILE = "learned.{}"

MAGIC = b"pagedkv learned\0"
VERSION = 2  # to be raised when a number of the tables comes to mean something else, also where their shape stays
HEADER = struct.Struct("<16sIIII")  # magic, version, tokens of a block, rows, columns
SUM_BYTES = 32
MAX_BYTES = 64 << 20  # of a file that is read at all
LAST_STUDY = 8192  # before a save: samples that a closed cache would never learn


def pack(tables: NDArray[np.float32], block_size: int) -> bytes:
    """The contents of a file."""
    rows, columns = tables.shape
    data = HEADER.pack(MAGIC, VERSION, block_size, rows, columns) + tables.astype("<f4").tobytes()
    return data + hashlib.blake2b(data, digest_size=SUM_BYTES).digest()


def unpack(data: bytes, block_size: int) -> NDArray[np.float32]:
    """The tables of a file.

    Raises
    ------
    InvalidArgument
        It is damaged, of another version, or was learned with blocks of another size.
    """
    if len(data) < HEADER.size + SUM_BYTES:
        raise InvalidArgument(f"it has {len(data)} bytes: cut short")
    magic, version, tokens, rows, columns = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise InvalidArgument("it is no file of learned tables")
    if version != VERSION:
        raise InvalidArgument(f"it has version {version}, this pagedkv knows {VERSION}")
    body = data[:-SUM_BYTES]
    if hashlib.blake2b(body, digest_size=SUM_BYTES).digest() != data[-SUM_BYTES:]:
        raise InvalidArgument("its checksum is wrong: it is damaged")
    if tokens != block_size:
        raise InvalidArgument(f"it was learned with blocks of {tokens} tokens, here they have {block_size}")
    if len(body) != HEADER.size + 4 * rows * columns:
        raise InvalidArgument(f"it has {len(data)} bytes, which are not {rows} times {columns} numbers")
    return np.frombuffer(body, "<f4", offset=HEADER.size).reshape(rows, columns).astype(np.float32)


class Folder:
    """A directory that tables are kept in.

    Whatever is wrong with it costs the tables and raises nothing.

    Parameters
    ----------
    path : the directory; "" keeps nothing. A file that could not be used is kept as ``NAME.old`` when it is replaced.
    make : whether the first write makes it, with the folders above it. A disk tier's is there, or was deleted.
    may_write : asked before anything is written; False where the disk is known not to take it.

    Attributes
    ----------
    counts : ``tables_read``, ``tables_refused`` (files that could not be used), ``tables_written`` and
        ``table_write_failures``.
    """

    def __init__(self, path: str = "", *, make: bool = True, may_write: Callable[[], bool] = lambda: True) -> None:
        self.path, self._make, self._may_write = os.path.abspath(path) if path else "", make, may_write
        self.counts = dict.fromkeys(("tables_read", "tables_refused", "tables_written", "table_write_failures"), 0)
        self._said: set[str] = set()
        self._refused: set[str] = set()

    def read(self, name: str, use: Callable[[bytes], object]) -> None:
        """Hand a kind's file to `use`, if there is one.

        A table that it refuses with InvalidArgument is of no use.
        """
        if not self.path:
            return
        try:
            data = self._read(FILE.format(name))
            if data is not None:
                use(data)
                self.counts["tables_read"] += 1
        except (OSError, InvalidArgument) as problem:
            self.counts["tables_refused"] += 1
            if isinstance(problem, InvalidArgument):
                self._refused.add(FILE.format(name))
            log.warning("%s is not used, and learned anew: %s", os.path.join(self.path, FILE.format(name)), problem)

    def write(self, files: dict[str, bytes]) -> int:
        """Replace these kinds' files; how many were. One that fails is left as it was.

        Returns after `HANG_S` seconds at the latest, also where the disk does not answer.
        """
        if not self.path or not files:
            return 0
        done: list[str] = []
        if not self._may_write():
            self._failed(len(files), "the disk tier takes no writes now")
        elif not ends_within(HANG_S, lambda: self._write_all(files, done)):
            self._failed(len(files) - len(done), "the disk does not answer")
        self.counts["tables_written"] += len(done)
        return len(done)

    def _write_all(self, files: dict[str, bytes], done: list[str]) -> None:
        for name, data in files.items():
            if self._is_written(FILE.format(name), data):
                done.append(name)

    def _is_written(self, name: str, data: bytes) -> bool:
        try:
            self._write(name, data)
        except OSError as problem:
            self._failed(1, problem.strerror or str(problem))
            return False
        return True

    def _failed(self, count: int, why: str) -> None:
        self.counts["table_write_failures"] += count
        if why not in self._said:
            self._said.add(why)
            log.warning("what was learned could not be written to %s: %s", self.path, why)

    def _read(self, name: str) -> bytes | None:
        try:
            fd = os.open(os.path.join(self.path, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
                raise InvalidArgument("it is no plain file of a few megabytes at most")
            return read_start(fd, info.st_size)
        finally:
            close_quietly(fd)

    def _write(self, name: str, data: bytes) -> None:
        if len(data) > file_size_limit():  # a write beyond it may end the process
            raise OSError("it is over this process's file size limit")
        if self._make:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        new = f"{name}.new"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=folder)  # left by a crash
            fd = os.open(new, flags, 0o600, dir_fd=folder)
            try:
                _write_whole(fd, data)
                os.fsync(fd)
            finally:
                close_quietly(fd)
            if name in self._refused:  # another program may have a use for it
                os.rename(name, f"{name}.old", src_dir_fd=folder, dst_dir_fd=folder)
                self._refused.discard(name)
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=folder)
            raise
        finally:
            close_quietly(folder)


def _write_whole(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


class Learned:
    """One cache's learning. Any thread may call it.

    Parameters
    ----------
    policy : HazardPolicy
    block_size : tokens of a block; a table learned with another does not fit.
    now_ns : the cache's clock, which never fails.
    folder : Folder

    Attributes
    ----------
    policy : HazardPolicy
    """

    def __init__(self, policy: HazardPolicy, block_size: int, now_ns: Callable[[], int], folder: Folder) -> None:
        self.policy, self._block_size, self._now_ns, self._folder = policy, block_size, now_ns, folder
        self._lock = threading.Lock()
        self._kinds: dict[str, int] = {}
        self._saved = 0  # samples that had been learned when the files were last written
        self.kind_number(DEFAULT)

    def tick(self) -> None:
        """Tell the policy what time it is."""
        self.policy.tick(self._now_ns())

    def study(self) -> None:
        """Learn from a few noted samples, in well below a millisecond, at the end of a request."""
        self.policy.study()

    def kind_number(self, name: str) -> int:
        """The core's number of a kind; a new kind's tables are read if they lie in a file.

        Raises
        ------
        WrongType, InvalidArgument
            It is no name of a kind, or there are too many. Nothing was changed.
        """
        if not isinstance(name, str):
            raise WrongType(f"a kind is a name, not {type(name).__name__}")
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"a kind is 1 to 40 of a-z, 0-9, '-' and '_', a letter or digit first, not {name!r}")
        with self._lock:
            number = self._kinds.get(name)
            if number is None:
                if len(self._kinds) == MAX_KINDS:
                    known = ", ".join(self._kinds)
                    raise InvalidArgument(
                        f"{name!r} would be one kind too many: there are {MAX_KINDS} already, {known}"
                    )
                number = self._kinds[name] = len(self._kinds)
                self._folder.read(name, lambda data: self._load(data, self._kinds[name]))
        return number

    def save(self) -> int:
        """Write the tables of every kind that has learned anything since they were last written.

        Files written.
        """
        with self._lock:
            self.policy.study(LAST_STUDY)
            learned = self.policy.stats()["learned"]
            if learned == self._saved:
                return 0
            tables = {name: self.policy.tables(number) for name, number in self._kinds.items()}
            files = {name: pack(table, self._block_size) for name, table in tables.items() if table is not None}
            written = self._folder.write(files)
            if written == len(files):
                self._saved = learned
        return written

    def stats(self) -> dict[str, int]:
        """The policy's counters and the files'."""
        return {**self.policy.stats(), **self._folder.counts}

    def _load(self, data: bytes, number: int) -> None:
        self.policy.load_tables(unpack(data, self._block_size), number)
