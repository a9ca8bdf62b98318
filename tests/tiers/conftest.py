"""Small disk tiers, and records and contents that follow from a block's number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.tiers import DiskTier, Record

BLOCK_BYTES, BLOCK_TOKENS, NUM_BLOCKS = 1000, 4, 12
FINGERPRINT = bytes(range(32))


def name_of(number: int, salt: int = 0) -> Record:
    """A record that no other number and salt has."""
    rng = np.random.default_rng([number, salt])
    return Record(rng.bytes(32), rng.bytes(32), rng.bytes(32), rng.integers(0, 99999, BLOCK_TOKENS, np.int32))


def bytes_of(number: int, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """A content that no other number has."""
    return np.random.default_rng(1000 + number).integers(0, 256, block_bytes, np.uint8)


@pytest.fixture(params=["pread", "direct", "mapping"])
def read_path(request: pytest.FixtureRequest) -> str:
    """Every way of reading."""
    return str(request.param)


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens the tier at one directory; closes it at the end."""
    opened: list[DiskTier] = []

    def open_it(**changes: Any) -> DiskTier:
        arguments = {
            "path": tmp_path / "kv", "num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "shards": 4,
            "fingerprint": FINGERPRINT, "block_tokens": BLOCK_TOKENS, "segment_bytes": 5 * 8192,
        }  # fmt: skip
        tier = DiskTier(**(arguments | changes))
        opened.append(tier)
        return tier

    yield open_it
    for tier in opened:
        tier.close()


@pytest.fixture
def arena() -> NDArray[np.uint8]:
    """Row i holds the bytes of number i."""
    return np.stack([bytes_of(number) for number in range(NUM_BLOCKS)])
