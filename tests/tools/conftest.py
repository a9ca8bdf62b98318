"""Small stores with whole chains in them, and what a command prints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import Namespace
from pagedkv._core.chain_key import ROOT_PARENT, chain_keys
from pagedkv.cli import main
from pagedkv.tiers import DiskTier, Record

NUM_BLOCKS, BLOCK_BYTES, BLOCK_TOKENS, SHARDS = 24, 5000, 4, 5
SLOT_BYTES = 4096 + 8192
PER_FILE = 10  # slots
FINGERPRINT = bytes(range(32))
TENANTS = ("a", "b")


def open_tier(path: Path, **changes: Any) -> DiskTier:
    arguments = {
        "num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "fingerprint": FINGERPRINT, "block_tokens": BLOCK_TOKENS,
        "shards": SHARDS, "segment_bytes": PER_FILE * SLOT_BYTES,
    }  # fmt: skip
    return DiskTier(path, **(arguments | changes))


def chain(secret: bytes, tenant: str, length: int, first_token: int = 0) -> list[Record]:
    """A prefix of `length` blocks."""
    digest = Namespace(tenant=tenant).digest()
    tokens = np.arange(first_token, first_token + length * BLOCK_TOKENS, dtype=np.int32)
    keys = chain_keys(secret, digest, ROOT_PARENT, tokens, BLOCK_TOKENS)
    parents = [ROOT_PARENT, *keys]
    return [
        Record(key, parent, digest, tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS].copy())
        for i, (key, parent) in enumerate(zip(keys, parents))
    ]


def write(tier: DiskTier, first: int, records: list[Record]) -> None:
    """Store records in the slots from `first` on, with bytes that follow from the slot."""
    count = len(records)
    slots = np.arange(first, first + count, dtype=np.int32)
    arena = np.stack([np.random.default_rng(slot).integers(0, 256, tier.block_bytes, np.uint8) for slot in slots])
    assert tier.write(slots, records, arena, np.arange(count, dtype=np.int32)).all()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two chains: of tenant a in slots 0..7, of b in 8..13.

    Slot 14 is a tombstone, the rest was never used.
    """
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 0, chain(tier.secret, "a", 8))
        write(tier, 8, chain(tier.secret, "b", 6))
        write(tier, 14, chain(tier.secret, "a", 1, first_token=1000))
        tier.invalidate([14])
    return path


def place(slot: int) -> tuple[str, int]:
    """The file a slot lies in, and where."""
    return f"data.{slot // PER_FILE:04d}", slot % PER_FILE * SLOT_BYTES


def damage(store: Path, slot: int, at: int, data: bytes | None = None) -> None:
    """Overwrite bytes of a slot (header at 0, payload at 4096); by default flip one bit."""
    name, offset = place(slot)
    with open(store / name, "r+b") as file:
        file.seek(offset + at)
        data = bytes([file.read(1)[0] ^ 1]) if data is None else data
        file.seek(offset + at)
        file.write(data)


def slot_bytes(store: Path, slot: int) -> bytes:
    name, offset = place(slot)
    with open(store / name, "rb") as file:
        file.seek(offset)
        return file.read(SLOT_BYTES)


def snapshot(store: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a directory that a tool could have changed."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (store, *sorted(store.rglob("*"))):
        info = os.lstat(path)
        content = path.read_bytes() if path.is_file() and not path.is_symlink() and info.st_mode & 0o400 else b""
        found[str(path.relative_to(store))] = (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, content)
    return found


@dataclass
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs the command line."""

    def run_it(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run_it


Run = Callable[..., Ran]


def is_refused(ran: Ran, *words: str) -> None:
    """Bad input: one line that has these words, nothing printed, exit code 2."""
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("pagedkv: error: ")
    assert ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err
