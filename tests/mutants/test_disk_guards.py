"""Tests for guards of the disk tier whose mutants survived before.

Each test is about one guard.
"""

from __future__ import annotations

import errno
import resource
from functools import partial
from pathlib import Path

import numpy as np

from pagedkv.tiers import DiskTier, Record
from pagedkv.tiers.disk import _io

DIGEST = b"n" * 32


def test_a_damaged_header_that_heals_brings_nothing_back_that_was_purged(tmp_path: Path) -> None:
    arena = np.ones((1, 64), np.uint8)
    opened = partial(DiskTier, tmp_path / "kv", 1, 64, fingerprint=DIGEST, block_tokens=4)
    with opened() as tier:
        tier.write([0], [Record(DIGEST, DIGEST, DIGEST, np.arange(4, dtype=np.int32))], arena, [0])
        tier.purge(DIGEST)
    path = tmp_path / "kv" / "data.0000"
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    opened().close()  # the purge is forgotten once all that it names is buried
    now = path.read_bytes()
    path.write_bytes(now[:100] + whole[100:101] + now[101:])
    with opened() as tier:
        assert list(tier.records()) == []


def test_a_write_that_is_cut_short_is_gone_on_with_until_it_fails(tmp_path: Path) -> None:
    """The kernel takes what fits under the limit of file sizes, and refuses the rest."""
    rows, outcomes = np.ones((1, 4096), np.uint8), np.zeros(1, np.int64)
    none, seeds = np.zeros((1, 0), np.uint64), np.zeros(1, np.uint64)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "file").open("wb") as file:
        fds, offsets, first = np.array([file.fileno()], np.int32), np.zeros(1, np.int64), np.zeros(1, np.int32)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        try:
            _io.file_write(fds, offsets, rows, first, outcomes, seeds, none)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcomes.tolist() == [-errno.EFBIG]
    assert (tmp_path / "file").stat().st_size == 3000
