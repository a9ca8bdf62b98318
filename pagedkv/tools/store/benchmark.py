"""How fast a store in a given directory writes and reads with checksums.

Beside the same bytes without them, which is the ceiling.

Store and plain file take turns, so that a busy neighbour hits both, and the best of the rounds counts. Every block that
the store gives back is compared with its source.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.tiers import DiskTier, Record
from pagedkv.tiers.base import DIGEST_BYTES
from pagedkv.tiers.disk import _io, file_system
from pagedkv.tiers.disk.format import PAGE, Geometry

BLOCK_BYTES = 2 << 20  # 16 tokens of Llama 3 8B in 16 bits
BLOCK_TOKENS = 16
FINGERPRINT = bytes(32)
AT_ONCE = 8  # blocks of one call
ROUNDS = 2

Tick = Callable[[int], object]


@dataclass
class Rates:
    """Bytes per second, best of the rounds.

    Attributes
    ----------
    write : until the kernel has it; `write_synced` until the device has it.
    read_cold : from the device; `read_warm` from the page cache.
    """

    write: float = 0.0
    write_synced: float = 0.0
    read_cold: float = 0.0
    read_warm: float = 0.0


@dataclass
class Measured:
    """What `measure` found.

    Attributes
    ----------
    store, ceiling : rates of the disk tier and of a plain file.
    wrong : blocks that differ from the written ones, or are not there.
    cold : whether reads could be kept from the page cache: False means that `read_cold` is not cold.
    """

    store: Rates = field(default_factory=Rates)
    ceiling: Rates = field(default_factory=Rates)
    wrong: int = 0
    cold: bool = True

    def to_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return asdict(self)


def geometry_for(size: int) -> Geometry:
    """As many blocks as fit `size` bytes."""
    one = Geometry(1, BLOCK_BYTES, BLOCK_TOKENS, 1, 1)
    return Geometry(max(1, size // one.slot_bytes), BLOCK_BYTES, BLOCK_TOKENS, 1, max(1, (1 << 30) // one.slot_bytes))


def open_store(path: Path, g: Geometry) -> DiskTier:
    """The store that is measured, made if it is missing."""
    return DiskTier(
        path, g.num_blocks, g.block_bytes, fingerprint=FINGERPRINT, block_tokens=g.block_tokens, shards=g.shards,
        segment_bytes=g.segment_slots * g.slot_bytes, page_cache="keep", network_fs=True,
    )  # fmt: skip


def record_of(number: int) -> Record:
    """A name that no other number has."""
    key, parent, namespace = (bytes([i]) + number.to_bytes(DIGEST_BYTES - 1, "little") for i in range(3))
    return Record(key, parent, namespace, np.full(BLOCK_TOKENS, number, np.int32))


class Contents:
    """The bytes of every block: a few random rows, each stamped with its number."""

    def __init__(self) -> None:
        self.rows = np.random.default_rng(0).integers(0, 256, (AT_ONCE, BLOCK_BYTES), np.uint8)

    def of(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Rows for these blocks, `AT_ONCE` at most; valid until the next call."""
        rows = self.rows[: blocks.size]
        rows[:, :4] = blocks[:, None].view(np.uint8).reshape(-1, 4)
        return rows


def measure(folder: Path, tier: DiskTier, g: Geometry, tick: Tick) -> Measured:
    """Fill the store and a plain file in `folder` and read both, `ROUNDS` times.

    The file is deleted afterwards.

    Raises
    ------
    OSError
        The plain file cannot be written or read.
    """
    found = Measured()
    path = folder / "raw"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        file_system.allocate(fd, g.num_blocks * g.slot_bytes)
        sides: list[tuple[_Raw | _Stored, Rates]] = [(_Raw(fd, g), found.ceiling), (_Stored(tier), found.store)]
        for _ in range(ROUNDS):
            for side, rates in sides:
                forget(folder)  # or the second to write would find its pages in memory, or not
                found.wrong += _fill(side, rates, g, tick)
            for side, rates in sides:
                found.cold = forget(folder) and found.cold
                wrong, rate = _read(side, g, tick)
                found.wrong, rates.read_cold = found.wrong + wrong, max(rates.read_cold, rate)
                wrong, rate = _read(side, g, tick)
                found.wrong, rates.read_warm = found.wrong + wrong, max(rates.read_warm, rate)
            sides.reverse()  # the first of the two finds the disk in another state
    finally:
        os.close(fd)
        path.unlink()
    return found


def measured_bytes(g: Geometry) -> int:
    """What `measure` writes and reads, for its progress."""
    return g.num_blocks * g.block_bytes * 6 * ROUNDS


def forget(folder: Path) -> bool:
    """Let the page cache forget the files below a folder; False if it still has some of them."""
    gone = True
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size >= BLOCK_BYTES:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                file_system.sync_data(fd)
                file_system.forget_pages(fd)
                gone = gone and not _cached(fd, path.stat().st_size // 2)
            finally:
                os.close(fd)
    return gone


def _cached(fd: int, offset: int) -> bool:
    """Whether a page is in the page cache; False also where the file system cannot tell."""
    with contextlib.suppress(OSError, AttributeError):  # it would have to wait, or does not know the question
        return os.preadv(fd, [bytearray(PAGE)], offset, os.RWF_NOWAIT) > 0
    return False


_Arguments: TypeAlias = tuple[
    NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64]
]  # descriptors, offsets, rows, outcomes, seeds, room for no sums


class _Raw:
    """A plain file of slots, without sums."""

    def __init__(self, fd: int, g: Geometry) -> None:
        self._fd, self._g = fd, g

    def write(self, blocks: NDArray[np.int32], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        fds, offsets, every, outcomes, seeds, none = self._arguments(blocks)
        _io.file_write(fds, offsets + self._g.header_bytes, rows, every, outcomes, seeds, none)
        _expect(outcomes, self._g.block_bytes)
        return np.ones(blocks.size, np.bool_)

    def read(self, blocks: NDArray[np.int32], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        fds, offsets, every, outcomes, seeds, none = self._arguments(blocks)
        headers = np.zeros((blocks.size, self._g.header_bytes), np.uint8)
        _io.file_read(fds, offsets, headers, rows, every, outcomes, seeds, none)
        _expect(outcomes, self._g.header_bytes + self._g.block_bytes)
        return np.ones(blocks.size, np.bool_)

    def sync(self) -> None:
        file_system.sync_data(self._fd)

    def _arguments(self, blocks: NDArray[np.int32]) -> _Arguments:
        count = blocks.size
        return (
            np.full(count, self._fd, np.int32), blocks.astype(np.int64) * self._g.slot_bytes,
            np.arange(count, dtype=np.int32), np.zeros(count, np.int64), np.zeros(count, np.uint64),
            np.zeros((count, 0), np.uint64),
        )  # fmt: skip


class _Stored:
    """The disk tier, with everything that it checks."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    def write(self, blocks: NDArray[np.int32], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        every = np.arange(blocks.size, dtype=np.int32)
        return self._tier.write(blocks, [record_of(block) for block in blocks.tolist()], rows, every)

    def read(self, blocks: NDArray[np.int32], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        every = np.arange(blocks.size, dtype=np.int32)
        return self._tier.read(blocks, [record_of(block) for block in blocks.tolist()], rows, every)

    def sync(self) -> None:
        if not self._tier.flush():
            raise TierError("the device refused the writes")


def _fill(side: _Raw | _Stored, rates: Rates, g: Geometry, tick: Tick) -> int:
    """Write every block; how many of them failed."""
    contents, seconds, failed = Contents(), 0.0, 0
    for blocks in _groups(g):
        rows = contents.of(blocks)
        start = time.perf_counter()
        done = side.write(blocks, rows)
        seconds += time.perf_counter() - start
        failed += int((~done).sum())
        tick(rows.nbytes)
    start = time.perf_counter()
    side.sync()
    synced = seconds + time.perf_counter() - start
    total = g.num_blocks * g.block_bytes
    rates.write, rates.write_synced = max(rates.write, total / seconds), max(rates.write_synced, total / synced)
    return failed


def _read(side: _Raw | _Stored, g: Geometry, tick: Tick) -> tuple[int, float]:
    """Read every block; how many were wrong, and the rate."""
    contents, seconds, wrong = Contents(), 0.0, 0
    room = np.zeros((AT_ONCE, g.block_bytes), np.uint8)
    for blocks in _groups(g):
        start = time.perf_counter()
        hit = side.read(blocks, room)
        seconds += time.perf_counter() - start
        right = (room[: blocks.size] == contents.of(blocks)).all(axis=1)
        wrong += int((~(hit & right)).sum())
        tick(blocks.size * g.block_bytes)
    return wrong, g.num_blocks * g.block_bytes / seconds


def _groups(g: Geometry) -> list[NDArray[np.int32]]:
    every = np.arange(g.num_blocks, dtype=np.int32)
    return [every[first : first + AT_ONCE] for first in range(0, g.num_blocks, AT_ONCE)]


def _expect(outcomes: NDArray[np.int64], num_bytes: int) -> None:
    for outcome in outcomes.tolist():
        if outcome != num_bytes:
            number = -outcome if outcome < 0 else errno.EIO
            raise OSError(number, os.strerror(number))
