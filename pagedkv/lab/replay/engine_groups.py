"""Drives the real core over groups of layers with a trace, without bytes.

As engine_sim.py, a block of the trace is one token of a tree with a block size of 1, moves are answered at once, and
requests take no time. Each owns its path while it is served. Afterwards it can be resumed at its end, where it parted
from an earlier request (from the next hit on), and at regular distances: each of these boundaries is a point, and keeps
its tail. A prompt's last block counts only if it is full.

Memory is counted in bytes: a block of a trace is so long that extents of them would be far larger than a cache's own.
A request whose blocks and last tail alone are more than the device holds is not cached.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pagedkv.core import BlockPool, Boundaries, ExtentPool, Placement, RadixTree, Tier
from pagedkv.errors import InvalidArgument, PagedKVError
from pagedkv.lab.replay.capacity import TIER_NAMES, Capacity
from pagedkv.lab.replay.engine_sim import PROGRESS_EVERY, SEED, Visit, flat_counters
from pagedkv.lab.replay.pages import ModelPages
from pagedkv.lab.replay.progress import Progress
from pagedkv.lab.replay.result import Outcome
from pagedkv.lab.replay.trace import Int32, Trace
from pagedkv.spec.sizes import format_size

MAX_UNITS = 1 << 28  # of a tier's memory


class GroupCache:
    """Tree, placement, points, and pools of every group in each tier.

    Parameters
    ----------
    model : the pages.
    memory : bytes of the device, host and disk tier; 0 where there is none.
    point_every : blocks between regular points; 0: none.
    inclusive : names of tiers that keep their copy on promotion.

    Attributes
    ----------
    moved : int64 [9], bytes by src * 3 + dst.
    squeezed : requests that the device could not hold.
    """

    def __init__(
        self, model: ModelPages, memory: tuple[int, int, int], point_every: int, inclusive: tuple[str, ...] = ()
    ) -> None:
        self._model, self._point_every = model, point_every
        self._page_bytes = np.array([pages.page_bytes for pages in model.groups], np.int64)
        self._device = memory[0]
        spans = [pages.page_bytes // model.unit for pages in model.groups]
        tiers = max(tier for tier, size in enumerate(memory) if size) + 1
        pools = [_pools(size // model.unit, spans, model.unit) if size else None for size in memory[:tiers]]
        by_group = [[None if each is None else each[g] for each in pools] for g in range(len(spans))]
        self.placement = Placement(
            RadixTree(1, tiers, seed=SEED),
            by_group[0],
            groups=[
                (of_tiers, pages.window, pages.chunk)
                for of_tiers, pages in zip(by_group[1:], model.groups[1:], strict=True)
            ],
            inclusive=tuple(name in inclusive for name in TIER_NAMES[:tiers]),
        )
        self._pools = [pool for pool in (of_tiers[0] for of_tiers in by_group) if pool is not None]
        self._boundaries = Boundaries(self.placement)
        self.moved = np.zeros(len(TIER_NAMES) ** 2, np.int64)
        self.squeezed = 0

    def request(self, path: Int32) -> Visit:
        """Serve a request whose prompt has these whole blocks."""
        placement = self.placement
        owner, hit = placement.acquire(path)
        tiers, agreed = placement.tiers_of(owner), self._boundaries.agreed(owner)
        hit = self._bring_up(owner, hit, tiers)
        held, kept = len(path), [hit]
        if not held or self._model.kept_bytes(held, [held]) > self._device:
            self.squeezed += held > 0
            held = hit
        else:
            kept = self._compute(owner, path, hit, agreed)
        self._boundaries.release(owner, kept[::-1])  # the deepest is the coldest of them
        return Visit(None, tiers[:hit], hit, held)

    def _bring_up(self, owner: int, hit: int, tiers: NDArray[np.uint8]) -> int:
        """Promote what lies below the device; the blocks that are on it then."""
        cold = self.placement.cold_pages(owner)
        while cold.any() and not self._make_room(cold):
            self.placement.shorten(owner, int(np.flatnonzero(tiers != Tier.DEVICE)[-1]))
            tiers = tiers[: len(self.placement.blocks_of(owner))]
            cold = self.placement.cold_pages(owner)
        if cold.any():
            self.placement.promote(owner)
            self._answer_moves()
            hit = self.placement.settle(owner)
        return min(hit, len(tiers))

    def _compute(self, owner: int, path: Int32, hit: int, agreed: int) -> list[int]:
        """Put the rest of the path into the tree; the boundaries at which others may go on."""
        boundaries = self._boundaries
        was_point = boundaries.is_point(owner, hit)
        kept = self._kept(len(path), hit, agreed, was_point)
        have = hit + boundaries.retrace(owner, path[hit:])
        missing = np.zeros(len(self._pools), np.int64)
        missing[0] = len(path) - have
        self._make_room(missing)
        done = boundaries.insert(owner, path[have:], self._pools[0].alloc(len(path) - have))
        if done != len(path) - have:
            raise PagedKVError(f"the core took {done} of {len(path) - have} blocks, though no move was under way")
        for at in reversed(kept):
            if at != hit or not was_point:
                self._keep(owner, at)
        return kept

    def _kept(self, end: int, hit: int, agreed: int, was_point: bool) -> list[int]:
        """The boundaries that stay usable, ascending; where not all can, the deepest."""
        wanted = {end}
        if hit < agreed:
            wanted.add(agreed)
        if was_point:
            wanted.add(hit)
        if self._point_every:
            wanted.update(range((hit // self._point_every + 1) * self._point_every, end, self._point_every))
        kept = sorted(wanted)
        while self._model.kept_bytes(end, kept) > self._device:
            del kept[0]
        return kept

    def _keep(self, owner: int, num_blocks: int) -> None:
        lacking = self._boundaries.lacking(owner, num_blocks)
        while self._make_room(lacking):
            before, lacking = lacking, self._boundaries.lacking(owner, num_blocks)
            if np.array_equal(before, lacking):  # else another point went, with pages that it would have shared
                counts = lacking.tolist()[1:]
                pages = [pool.alloc(count) for pool, count in zip(self._pools[1:], counts, strict=True)]
                self._boundaries.keep(owner, num_blocks, pages)
                return

    def _make_room(self, more: NDArray[np.int64]) -> bool:
        """Whether the device has room for so many pages of each group; others are moved away."""
        while not (found := self.placement.reserve_pages(more)) and self._answer_moves():
            pass
        self._answer_moves()  # room that came from dropped blocks may leave moves beside it
        return found

    def _answer_moves(self) -> int:
        moves = self.placement.take_moves()
        if len(moves):
            pair = moves["src_tier"].astype(np.int64) * len(TIER_NAMES) + moves["dst_tier"]
            sizes = self._page_bytes[moves["lane"].astype(np.int64)]
            self.moved += np.bincount(pair, sizes, minlength=len(self.moved)).astype(np.int64)
            transfers = np.unique(moves["transfer"])
            self.placement.complete(transfers, np.ones(len(transfers), np.bool_))
        return len(moves)


def run_groups(
    trace: Trace, model: ModelPages, capacity: Capacity, *, inclusive: tuple[str, ...], progress: Progress
) -> Outcome:
    """Replay the trace from an empty cache by groups of layers."""
    # A tier with room for all pages of the trace never lacks any: more room changes nothing but memory.
    most = trace.num_unique * sum(pages.page_bytes for pages in model.groups)
    device, host, disk = (min(size, most) for size in capacity.memory(model.all_bytes))
    cache = GroupCache(model, (device, host, disk), model.point_every, inclusive)
    hits = np.zeros(trace.num_requests, np.int32)
    tier_hits = np.zeros(len(TIER_NAMES), np.int64)
    whole = (trace.input_tokens // trace.block_size).tolist()
    bookkeeping_ns, clock = 0, time.thread_time_ns
    for i in range(trace.num_requests):
        path = trace.path(i)[: whole[i]]
        start = clock()
        visit = cache.request(path)
        bookkeeping_ns += clock() - start
        hits[i] = visit.hit
        tier_hits += np.bincount(visit.tiers, minlength=len(TIER_NAMES))
        if (i + 1) % PROGRESS_EVERY == 0:
            progress.advance(PROGRESS_EVERY)
    progress.advance(trace.num_requests % PROGRESS_EVERY)
    moved = {
        f"{src}_to_{dst}": int(size)
        for (src, dst), size in zip(product(TIER_NAMES, TIER_NAMES), cache.moved.tolist(), strict=True)
        if size
    }
    return Outcome(
        hits,
        (int(tier_hits[0]), int(tier_hits[1]), int(tier_hits[2])),
        moved_bytes=moved,
        bookkeeping_ns=bookkeeping_ns,
        counters=flat_counters(cache.placement.stats()) | {"squeezed_requests": cache.squeezed},
    )


def _pools(units: int, spans: Sequence[int], unit: int) -> tuple[BlockPool, ...]:
    if units > MAX_UNITS:
        raise InvalidArgument(
            f"{format_size(units * unit)} cannot be counted in units of {format_size(unit)}, the largest that all "
            "pages are multiples of: replay less memory, or a trace with larger blocks"
        )
    return ExtentPool(units, [1] * len(spans), spans).pools
