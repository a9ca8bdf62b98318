"""Golden stores: small directories as this version writes them.

Every later version has to open them.

    python -m tests.tiers.golden.make NAME...

writes ``NAME.npz`` beside this file, with an array of bytes per file of the directory. A golden store is made once,
before its format version is released, and never again.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers import DiskTier, Record

FOLDER = Path(__file__).parent
FINGERPRINT = bytes(range(32))


def record_of(number: int, block_tokens: int) -> Record:
    """The name of block `number`; every third number shares a namespace."""
    tokens = np.arange(number, number + block_tokens, dtype=np.int32)
    key, parent, extra = (bytes(range(start + number, start + number + 32)) for start in (0, 64, 128))
    return Record(key, parent, namespace_of(number), tokens, extra)


def namespace_of(number: int) -> bytes:
    """The digest of the namespace of block `number`."""
    return bytes(range(100 + number % 3, 132 + number % 3))


def payload_of(number: int, block_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes of block `number`.

    A pattern that packs well and is nowhere the same as another's.
    """
    return np.resize(np.arange(number, number + 11, dtype=np.uint8), block_bytes)


@dataclass(frozen=True)
class Golden:
    """A store.

    Attributes
    ----------
    sizes : arguments of `DiskTier` besides path and fingerprint.
    play : what is done with the open tier; leaves it open if it "crashes".
    blocks : slot to block number: what must be served; all other slots hold nothing.
    was_clean : whether it was closed properly.
    """

    sizes: dict[str, int]
    play: Callable[[Golden, DiskTier], object]
    blocks: dict[int, int]
    was_clean: bool = True

    def open(self, path: Path, **changes: Any) -> DiskTier:
        """The tier at `path`."""
        return DiskTier(path, fingerprint=FINGERPRINT, **(self.sizes | changes))

    def put(self, tier: DiskTier, blocks: dict[int, int]) -> None:
        """Write blocks into slots."""
        records = [self.record(number) for number in blocks.values()]
        arena = np.stack([self.payload(number) for number in blocks.values()])
        assert tier.write(list(blocks), records, arena, np.arange(len(blocks))).all()

    def record(self, number: int) -> Record:
        """Name of a block of this store."""
        return record_of(number, self.sizes["block_tokens"])

    def payload(self, number: int) -> NDArray[np.uint8]:
        """Bytes of a block of this store."""
        return payload_of(number, self.sizes["block_bytes"])


def _plain(golden: Golden, tier: DiskTier) -> None:
    golden.put(tier, golden.blocks)
    tier.close()


def _crashed(golden: Golden, tier: DiskTier) -> None:
    golden.put(tier, {slot: 20 + slot for slot in range(6)})
    golden.put(tier, {0: 0, 2: 2})
    tier.invalidate([5])


def _purged(golden: Golden, tier: DiskTier) -> None:
    golden.put(tier, {slot: slot for slot in range(6)})
    tier.purge(namespace_of(1))  # blocks 1 and 4
    golden.put(tier, {4: 7})  # of the same namespace, and later


SMALL = {"num_blocks": 6, "block_bytes": 1000, "block_tokens": 4, "shards": 2, "segment_bytes": 4 * 8192}
LONG = {"num_blocks": 3, "block_bytes": 20_000, "block_tokens": 1200, "shards": 5, "segment_bytes": 1 << 20}
GOLDEN = {
    "v1_plain": Golden(SMALL, _plain, {slot: slot for slot in range(6)}),
    "v1_long_headers": Golden(LONG, _plain, {0: 3, 2: 5}),
    "v1_crashed": Golden(SMALL, _crashed, {0: 0, 1: 21, 2: 2, 3: 23, 4: 24}, was_clean=False),
    "v1_purged": Golden(SMALL, _purged, {0: 0, 2: 2, 3: 3, 4: 7, 5: 5}, was_clean=False),
}


def make(name: str) -> None:
    """Make one store and pack it."""
    golden = GOLDEN[name]
    with tempfile.TemporaryDirectory() as folder:
        tier = golden.open(Path(folder, "kv"))
        golden.play(golden, tier)
        files = {file.name: file.read_bytes() for file in sorted(Path(folder, "kv").iterdir()) if file.name != "LOCK"}
        tier.close()
    arrays: dict[str, Any] = {name: np.frombuffer(content, np.uint8) for name, content in files.items()}
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)


def unpack(name: str, path: Path) -> None:
    """Put a golden store into a new directory.

    Version control does not keep modes, so they are set here.
    """
    path.mkdir(mode=0o700)
    with np.load(FOLDER / f"{name}.npz") as arrays:
        for file, content in arrays.items():
            (path / file).touch(mode=0o600)
            (path / file).write_bytes(content.tobytes())


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        make(wanted)
