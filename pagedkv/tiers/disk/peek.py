"""Reads the fingerprint of a store without opening, locking or judging it."""

from __future__ import annotations

import os

from pagedkv.errors import InvalidArgument
from pagedkv.tiers.disk import file_system
from pagedkv.tiers.disk.descriptors import close_quietly, read_start
from pagedkv.tiers.disk.directory import SUPER
from pagedkv.tiers.disk.format import PAGE
from pagedkv.tiers.disk.superblock import newest_copy

_FLAGS = file_system.flags("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK")


def stored_fingerprint(path: str) -> bytes | None:
    """The 32 bytes that a store was made with; None where a tier would find no usable one.

    Parameters
    ----------
    path : of the disk tier's directory.
    """
    try:
        fd = os.open(os.path.join(path, SUPER), os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    try:
        found = newest_copy(read_start(fd, 2 * PAGE))
    except (OSError, InvalidArgument):
        return None
    finally:
        close_quietly(fd)
    return found.fingerprint if found is not None and found.is_known else None
