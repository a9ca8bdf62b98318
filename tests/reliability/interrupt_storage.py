"""A storage whose moves are over when `submit` returns.

The caller that needs room then carries moves out itself, so that interrupts arrive in the middle of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.tier import Tier
from pagedkv.cache.device_kv import DeviceKV
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.tiers import DeviceTier, DirectionStats, HostTier


class Copied:
    """The handle of moves that are over."""

    is_settled, seconds = True, 1e-6

    def __init__(self, transfers: NDArray[np.int64]) -> None:
        self._ids, self._count = np.unique(transfers), len(transfers)

    def results(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return self._ids, self.tried()

    def tried(self) -> NDArray[np.bool_]:
        return np.ones(len(self._ids), np.bool_)

    def left(self) -> NDArray[np.bool_]:
        return np.zeros(self._count, np.bool_)

    def when_back(self, tell: Callable[[NDArray[np.intp]], object]) -> None:
        """No call was left."""


class Copier:
    """Copies blocks between arenas in the caller's thread, each after `delay()` seconds."""

    is_synchronous = True

    def __init__(self, arenas: dict[int, NDArray[np.uint8]], block_bytes: int, delay: Callable[[], float]) -> None:
        self._arenas, self.block_bytes, self._delay = arenas, block_bytes, delay
        self._moved: dict[tuple[int, int], DirectionStats] = {}

    def submit(
        self,
        moves: NDArray[np.void],
        *,
        deadline_s: float | None = None,
        on_done: Callable[[Any], object] | None = None,
        here: bool = False,
        before: Callable[[Any], object] | None = None,
    ) -> Copied:
        handle = Copied(moves["transfer"])
        if before is not None:
            before(handle)
        for move in moves:
            if delay := self._delay():
                time.sleep(delay)
            src, dst = int(move["src_tier"]), int(move["dst_tier"])
            self._arenas[dst][move["dst_block"]] = self._arenas[src][move["src_block"]]
            stats = self._moved.setdefault((src, dst), DirectionStats())
            stats.blocks += 1
            stats.bytes += self.block_bytes
        if on_done is not None:
            on_done(handle)
        return handle

    def watch(self, ticket: Any) -> float:
        return 1.0

    def stats(self) -> dict[tuple[int, int], DirectionStats]:
        return dict(self._moved)

    def close(self) -> None:
        """There are no threads to end."""


class CopyingStorage:
    """A device and a host tier in arenas, and a `Copier` between them.

    Parameters
    ----------
    delay : seconds that each copy of a block waits, now.
    """

    store = None

    def __init__(self, delay: Callable[[], float]) -> None:
        self._delay = delay
        self._tiers: list[Any] = []

    def open(self, spec: KVSpec, blocks: Sequence[int], disk: Disk | None) -> list[int]:
        kinds = {Tier.DEVICE: DeviceTier, Tier.HOST: HostTier}
        tiers = {tier: kind(blocks[tier], spec.block_bytes) for tier, kind in kinds.items() if blocks[tier]}
        self._tiers = list(tiers.values())
        arenas = {int(tier): one.arena for tier, one in tiers.items()}
        self.device_arena = arenas[int(Tier.DEVICE)]
        self.kv = DeviceKV(spec, self.device_arena)
        self.carrier = Copier(arenas, spec.block_bytes, self._delay)
        return list(blocks)

    def start(self, describe: Callable[[NDArray[np.void]], Any] | None) -> None:
        """There are no threads to start."""

    def used_by(self, stream: Any) -> None:
        """Nothing is asynchronous."""

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
