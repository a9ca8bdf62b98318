"""A FUSE file system that passes everything on to a directory, and fails on demand.

``python -m tests.reliability.fuse_faults MODULE DIRECTORY MOUNT_POINT MODE_FILE``; the mode file holds one of

    ok      everything works
    read    reads fail with EIO
    write   writes fail with EIO
    torn    half of what is written gets there, and the answer is that all did
    sync    syncs fail with EIO
    full    writes and allocations fail with ENOSPC
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any

STAT = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid", "st_ino")


def operations(fuse: Any, directory: str, mode_file: str) -> Any:
    """The file system, as a class of the FUSE module in use wants it."""

    class Faulty(fuse.Operations):  # type: ignore[misc]
        use_ns = True

        def _fail(self, **numbers: int) -> str:
            with open(mode_file) as file:
                mode = file.read()
            if mode in numbers:
                raise fuse.FuseOSError(numbers[mode])
            return mode

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            info = os.lstat(directory + path)
            return {name: getattr(info, name + "_ns" * name.endswith("time")) for name in STAT}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(directory + path)]

        def statfs(self, path: str) -> dict[str, int]:
            info = os.statvfs(directory + path)
            return {name: getattr(info, name) for name in ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_frsize")}

        def mkdir(self, path: str, mode: int) -> None:
            os.mkdir(directory + path, mode)

        def rmdir(self, path: str) -> None:
            os.rmdir(directory + path)

        def unlink(self, path: str) -> None:
            os.unlink(directory + path)

        def rename(self, old: str, new: str) -> None:
            os.rename(directory + old, directory + new)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(directory + path, os.O_RDWR | os.O_CREAT, mode)

        def open(self, path: str, flags: int) -> int:
            return os.open(directory + path, flags & (os.O_ACCMODE | os.O_TRUNC))

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            os.truncate(directory + path, length)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            self._fail(read=errno.EIO)
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            mode = self._fail(write=errno.EIO, full=errno.ENOSPC)
            os.pwrite(fh, data[: len(data) // 2] if mode == "torn" else data, offset)
            return len(data)

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            self._fail(sync=errno.EIO)
            os.fsync(fh)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

    return Faulty()


if __name__ == "__main__":
    name, behind, mount_point, mode_path = sys.argv[1:]
    module = importlib.import_module(name)
    module.FUSE(operations(module, behind, mode_path), mount_point, foreground=True, nothreads=True)
