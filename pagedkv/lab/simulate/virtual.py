"""The storage of a cache without bytes.

Every decision is the cache's own; every move succeeds, and takes virtual time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.dispatch import Dispatch
from pagedkv._core.tier import Tier
from pagedkv.cache.cache import KVCache
from pagedkv.cache.runtime import SystemRuntime
from pagedkv.errors import PagedKVError
from pagedkv.lab.simulate.hardware import Hardware
from pagedkv.lab.simulate.links import TIERS, TierSize
from pagedkv.spec.budgets import Disk
from pagedkv.spec.groups import GroupLayout
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import Blocks, Bytes
from pagedkv.tiers import DirectionStats, Name, Record

TIER_COUNT = 1 + len(TIERS)  # with the device


class VirtualMoves:
    """The handle of moves that are over when their time has come: every block arrives.

    `seconds` is what they take once their links are free.
    """

    def __init__(self, carrier: VirtualCarrier, transfers: NDArray[np.int64], seconds: float, end: float) -> None:
        self._carrier, self.end = carrier, end
        self._count, self._ids, self.seconds = len(transfers), np.unique(transfers), seconds

    @property
    def is_settled(self) -> bool:
        """Whether its time has come."""
        return self._carrier.now >= self.end

    def results(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Every transfer arrived."""
        return self._ids, np.ones(len(self._ids), np.bool_)

    def tried(self) -> NDArray[np.bool_]:
        """Every one of them."""
        return np.ones(len(self._ids), np.bool_)

    def left(self) -> NDArray[np.bool_]:
        """No call hangs."""
        return np.zeros(self._count, np.bool_)

    def when_back(self, tell: Callable[[NDArray[np.intp]], object]) -> None:
        """Nothing was left."""


class VirtualCarrier:
    """Moves nothing, and says when each move is over, link by link.

    All links work side by side. On each, promotions come one after the other, in the order they were submitted;
    demotions run beside them and beside steps, and are only added up.

    Attributes
    ----------
    now : virtual seconds; a caller that waits for moves moves it on.

    Parameters
    ----------
    block_bytes : of the cache's own blocks, for its counters.
    real_bytes : of the blocks that are simulated; over groups of layers, of the pages of each.
    links : the tiers under the device by their numbers.
    """

    is_synchronous = True

    def __init__(self, block_bytes: int, real_bytes: Sequence[int], links: Mapping[int, TierSize]) -> None:
        self.block_bytes = block_bytes
        self._real_bytes, self._links = np.array(real_bytes, np.int64), dict(links)
        self.now = 0.0
        self._free_at = dict.fromkeys(links, 0.0)  # each link, of promotions
        self._ends: list[float] = []  # of promotions that are under way, a heap
        self._down = dict.fromkeys(links, 0.0)
        self._moved: dict[tuple[int, int], DirectionStats] = {}

    def submit(
        self,
        moves: NDArray[np.void],
        *,
        deadline_s: float | None = None,
        on_done: Callable[[Any], object] | None = None,
        here: bool = False,
        before: Callable[[Any], object] | None = None,
    ) -> VirtualMoves:
        """Every block arrives; its load gives it up where it is late."""
        seconds, end = 0.0, self.now
        way, lanes = moves["src_tier"].astype(np.int64) * TIER_COUNT + moves["dst_tier"], len(self._real_bytes)
        pages = np.bincount(way * lanes + moves["lane"], minlength=TIER_COUNT**2 * lanes).reshape(-1, lanes)
        for link in np.flatnonzero(pages.sum(axis=1)).tolist():
            src, dst = divmod(link, TIER_COUNT)
            stats = self._moved.setdefault((src, dst), DirectionStats())
            colder, num_bytes = max(src, dst), int(pages[link] @ self._real_bytes)
            stats.blocks += int(pages[link].sum())
            stats.bytes += num_bytes
            tier, is_up = self._links[colder], dst < src
            took = tier.up_s(num_bytes) if is_up else tier.down_s(num_bytes)
            seconds = max(seconds, took)
            if is_up:
                self._free_at[colder] = max(self.now, self._free_at[colder]) + took
                end = max(end, self._free_at[colder])
            else:
                self._down[colder] += took
        if end > self.now:
            heapq.heappush(self._ends, end)
        handle = VirtualMoves(self, np.ascontiguousarray(moves["transfer"]), seconds, end)
        if before is not None:
            before(handle)
        if on_done is not None:
            on_done(handle)
        return handle

    def watch(self, ticket: Any) -> float:
        """There is nothing to give up."""
        return float("inf")

    def next_end(self) -> float:
        """When the next promotion is over; infinity where none is under way."""
        while self._ends and self._ends[0] <= self.now:
            heapq.heappop(self._ends)
        return self._ends[0] if self._ends else math.inf

    def take_down_s(self) -> float:
        """Seconds of demotions since the last call, of the busiest link."""
        down = max(self._down.values(), default=0.0)
        self._down = dict.fromkeys(self._links, 0.0)
        return down

    def stats(self) -> dict[tuple[int, int], DirectionStats]:
        """Counters by (source tier, destination tier)."""
        return dict(self._moved)

    def close(self) -> None:
        """There are no threads to end."""


class VirtualGroupCarrier(VirtualCarrier):
    """The same of pages of groups of layers.

    Attributes
    ----------
    lane_bytes, write_bytes : of a page, by its group.

    Parameters
    ----------
    layout : of the groups, also an attribute.
    links : the tiers under the device by their numbers.
    """

    def __init__(self, layout: GroupLayout, links: Mapping[int, TierSize]) -> None:
        pages = [group.page_bytes for group in layout.groups]
        super().__init__(pages[0], pages, links)
        self.layout = layout
        self.lane_bytes = self.write_bytes = np.array(pages, np.int64)

    def held_bytes(self, cache: KVCache) -> int:
        """Bytes of the device's pages that live sequences hold, of all groups."""
        pool = cache.placement.pools[Tier.DEVICE]
        assert pool is not None
        assert pool.extents is not None
        return int(self.lane_bytes @ [each.counts()["live"] for each in pool.extents.pools])


class VirtualTime(SystemRuntime):
    """The time of a carrier's moves; threads are the system's."""

    def __init__(self, carrier: VirtualCarrier) -> None:
        self._carrier = carrier

    def seconds(self) -> float:
        """The virtual time."""
        return self._carrier.now

    def pause(self, dispatch: Dispatch, seen: int, others: bool) -> None:
        """The next promotion is over."""
        self._carrier.now = max(self._carrier.now, self._carrier.next_end())


class NoKV:
    """The KV of a cache that has none.

    Methods that would copy or write it do nothing; those that would read it raise.
    """

    decode = None
    is_synchronous = False  # a simulated step's time is the hardware's, not what it took here

    def layer(self, layer: int) -> tuple[Any, Any]:
        raise PagedKVError("a simulated cache holds no KV")

    def layer_scales(self, layer: int) -> tuple[Any, Any] | None:
        raise PagedKVError("a simulated cache holds no KV")

    def bind(self, arrays: Any, part: int = 0) -> NoKV:
        return self

    def write(self, layer: int, k: Any, v: Any, stream: Any = None) -> None:
        """Nothing to write to."""

    def attend(self, layer: int, q: Any, **variant: Any) -> Any:
        raise PagedKVError("a simulated cache holds no KV")

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Nothing to copy."""

    def zero_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Nothing to clear."""

    def copy_pages(self, group: int, pairs: NDArray[np.int32]) -> None:
        """Nothing to copy."""

    def zero_pages(self, group: int, pages: NDArray[np.int32]) -> None:
        """Nothing to clear."""

    def gather(
        self, blocks: NDArray[np.int32], start: int, stop: int, out: Any, layout: str
    ) -> tuple[Any, Any]:
        raise PagedKVError("a simulated cache holds no KV")


class VirtualStorage:
    """Tiers without bytes.

    Parameters
    ----------
    hardware : how fast its links are, and how long its blocks.
    """

    store = None

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._layout: GroupLayout | None = None
        self.kv = NoKV()

    def lay_out(self, layout: GroupLayout) -> None:
        """The tiers hold groups of layers."""
        self._layout = layout

    def open(self, spec: KVSpec, blocks: Sequence[int], disk: Disk | None) -> list[int]:
        """Every tier is there."""
        links = {TIERS.index(tier.name) + 1: tier for tier in self._hardware.tiers}
        if self._layout is None:
            real_bytes = spec.block_size * self._hardware.model.kv_bytes_per_token
            self.carrier = VirtualCarrier(spec.block_bytes, [real_bytes], links)
        else:
            self.carrier = VirtualGroupCarrier(self._layout, links)
        self.runtime = VirtualTime(self.carrier)
        return list(blocks)

    def start(self, describe: Callable[[NDArray[np.void]], list[Record | Name]] | None) -> None:
        """There are no threads to start."""

    @property
    def device_arena(self) -> Any:
        """There is none."""
        raise PagedKVError("a simulated cache holds no KV")

    def used_by(self, stream: Any) -> None:
        """Nothing is asynchronous."""

    def close(self) -> None:
        """There is nothing to give back."""


def virtual_cache(
    blocks: Sequence[int], block_size: int, hardware: Hardware, max_sequences: int = 1024, *, by_group: bool = False
) -> tuple[KVCache, VirtualCarrier]:
    """A cache over tiers of these sizes, and what counts how long its moves take.

    Parameters
    ----------
    blocks : of device, host and disk; 0 where there is no such tier.
    block_size : tokens.
    hardware : how fast its links are, and how long its blocks.
    max_sequences : live sequences at most.
    by_group : keep each layer's reach alone, with pages as long as the model's. Else all layers keep all tokens, and
        for the cache's own books a block is as short as it can be.

    Raises
    ------
    InvalidArgument, UnsupportedVariant
        `by_group`, and the model has no such layers, or a tier is too small.
    """
    device, host, disk = blocks
    storage = VirtualStorage(hardware)
    tier, budget = None, None
    spec = hardware.model.spec(block_size) if by_group else KVSpec(1, 1, 1, "float16", block_size)
    if disk:
        if (real := hardware.disk_write_budget) is not None:  # as many blocks a day, of the cache's own
            real_bytes = block_size * hardware.model.kv_bytes_per_token
            budget = Bytes(max(1, real * spec.block_bytes // real_bytes))
        admission, write = hardware.disk_admission, hardware.disk_write
        tier = Disk(
            "virtual", Blocks(disk), unnamed_model=True, admission=admission, write=write, write_budget=budget
        )  # fmt: skip
    cache = KVCache(
        spec,
        Blocks(device),
        Blocks(host) if host else None,
        tier,
        max_sequences=max_sequences,
        cost_tokens=hardware.model.balance_tokens,
        scrub="never",
        storage=storage,
        by_group=by_group,
    )
    return cache, storage.carrier
