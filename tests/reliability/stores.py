"""Small stores for faults of the operating system.

Blocks belong to three namespaces, and their bytes follow from a number.

A number names one record and its bytes for ever, so whatever a store serves can be judged without asking when it
was written. `numbers` count up; number n belongs to namespace n % 3.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers import DiskTier, Record

NUM_BLOCKS, BLOCK_BYTES, BLOCK_TOKENS, SHARDS, SEGMENT_SLOTS, SLOT_BYTES = 12, 1000, 4, 4, 5, 8192
NUM_NAMESPACES = 3
MOST_BLOCKS = 24  # of a store that has grown
READ_PATHS = ("pread", "mapping")


def namespace_of(number: int) -> int:
    """The namespace that a number belongs to."""
    return number % NUM_NAMESPACES


def digest_of(namespace: int) -> bytes:
    """32 bytes that name a namespace. There are more of them than blocks are ever written to."""
    return hashlib.blake2b(b"namespace %d" % namespace, digest_size=32).digest()


@lru_cache(maxsize=1 << 14)
def record_of(number: int) -> Record:
    """A record that no other number has."""
    digest = hashlib.shake_128(b"record %d" % number).digest(64 + 4 * BLOCK_TOKENS)
    tokens = np.frombuffer(digest, np.int32, BLOCK_TOKENS, 64).copy()
    return Record(digest[:32], digest[32:64], digest_of(namespace_of(number)), tokens)


@lru_cache(maxsize=1 << 14)
def bytes_of(number: int) -> NDArray[np.uint8]:
    """uint8 [BLOCK_BYTES]: a content that no other number has."""
    return np.frombuffer(hashlib.shake_128(b"content %d" % number).digest(BLOCK_BYTES), np.uint8)


def open_store(path: Path, *, fingerprint: int = 0, **changes: Any) -> DiskTier:
    """The small store at `path`, made if need be."""
    options: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "block_tokens": BLOCK_TOKENS, "shards": SHARDS,
        "fingerprint": bytes([fingerprint]) * 32, "segment_bytes": SEGMENT_SLOTS * SLOT_BYTES,
    }  # fmt: skip
    return DiskTier(path, **(options | changes))
