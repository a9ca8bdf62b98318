"""The fingerprint of a store that is not open, read without its lock."""

from __future__ import annotations

import os

from pagedkv.errors import InvalidArgument
from pagedkv.tiers.disk.directory import SUPER
from pagedkv.tiers.disk.format import PAGE
from pagedkv.tiers.disk.superblock import parse_super


def fingerprint_in(path: str | os.PathLike[str]) -> bytes | None:
    """The 32 bytes that the store in a directory was made for.

    None where there is no store, or one that opening it will refuse.
    """
    try:
        fd = os.open(os.path.join(path, SUPER), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        data = os.pread(fd, 2 * PAGE, 0)
        copies = [parse_super(page) for page in (data[:PAGE], data[PAGE:]) if len(page) == PAGE]
    except (OSError, InvalidArgument):
        return None
    finally:
        os.close(fd)
    intact = [copy for copy in copies if copy is not None]
    return max(intact, key=lambda copy: copy.seqno).fingerprint if intact else None
