"""The storage of a cache under a schedule.

Bytes in memory, a mover without threads, a dict for a disk.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.tier import Tier
from pagedkv.cache.device_kv import DeviceKV
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.tiers import DeviceTier, HostTier, Mover, Name, Record, StoredBlock, Ticket
from pagedkv.tiers.disk.stats import DiskStats

if TYPE_CHECKING:
    from tests.reliability.virtual_cache import Scene

RUBBISH = 0xA5


class SceneStorage:
    """Tiers of one cache, whose moves the scene carries out."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self.runtime = scene, scene.time
        self.tiers: dict[int, Any] = {}
        self.store: DictStore | None = None

    def open(self, spec: KVSpec, blocks: Sequence[int], disk: Disk | None) -> list[int]:
        device = self.tiers[Tier.DEVICE] = DeviceTier(blocks[Tier.DEVICE], spec.block_bytes)
        if blocks[Tier.HOST]:
            self.tiers[Tier.HOST] = HostTier(blocks[Tier.HOST], spec.block_bytes)
        if disk is not None:
            self.store = self.tiers[Tier.DISK] = DictStore(self._scene, blocks[Tier.DISK], spec.block_bytes)
        self.kv, self.device_arena = DeviceKV(spec, device.arena), device.arena
        return list(blocks)

    def start(self, describe: Callable[[NDArray[np.void]], list[Record | Name]] | None) -> None:
        scene = self._scene
        mover = Mover(self.tiers, threads=0, describe=describe, clock=lambda: scene.schedule.now)
        self.carrier = Scribbler(mover, self.tiers)
        scene.begun(mover)

    def used_by(self, stream: Any) -> None:
        pass

    def close(self) -> None:
        self.carrier.close()
        for tier in self.tiers.values():
            tier.close()


class Scribbler:
    """A mover that leaves every move to the scene, with rubbish in its destination until then."""

    is_synchronous = False

    def __init__(self, mover: Mover, tiers: dict[int, Any]) -> None:
        self._mover, self._tiers = mover, tiers
        self.block_bytes = mover.block_bytes
        self.watch, self.stats, self.close = mover.watch, mover.stats, mover.close

    def submit(self, moves: NDArray[np.void], *, here: bool = False, **options: Any) -> Ticket:
        ticket = self._mover.submit(moves, here=False, **options)
        for move in moves:
            tier = self._tiers[int(move["dst_tier"])]
            if hasattr(tier, "arena"):
                tier.arena[int(move["dst_block"])] = RUBBISH
        return ticket


class DictStore:
    """A disk tier in a dict; fails as its scene says."""

    name = "disk"
    secret = bytes(32)
    write_bytes = 1
    state = "ok"

    def __init__(self, scene: Scene, num_blocks: int, block_bytes: int) -> None:
        self._scene = scene
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._slots: dict[int, tuple[Record, NDArray[np.uint8]]] = {}

    def write(
        self, blocks: NDArray[np.int32], records: Sequence[Record], arena: NDArray[np.uint8], rows: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        self.invalidate(blocks)
        if not self._works():
            return np.zeros(len(records), np.bool_)
        for block, record, row in zip(blocks.tolist(), records, rows.tolist(), strict=True):
            self._slots[block] = record, arena[row].copy()
        return np.ones(len(records), np.bool_)

    def read(
        self, blocks: NDArray[np.int32], expected: Sequence[Record], arena: NDArray[np.uint8], rows: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        works, ok = self._works(), np.zeros(len(expected), np.bool_)
        for i, (block, record, row) in enumerate(zip(blocks.tolist(), expected, rows.tolist(), strict=True)):
            found, data = self._slots.get(block, (None, None))
            if works and found == record:
                arena[row], ok[i] = data, True
        return ok

    def _works(self) -> bool:
        if self._scene.next_failure == "store raises":
            raise OSError(errno.EIO, "injected")
        return not self._scene.next_failure

    def invalidate(self, blocks: NDArray[np.int32]) -> None:
        for block in blocks.tolist():
            self._slots.pop(block, None)

    def purge(self, namespace: bytes) -> None:
        self.invalidate(np.array([b for b, (record, _) in self._slots.items() if record.namespace == namespace], int))

    def records(self) -> Iterator[StoredBlock]:
        for block, (record, _) in sorted(self._slots.items()):
            yield StoredBlock(block, record, 1)

    def flush(self) -> bool:
        return True

    def stats(self) -> DiskStats:
        return DiskStats("ok", 0, 0, {}, {}, 0)

    def close(self) -> None:
        self._slots.clear()
