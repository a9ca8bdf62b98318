"""A disk tier's calls that Linux, macOS and Windows name differently, or lack.

Each function looks up its call when it runs. Linux alone is tested; tests take calls away to force the other ways.
file_system_of names the kind of file system of a directory: locks and syncs over a network do not give the
guarantees that a store needs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import time
from typing import Any

NETWORK = frozenset({
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "ceph", "lustre", "gfs", "gfs2", "ocfs2"),
    *("beegfs", "gpfs", "panfs", "orangefs", "pvfs2", "virtiofs", "vboxsf", "prl_fs", "davfs"),
    *("fuse.sshfs", "fuse.glusterfs"),
    *("fuse.s3fs", "fuse.rclone", "fuse.ceph", "fuse.ceph-fuse", "fuse.cephfs", "fuse.gcsfuse", "fuse.juicefs"),
    *("fuse.mount-s3", "fuse.goofys", "fuse.moosefs", "fuse.mfs", "fuse.davfs", "fuse.curlftpfs", "fuse.seaweedfs"),
    *("fuse.weed", "fuse.hf3fs", "fuse.alluxio", "fuse.blobfuse", "fuse.blobfuse2", "fuse.smbnetfs"),
})  # fmt: skip
ZEROS = 1 << 20  # written at a time
LOCKED_BYTE = 1 << 30  # far behind all that LOCK holds
_ESCAPED = re.compile(r"\\([0-7]{3})")


def file_system_of(fd: int) -> str:
    """File system type of an open directory, by ``/proc/self/mountinfo``; ``""`` if unknown.

    The mount whose mount point is the longest beginning of the directory's path counts, and of several at one mount
    point the last, which hides the others. (Device numbers do not identify mounts: btrfs has one per subvolume.)
    """
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    longest, kind = -1, ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            longest, kind = len(point), source.split(" ")[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether a type of file system keeps its files on other machines."""
    return kind in NETWORK


def flags(*names: str) -> int:
    """Flags of `os.open` together; a system that lacks one opens without it."""
    known = {
        "O_CLOEXEC": os.O_CLOEXEC if hasattr(os, "O_CLOEXEC") else 0,
        "O_DIRECT": os.O_DIRECT if hasattr(os, "O_DIRECT") else 0,
        "O_NOATIME": os.O_NOATIME if hasattr(os, "O_NOATIME") else 0,
        "O_NOFOLLOW": os.O_NOFOLLOW if hasattr(os, "O_NOFOLLOW") else 0,
        "O_NONBLOCK": os.O_NONBLOCK if hasattr(os, "O_NONBLOCK") else 0,
    }
    found = 0
    for name in names:
        found |= known[name]
    return found


def _module(name: str) -> Any:
    """A module of some systems only; None elsewhere."""
    found: Any
    try:
        if name == "fcntl":
            import fcntl as found
        elif name == "resource":
            import resource as found
        else:
            import msvcrt as found
    except ImportError:
        return None
    return found


def sync(fd: int) -> None:
    """Wait until the device has the file, beyond its cache: F_FULLFSYNC on macOS, else fsync.

    Raises
    ------
    OSError
    """
    full = getattr(_module("fcntl"), "F_FULLFSYNC", None)
    if full is not None:
        with contextlib.suppress(OSError):  # a file system that does not know it
            _module("fcntl").fcntl(fd, full)
            return
    os.fsync(fd)


def sync_data(fd: int) -> None:
    """As `sync`, without the times of the file where the system can leave them out."""
    if hasattr(os, "fdatasync") and not hasattr(_module("fcntl"), "F_FULLFSYNC"):
        os.fdatasync(fd)
    else:
        sync(fd)


def allocate(fd: int, num_bytes: int) -> None:
    """Let the file have `num_bytes`, each of them on the device: later writes find room.

    Bytes that it has stay. Without posix_fallocate zeros are written behind them.

    Raises
    ------
    OSError
        There is no room; the file may have grown in part.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    zeros, at = memoryview(bytes(ZEROS)), os.fstat(fd).st_size
    os.lseek(fd, at, os.SEEK_SET)  # Windows has no pwrite
    while at < num_bytes:
        done = os.write(fd, zeros[: num_bytes - at])
        if not done:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        at += done


def forget_pages(fd: int) -> None:
    """Let the page cache forget a file's written pages, where the system takes advice."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def reads_mappings() -> bool:
    """Whether the kernel copies from a mapping: a truncated file is an error then, no signal."""
    return sys.platform == "linux"


def past_the_cache(fd: int) -> bool:
    """Let a descriptor's reads go past the page cache by macOS's F_NOCACHE; False elsewhere."""
    fcntl = _module("fcntl")
    if not hasattr(fcntl, "F_NOCACHE"):
        return False
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return True
    return False


def wait_and_lock(fd: int) -> None:
    """As `lock`, once no other descriptor has it: for locks that are held for moments."""
    fcntl = _module("fcntl")
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        return
    while True:
        with contextlib.suppress(BlockingIOError):
            lock(fd)
            return
        time.sleep(0.01)


def lock(fd: int) -> None:
    """Lock a file for this process, until it is closed; does not wait.

    Raises
    ------
    BlockingIOError
        Another descriptor has it.
    OSError
        The file system has no locks.
    """
    fcntl = _module("fcntl")
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    msvcrt = _module("msvcrt")
    os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)  # locks are of bytes there, and keep others from reading them
    try:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError as problem:
        if problem.errno in (errno.EACCES, errno.EDEADLK):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        raise


def limit_of_file_size() -> float:
    """This process's limit in bytes; endless where the system has none."""
    resource = _module("resource")
    if resource is None:
        return float("inf")
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)
