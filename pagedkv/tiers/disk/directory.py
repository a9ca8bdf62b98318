"""The directory of a disk tier: private, locked by one process, never via links.

    LOCK       flock'ed while a tier has the directory open, as the directory itself is, so that deleting LOCK lets
               no second owner in; holds the owner's pid and boot, for humans
    KEY        32 random bytes: the secret of the chain keys of this store
    SUPER      two 4 KiB copies of the superblock
    SUPER.new  in its place while the store is being made
    GROWING    there while the store grows
    data.NNNN  segment files, never sparse
    learned.*  not of the store: the weights of an eviction policy; left alone

Everything is reached through one directory descriptor, so renaming the path under a running tier changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from pagedkv.errors import StoreDamaged, TierError
from pagedkv.spec.paths import path_text
from pagedkv.tiers.disk import file_system
from pagedkv.tiers.disk.descriptors import close_quietly, file_size_limit, read_start
from pagedkv.tiers.disk.file_system import file_system_of, is_network

LOCK, KEY, SUPER, SUPER_NEW, GROWING = "LOCK", "KEY", "SUPER", "SUPER.new", "GROWING"
SECRET_BYTES = 32
_FLAGS = file_system.flags("O_NOFOLLOW", "O_CLOEXEC")
_OURS = re.compile(r"LOCK|KEY|SUPER|SUPER\.new|GROWING|data\.\d{4,}")
LEARNED = re.compile(r"learned\.([a-z0-9_-]+)")
_BESIDE = re.compile(rf"lost\+found|{LEARNED.pattern}(\.new)?")  # a file system of its own has lost+found in its root

RESTART = "put it back, or start an empty cache (on_mismatch='reset', or delete the directory)"
REPLACE = "put the store's own file back, or delete the directory to start an empty cache"


def _boot_id() -> bytes:
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read(36)
    except OSError:
        return b"unknown"


class Directory:
    """An open and locked store directory.

    The constructor makes the directory, and the folders above it, if they are missing.

    Parameters
    ----------
    path : the directory.
    network_fs : whether it may lie on a file system of another machine, whose locks and syncs may not hold.

    Attributes
    ----------
    read_only : why nothing in it can be written, as on a read-only mount; empty if it can.

    Raises
    ------
    TierError
        The path is a link or no directory, belongs to another user, is open to others, is locked, holds something else,
        lies on a network file system, or cannot be made or opened.
    """

    def __init__(self, path: str | os.PathLike[str], *, network_fs: bool = False) -> None:
        self.fd = self.lock_fd = -1
        self.path = Path(path_text(path, "a disk tier's path")).absolute()
        self.made = False
        self.read_only = ""
        self._network_fs = network_fs
        try:
            self._open()
        except OSError as problem:
            self.close()
            raise TierError(f"cannot open disk tier {self.path}: {problem.strerror}") from problem
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if not self.path.parent.exists():
            os.makedirs(self.path.parent, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
            self.made = True
        info = os.lstat(self.path)
        if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):
            raise TierError(f"disk tier {self.path} is not a directory (links are not followed); name a directory")
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        try:
            self._check_private(os.fstat(self.fd), str(self.path), "chmod 700")
            self._check_local()
        except TierError:
            if self.made:
                os.rmdir(self.path)
            raise
        try:
            self._lock_directory()
            self._check_ours()  # before anything is made in it
            self.lock_fd = self._open_lock()
            self._check_plain(os.fstat(self.lock_fd), LOCK)
            file_system.lock(self.lock_fd)
        except BlockingIOError:
            raise TierError(
                f"disk tier {self.path} is in use by {self._owner()}; close that one or use another directory"
            ) from None
        if not self.is_still_ours():
            raise TierError(f"{LOCK} of disk tier {self.path} was replaced while it was being opened; try again")
        if not self.read_only:
            self._sign()

    def _check_local(self) -> None:
        kind = file_system_of(self.fd)
        if is_network(kind) and not self._network_fs:
            raise TierError(
                f"disk tier {self.path} lies on a network file system ({kind}), where locks and syncs may not hold; "
                f"use a local disk, or pass network_fs=True if no other machine uses the directory"
            )

    def _check_ours(self) -> None:
        foreign = [] if self.holds_store() else self.foreign_names()
        if foreign:
            raise TierError(
                f"{self.path} is not empty and not a disk tier (it holds {foreign[0]!r}); "
                f"name an empty or a new directory"
            )

    def _open_lock(self) -> int:
        flags = os.O_NONBLOCK | _FLAGS
        try:
            return os.open(LOCK, os.O_RDWR | os.O_CREAT | flags, 0o600, dir_fd=self.fd)
        except OSError as problem:
            if problem.errno != errno.EROFS:
                raise self._cannot_open(LOCK, problem) from problem
            self.read_only = "its file system is mounted read-only"
            return os.open(LOCK, os.O_RDONLY | flags, dir_fd=self.fd)

    def _lock_directory(self) -> None:
        """Lock the directory itself, where its file system can.

        If LOCK is deleted, the next opener makes and locks another one.
        """
        try:
            file_system.lock(self.fd)
        except BlockingIOError:
            raise
        except OSError:  # network file systems lock no directories
            return

    def _owner(self) -> str:
        """What LOCK says about its holder; it may be deleted, or not signed yet."""
        text = b""
        with contextlib.suppress(OSError):
            fd = os.open(LOCK, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=self.fd)
            try:
                text = os.pread(fd, 80, 0)
            finally:
                close_quietly(fd)
        return text.decode("ascii", "replace").strip() or "unknown"

    def is_still_ours(self) -> bool:
        """Whether the file that this object has locked is the one that others would lock."""
        try:
            there, ours = os.stat(LOCK, dir_fd=self.fd, follow_symlinks=False), os.fstat(self.lock_fd)
        except OSError:
            return False
        return os.path.samestat(there, ours)

    def lost_its_lock(self) -> bool:
        """Whether LOCK is known to be gone or replaced; False where that cannot be told."""
        try:
            there, ours = os.stat(LOCK, dir_fd=self.fd, follow_symlinks=False), os.fstat(self.lock_fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return not os.path.samestat(there, ours)

    def _sign(self) -> None:
        """Say in LOCK whose it is. Only people read that, so a full disk is no reason to stop."""
        text = b"pid %d, boot %s\n" % (os.getpid(), _boot_id())
        with contextlib.suppress(OSError):
            os.ftruncate(self.lock_fd, 0)
            if len(text) <= file_size_limit():
                os.pwrite(self.lock_fd, text, 0)

    def _check_private(self, info: os.stat_result, what: str, remedy: str) -> None:
        if info.st_uid != os.geteuid():
            raise TierError(
                f"{what} of disk tier {self.path} belongs to user {info.st_uid}, and this process "
                f"runs as user {os.geteuid()}; use a directory of your own"
            )
        if info.st_mode & 0o077:
            raise TierError(
                f"{what} of disk tier {self.path} is open to other users (mode {info.st_mode & 0o777:o}); "
                f"cached prompts lie there in plain text: {remedy}"
            )

    def _check_plain(self, info: os.stat_result, name: str) -> None:
        if not stat.S_ISREG(info.st_mode):
            raise TierError(f"{name} of disk tier {self.path} is not a plain file; {REPLACE}")
        self._check_private(info, name, "chmod 600")

    def _cannot_open(self, name: str, problem: OSError) -> TierError:
        hints = {
            errno.ELOOP: f"it is a link; {REPLACE}",
            errno.EISDIR: f"it is a directory; {REPLACE}",
            errno.ENXIO: f"it is not a plain file; {REPLACE}",
            errno.EACCES: f"permission denied; chmod 600 {name}, or use a directory of your own",
            errno.EMFILE: "too many open files; raise the limit (ulimit -n) or use larger segments",
        }
        why = hints.get(problem.errno or 0, problem.strerror)
        return TierError(f"cannot open {name} of disk tier {self.path}: {why}")

    def names(self) -> list[str]:
        """What lies in the directory, sorted."""
        return sorted(os.listdir(self.fd))

    def foreign_names(self) -> list[str]:
        """What lies in the directory and is not of a disk tier."""
        return [name for name in self.names() if not _OURS.fullmatch(name) and not _BESIDE.fullmatch(name)]

    def holds_store(self) -> bool:
        """Whether a store was made here, whatever is left of it. An interrupted start is none."""
        names = self.names()
        return SUPER in names or (SUPER_NEW not in names and any(_OURS.fullmatch(n) and n != LOCK for n in names))

    def open_file(self, name: str) -> int:
        """A descriptor for reading, and for writing unless the directory is read-only.

        Raises
        ------
        StoreDamaged
            There is no such file.
        TierError
            It cannot be opened, is no plain file, belongs to another user or is open to others.
        """
        access = os.O_RDONLY if self.read_only else os.O_RDWR
        try:
            fd = os.open(name, access | _FLAGS | os.O_NONBLOCK, dir_fd=self.fd)
        except FileNotFoundError:
            raise StoreDamaged(f"disk tier {self.path} has no {name}: {RESTART}") from None
        except OSError as problem:
            raise self._cannot_open(name, problem) from problem
        try:
            self._check_plain(os.fstat(fd), name)
        except BaseException:
            close_quietly(fd)
            raise
        return fd

    def open_again(self, name: str, fd: int, flags: int) -> int:
        """A second descriptor, for reading, of the file open as `fd`; -1 if impossible."""
        try:
            again = os.open(name, os.O_RDONLY | flags | _FLAGS | os.O_NONBLOCK, dir_fd=self.fd)
        except OSError:
            return -1
        if not os.path.samestat(os.fstat(again), os.fstat(fd)):  # another process put another file there
            close_quietly(again)
            return -1
        return again

    def make_file(self, name: str, num_bytes: int) -> int:
        """A descriptor of a new file whose blocks are all allocated.

        Raises
        ------
        TierError
            No space, or over the file size limit; says the sizes. The file is gone again then.
        """
        self._check_may_allocate(name, num_bytes)
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self.fd)
        try:
            self._allocate(fd, name, num_bytes)
        except TierError:
            close_quietly(fd)
            os.unlink(name, dir_fd=self.fd)
            raise
        return fd

    def extend_file(self, name: str, num_bytes: int) -> int:
        """A descriptor of a file that exists, after all its blocks up to `num_bytes` are allocated.

        Raises
        ------
        TierError
            As `make_file` and `open_file`; the file may have grown in part.
        """
        self._check_may_allocate(name, num_bytes)
        fd = self.open_file(name)
        try:
            self._allocate(fd, name, num_bytes)
        except TierError:
            close_quietly(fd)
            raise
        return fd

    def _check_may_allocate(self, name: str, num_bytes: int) -> None:
        if self.read_only:
            raise TierError(f"cannot write {name} of disk tier {self.path}: {self.read_only}")
        if num_bytes > file_size_limit():
            raise TierError(
                f"disk tier {self.path} needs a file of {num_bytes} bytes, over this process's limit of "
                f"{file_size_limit()}; raise the limit (ulimit -f) or use smaller segments"
            )

    def _allocate(self, fd: int, name: str, num_bytes: int) -> None:
        try:
            if num_bytes:
                file_system.allocate(fd, num_bytes)
        except OSError as problem:
            raise TierError(
                f"cannot allocate {num_bytes} bytes for {name} of disk tier {self.path}: {problem.strerror} "
                f"({self.free_bytes()} bytes are free); give the tier a smaller size or another disk"
            ) from problem

    def free_bytes(self) -> int:
        """Bytes free on the file system for this user."""
        info = os.fstatvfs(self.fd)
        return info.f_bavail * info.f_frsize

    def read_secret(self) -> bytes:
        """The bytes of KEY.

        Raises
        ------
        TierError
        """
        fd = self.open_file(KEY)
        try:
            secret = read_start(fd, SECRET_BYTES + 1)
        finally:
            close_quietly(fd)
        if len(secret) != SECRET_BYTES:
            raise StoreDamaged(
                f"KEY of disk tier {self.path} has {len(secret)} bytes instead of {SECRET_BYTES}: {RESTART}"
            )
        return secret

    def make_secret(self) -> bytes:
        """A new KEY."""
        secret = os.urandom(SECRET_BYTES)
        fd = self.make_file(KEY, SECRET_BYTES)
        try:
            if os.pwrite(fd, secret, 0) != SECRET_BYTES:
                raise OSError(errno.EIO, "a write was cut short")
            file_system.sync(fd)
        finally:
            close_quietly(fd)
        return secret

    def remove_store(self) -> None:
        """Delete every file of a store except LOCK; interrupted, it leaves an interrupted start."""
        if SUPER in self.names():
            os.rename(SUPER, SUPER_NEW, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        for name in sorted(self.names(), key=lambda name: (name == SUPER_NEW, name)):
            if _OURS.fullmatch(name) and name != LOCK:
                os.unlink(name, dir_fd=self.fd)

    def remove_if_made(self) -> None:
        """Delete LOCK and the directory again if this object made it and nothing else lies there."""
        if self.made and self.names() == [LOCK]:
            os.unlink(LOCK, dir_fd=self.fd)
            os.rmdir(self.path)

    def close(self) -> None:
        """Unlock and close; never LOCK_UN, which in a forked child would unlock the parent."""
        for fd in (self.lock_fd, self.fd):
            if fd >= 0:
                close_quietly(fd)
        self.lock_fd = self.fd = -1

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close the directory if its constructor was interrupted as it returned.

        A signal's exception may come before the caller has the object.
        """
        if not is_finalizing():  # a mover's thread may still write then, into the descriptor's next file
            self.close()
