"""A store of a few KiB whose every byte can be damaged.

Names, contents that follow from them, and checked reads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers import DiskTier, Record

NUM_BLOCKS, BLOCK_BYTES, BLOCK_TOKENS, SHARDS = 6, 1000, 4, 2
SLOT_BYTES, HEADER_BYTES = 8192, 4096
SEGMENT_SLOTS = 4
FINGERPRINT = bytes(range(32))
ALL = np.arange(NUM_BLOCKS, dtype=np.int32)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty directory, in memory where the system offers that.

    Tests open stores by the thousand, and syncs are slow.
    """
    shared = Path("/dev/shm")
    in_memory = shared.is_dir() and os.access(shared, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="pagedkv-", dir=shared if in_memory else None) as name:
        yield Path(name)


@contextmanager
def small_files(most: int = 64 << 20) -> Iterator[None]:
    """No file of more than `most` bytes can be made, as where the disk is full.

    Some odd numbers are good sizes of a store, which takes all of its space when it is opened.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log lines that damage brings about, one for each kind and each opening."""
    log = logging.getLogger("pagedkv")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def open_store(path: Path, **changes: Any) -> DiskTier:
    """The small store at `path`, made if need be."""
    options: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "fingerprint": FINGERPRINT,
        "block_tokens": BLOCK_TOKENS, "shards": SHARDS, "segment_bytes": SEGMENT_SLOTS * SLOT_BYTES,
    }  # fmt: skip
    return DiskTier(path, **(options | changes))


def record_of(number: int) -> Record:
    """A record that no other number has."""
    digest = hashlib.shake_128(b"record %d" % number).digest(4 * 32 + 4 * BLOCK_TOKENS)
    key, parent, namespace, extra = (digest[i : i + 32] for i in range(0, 128, 32))
    return Record(key, parent, namespace, np.frombuffer(digest, np.int32, BLOCK_TOKENS, 128).copy(), extra)


def payload_of(record: Record, turn: int = 0, num_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """Return the bytes stored under a record.

    Another `turn` stands for other bytes under the same name.
    """
    seed = record.key + record.tokens.tobytes() + record.namespace + bytes([turn])
    return np.frombuffer(hashlib.shake_128(seed).digest(num_bytes), np.uint8)


def payloads(records: Sequence[Record], turn: int = 0, num_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """uint8 [n, num_bytes]."""
    return np.stack([payload_of(record, turn, num_bytes) for record in records])


def fill(path: Path, records: Sequence[Record], turn: int = 0, **changes: Any) -> None:
    """Make a store and put record i into slot i."""
    with open_store(path, **changes) as tier:
        assert tier.write(ALL, records, payloads(records, turn), ALL).all()


def file_of(slot: int) -> tuple[str, int]:
    """Name of the segment file of a slot, and where the slot starts in it."""
    segment, index = divmod(slot, SEGMENT_SLOTS)
    return f"data.{segment:04d}", index * SLOT_BYTES


def slots_of(name: str, start: int, length: int) -> set[int]:
    """Slots that bytes of a file belong to; none for files that hold no slots."""
    if not name.startswith("data."):
        return set()
    first = int(name[5:]) * SEGMENT_SLOTS
    return set(range(first + start // SLOT_BYTES, first + (start + length - 1) // SLOT_BYTES + 1))


class Image:
    """The bytes of a closed store, and a way back to them after damage.

    Attributes
    ----------
    files : name to bytes, LOCK excepted (it says nothing and is rewritten at every opening).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.name != "LOCK"}
        self._fds = {name: os.open(path / name, os.O_RDWR | os.O_CLOEXEC) for name in self.files}

    def write(self, name: str, start: int, data: bytes) -> None:
        """Damage: put these bytes there."""
        os.pwrite(self._fds[name], data, start)

    def restore(self, *pieces: tuple[str, int, int]) -> None:
        """Undo damage to the given (file, start, length).

        Without any, it puts every byte of every file back.
        """
        whole = [(name, 0, len(data)) for name, data in self.files.items()]
        for name, start, length in pieces or whole:
            os.pwrite(self._fds[name], self.files[name][start : start + length], start)

    def slot(self, slot: int) -> bytes:
        """The bytes of a slot."""
        name, start = file_of(slot)
        return self.files[name][start : start + SLOT_BYTES]

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
