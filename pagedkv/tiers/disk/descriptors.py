"""Small calls on file descriptors, and the limit of the files behind them."""

from __future__ import annotations

import contextlib
import os

from pagedkv.tiers.disk.file_system import limit_of_file_size


def close_quietly(fd: int) -> None:
    """Close a descriptor; ignore errors.

    The descriptor is gone in any case, and what close(2) could not write was synced before.
    """
    with contextlib.suppress(OSError):
        os.close(fd)


def read_start(fd: int, num_bytes: int) -> bytes:
    """Read the first `num_bytes` of a file in as many calls as needed; fewer at its end.

    Raises
    ------
    OSError
    """
    data = b""
    while len(data) < num_bytes and (more := os.pread(fd, num_bytes - len(data), len(data))):
        data += more
    return data


def file_size_limit() -> float:
    """This process's file-size limit in bytes.

    A write beyond it ends a process that does not ignore SIGXFSZ.
    """
    return limit_of_file_size()
