"""The directory of a disk tier: private, locked by one process, opened without following links.

    LOCK       flock'ed while a tier has the directory open; holds the owner's pid, for humans
    KEY        32 random bytes: the secret of the chain keys of this store
    SUPER      two 4 KiB copies of the superblock
    data.NNNN  segment files, never sparse

Everything is reached through one directory descriptor, so renaming the path under a running tier changes
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import stat
from pathlib import Path

from pagedkv.errors import TierError

LOCK, KEY, SUPER, SUPER_NEW = "LOCK", "KEY", "SUPER", "SUPER.new"
SECRET_BYTES = 32
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_OURS = re.compile(r"LOCK|KEY|SUPER|SUPER\.new|data\.\d{4,}")


class Directory:
    """An open and locked store directory. Making the object makes the directory (not its parents) if need be.

    Raises
    ------
    TierError
        The path is a link or no directory, belongs to somebody else, is open to others, is locked, or cannot
        be made or opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.fspath(path)).absolute()
        self.made = False
        self.fd = self.lock_fd = -1
        try:
            self._open()
        except OSError as problem:
            self.close()
            raise TierError(f"cannot open disk tier {self.path}: {problem.strerror}") from problem
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
            self.made = True
        info = os.lstat(self.path)
        if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):
            raise TierError(f"disk tier {self.path} is not a directory (links are not followed); name a directory")
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        self._check_private(os.fstat(self.fd), str(self.path), "chmod 700")
        self.lock_fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=self.fd)
        self._check_private(os.fstat(self.lock_fd), LOCK, "chmod 600")
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self.lock_fd, 64, 0).decode("ascii", "replace").strip() or "unknown"
            raise TierError(
                f"disk tier {self.path} is in use by {owner}; close that one or use another directory"
            ) from None
        os.ftruncate(self.lock_fd, 0)
        os.pwrite(self.lock_fd, b"pid %d\n" % os.getpid(), 0)

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

    def names(self) -> list[str]:
        """What lies in the directory, sorted."""
        return sorted(os.listdir(self.fd))

    def foreign_names(self) -> list[str]:
        """What lies in the directory and is not of a disk tier."""
        return [name for name in self.names() if not _OURS.fullmatch(name)]

    def open_file(self, name: str) -> int:
        """A descriptor for reading and writing.

        Raises
        ------
        TierError
            Missing, no plain file, or open to others.
        """
        try:
            fd = os.open(name, os.O_RDWR | _FLAGS | os.O_NONBLOCK, dir_fd=self.fd)
        except OSError as problem:
            hint = "it is a link" if problem.errno == errno.ELOOP else problem.strerror
            raise TierError(f"cannot open {name} of disk tier {self.path}: {hint}") from problem
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise TierError(f"{name} of disk tier {self.path} is not a plain file")
            self._check_private(info, name, "chmod 600")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def make_file(self, name: str, num_bytes: int) -> int:
        """A descriptor of a new file whose blocks are all allocated.

        Raises
        ------
        TierError
            No space, or over the file size limit; says the sizes. The file is gone again then.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY and num_bytes > limit:  # SIGXFSZ would end a process that does not ignore it
            raise TierError(
                f"disk tier {self.path} needs a file of {num_bytes} bytes, over this process's limit of "
                f"{limit}; raise the limit (ulimit -f) or use smaller segments"
            )
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self.fd)
        try:
            if num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)
        except OSError as problem:
            os.close(fd)
            os.unlink(name, dir_fd=self.fd)
            raise TierError(
                f"cannot allocate {num_bytes} bytes for {name} of disk tier {self.path}: {problem.strerror} "
                f"({self.free_bytes()} bytes are free); give the tier a smaller size or another disk"
            ) from problem
        return fd

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
            secret = os.pread(fd, SECRET_BYTES + 1, 0)
        finally:
            os.close(fd)
        if len(secret) != SECRET_BYTES:
            raise TierError(f"KEY of disk tier {self.path} has {len(secret)} bytes instead of {SECRET_BYTES}")
        return secret

    def make_secret(self) -> bytes:
        """A new KEY."""
        secret = os.urandom(SECRET_BYTES)
        fd = self.make_file(KEY, SECRET_BYTES)
        try:
            os.pwrite(fd, secret, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        return secret

    def remove_store(self) -> None:
        """Delete every file of a store except LOCK."""
        for name in self.names():
            if _OURS.fullmatch(name) and name != LOCK:
                os.unlink(name, dir_fd=self.fd)

    def remove_if_made(self) -> None:
        """Delete LOCK and the directory again if this object made it and nothing else lies there."""
        if self.made and self.names() == [LOCK]:
            os.unlink(LOCK, dir_fd=self.fd)
            os.rmdir(self.path)

    def close(self) -> None:
        """Unlock and close. Never LOCK_UN: in a forked child that would unlock the parent's directory."""
        for fd in (self.lock_fd, self.fd):
            if fd >= 0:
                os.close(fd)
        self.lock_fd = self.fd = -1
