"""A KVCache without bytes.

Every decision is the real one, every move succeeds at once and takes virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.cache import KVCache
from pagedkv.cache.engine import KV
from pagedkv.errors import PagedKVError
from pagedkv.lab.simulate.hardware import Hardware
from pagedkv.lab.simulate.links import TIERS, TierSize
from pagedkv.lab.simulate.systems import Preemption
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import Blocks
from pagedkv.tiers import DirectionStats, Mover, Ticket

TIER_COUNT = 1 + len(TIERS)  # with the device


class VirtualTicket(Ticket):
    """Settled from the start, with every block arrived.

    `seconds` is what the moves would have taken.
    """

    def __init__(self, transfers: NDArray[np.int64], seconds: float) -> None:
        super().__init__(transfers, 1)
        self._ids = np.unique(transfers)
        self._virtual_s = seconds
        self.part_done(np.arange(len(transfers)), np.ones(len(transfers), np.bool_))

    def results(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return self._ids, np.ones(len(self._ids), np.bool_)

    def tried(self) -> NDArray[np.bool_]:
        return np.ones(len(self._ids), np.bool_)

    @property
    def seconds(self) -> float:
        return self._virtual_s


class VirtualMover(Mover):
    """Moves nothing, and adds up how long that takes, link by link.

    All links work side by side.

    Parameters
    ----------
    block_bytes : of the cache's own blocks, for its counters.
    real_bytes : of the blocks that are simulated.
    links : the tiers under the device by their numbers.
    """

    def __init__(self, block_bytes: int, real_bytes: int, links: Mapping[int, TierSize]) -> None:
        self._block_bytes, self._real_bytes, self._links = block_bytes, real_bytes, dict(links)
        self._up = dict.fromkeys(links, 0.0)
        self._down = dict.fromkeys(links, 0.0)
        self._moved: dict[tuple[int, int], DirectionStats] = {}

    @property
    def block_bytes(self) -> int:
        """Of the cache's own blocks."""
        return self._block_bytes

    def submit(
        self,
        moves: NDArray[np.void],
        *,
        deadline_s: float | None = None,
        on_done: Callable[[Ticket], object] | None = None,
        here: bool = False,
        before: Callable[[Ticket], object] | None = None,
    ) -> Ticket:
        """Every block arrives; no deadline passes, as a virtual promotion begins at once."""
        seconds = 0.0
        links = np.bincount(moves["src_tier"].astype(np.int64) * TIER_COUNT + moves["dst_tier"])
        for link in links.nonzero()[0].tolist():
            (src, dst), count = divmod(link, TIER_COUNT), int(links[link])
            stats = self._moved.setdefault((src, dst), DirectionStats())
            stats.blocks += count
            stats.bytes += count * self._real_bytes
            colder, num_bytes = max(src, dst), count * self._real_bytes
            tier, is_up = self._links[colder], dst < src
            took = tier.up_s(num_bytes) if is_up else tier.down_s(num_bytes)
            seconds = max(seconds, took)
            (self._up if is_up else self._down)[colder] += took
        ticket = VirtualTicket(np.ascontiguousarray(moves["transfer"]), seconds)
        if before is not None:
            before(ticket)
        return ticket

    def take_seconds(self) -> tuple[float, float]:
        """Seconds of promotions and of demotions since the last call, of the busiest link each."""
        if not self._links:
            return 0.0, 0.0
        up, down = max(self._up.values()), max(self._down.values())
        self._up, self._down = dict.fromkeys(self._links, 0.0), dict.fromkeys(self._links, 0.0)
        return up, down

    def stats(self) -> dict[tuple[int, int], DirectionStats]:
        return dict(self._moved)

    def close(self, *, cancel: bool = False) -> None:
        """There are no threads to end."""


class NoKV:
    """The KV of a cache that has none.

    What would copy or write it does nothing, what would read it raises.
    """

    decode = None

    def layer(self, layer: int) -> tuple[Any, Any]:
        raise PagedKVError("a simulated cache holds no KV")

    def bind(self, arrays: Any) -> NoKV:
        return self

    def write(self, layer: int, k: Any, v: Any, stream: Any = None) -> None:
        """Nothing to write to."""

    def attend(self, layer: int, q: Any, **variant: Any) -> Any:
        raise PagedKVError("a simulated cache holds no KV")

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Nothing to copy."""

    def zero_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Nothing to clear."""

    def gather(self, blocks: NDArray[np.int32], num_tokens: int, out: Any) -> tuple[Any, Any]:
        raise PagedKVError("a simulated cache holds no KV")


class Decided:
    """Costs, as far as a scheduler asks for them, that say the same of every suspension."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s

    def load_s(self, num_blocks: int, tier: int) -> float:
        """What was decided: nothing, or longer than anything."""
        return self._load_s

    def compute_s(self, num_tokens: int, context: int = 0) -> float:
        """Longer than nothing."""
        return 1.0


class VirtualCache(KVCache):
    """The conductor over tiers of these sizes, without their bytes.

    Parameters
    ----------
    blocks : of device, host and disk; 0 where there is no such tier.
    block_size : tokens.
    hardware : how fast its links are, and how long its blocks.
    max_sequences : live sequences at most.
    preemption : what :attr:`costs` tell a scheduler that suspends; loads and writes go by what was measured.
    """

    def __init__(
        self,
        blocks: list[int],
        block_size: int,
        hardware: Hardware,
        max_sequences: int = 1024,
        preemption: Preemption = "cost",
    ) -> None:
        self._hardware = hardware
        self._decided = None if preemption == "cost" else Decided(0.0 if preemption == "swap" else math.inf)
        device, host, disk = blocks
        super().__init__(
            KVSpec(1, 1, 1, "float16", block_size),
            Blocks(device),
            Blocks(host) if host else None,
            Disk("virtual", Blocks(disk), unnamed_model=True, admission=hardware.disk_admission) if disk else None,
            max_sequences=max_sequences,
            cost_tokens=hardware.model.shape.balance_tokens,
            scrub="never",
        )

    @property
    def costs(self) -> Any:
        """What was measured, or what was decided."""
        return super().costs if self._decided is None else self._decided

    def _open_bytes(self, *_: Any) -> tuple[KV, Mover]:
        self._tiers = {}
        links = {TIERS.index(tier.name) + 1: tier for tier in self._hardware.tiers}
        real_bytes = self.spec.block_size * self._hardware.model.kv_bytes_per_token
        self.virtual_mover = VirtualMover(self.spec.block_bytes, real_bytes, links)
        return NoKV(), self.virtual_mover
