"""Drives the real prefix tree, placement and pools with a trace; decides everything, moves no bytes.

A trace's block id stands for a whole prefix, so it is fed as one token with a block size of 1. One request::

    acquire -> (hits by tier) -> reserve -> promote -> settle -> reserve -> alloc -> insert -> release

Moves are answered at once with success. A request longer than the device keeps its first ``device`` blocks:
what runs must lie on the device as a whole, and requests run one at a time, so a request always fits.
"""

from __future__ import annotations

import time

import numpy as np

from pagedkv.core import DEVICE, BlockPool, Placement, RadixTree
from pagedkv.replay.capacity import TIER_NAMES, Capacity
from pagedkv.replay.progress import Progress
from pagedkv.replay.result import Outcome
from pagedkv.replay.trace import Int32, Int64, Trace

PROGRESS_EVERY = 64  # requests
NEEDS_CHAIN = ("arc", "s3fifo")  # they know evicted blocks again by the hash of their prefix
SEED = 0  # of the tree's own hashing: a replay is the same every time


class SimCache:
    """Tree, placement and one pool per tier, with the moves between them answered at once.

    Parameters
    ----------
    blocks : blocks of the device, host and disk tier; 0 where there is none.
    policy, demotion : as in ``Placement``.
    inclusive : names of tiers that keep their copy on promotion.
    cost_blocks : for the policy ``cost``: blocks of context at which attention costs as much as all else.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int],
        policy: str,
        *,
        demotion: str = "leaf_first",
        inclusive: tuple[str, ...] = (),
        cost_blocks: float = 52.0,
    ) -> None:
        tiers = max(tier for tier, n in enumerate(blocks) if n) + 1
        self.device = BlockPool(blocks[0])
        self.placement = Placement(
            RadixTree(1, tiers, keep_chain=policy in NEEDS_CHAIN, seed=SEED),
            [self.device, *(BlockPool(n) if n else None for n in blocks[1:tiers])],
            policy=policy,
            demotion=demotion,
            inclusive=tuple(name in inclusive for name in TIER_NAMES[:tiers]),
            cost_tokens=cost_blocks,
        )
        self.moved = np.zeros(len(TIER_NAMES) ** 2, np.int64)  # blocks, by src * 3 + dst
        self.squeezed = 0  # requests that the placement could not make room for; they keep what fits
        self._capacity = blocks[0]

    def request(self, path: Int32) -> tuple[int, Int64]:
        """Serve one request: its hit blocks, and how many of them lay in each tier (int64 [3])."""
        placement = self.placement
        path = path[: self._capacity]
        owner, hit = placement.acquire(path)
        tiers = placement.tiers_of(owner)
        cold = hit - int(np.count_nonzero(tiers == DEVICE))
        squeezed = False
        if cold:
            squeezed = self._make_room(cold) < cold
            if not squeezed:
                placement.promote(owner)
                self._answer_moves()
            hit = placement.settle(owner)
        missing = self._make_room(len(path) - hit)
        if missing:
            placement.insert(owner, path[hit : hit + missing], self.device.alloc(missing))
        self.squeezed += squeezed or hit + missing < len(path)
        placement.release(owner)
        return hit, np.bincount(tiers[:hit], minlength=len(TIER_NAMES))

    def _make_room(self, num_blocks: int) -> int:
        """How many of ``num_blocks`` are free on the device, after all that can be moved away was."""
        short = self.placement.reserve(num_blocks)
        while short and self._answer_moves():
            short = self.placement.reserve(num_blocks)
        return num_blocks - short

    def _answer_moves(self) -> int:
        moves = self.placement.take_moves()
        if len(moves):
            pair = moves["src_tier"].astype(np.int64) * len(TIER_NAMES) + moves["dst_tier"]
            self.moved += np.bincount(pair, minlength=len(self.moved))
            transfers = np.unique(moves["transfer"])
            self.placement.complete(transfers, np.ones(len(transfers), np.bool_))
        return len(moves)


def run_sim(
    trace: Trace,
    policy: str,
    capacity: Capacity,
    *,
    demotion: str,
    inclusive: tuple[str, ...],
    block_bytes: int,
    cost_blocks: float,
    progress: Progress,
) -> Outcome:
    """Replay the trace from an empty cache.

    ``block_bytes`` only turns moved blocks into bytes; ``cost_blocks`` is for the policy ``cost``.
    """
    # A tier with room for every block of the trace never lacks any: more room changes nothing but memory.
    device, host, disk = (min(blocks, trace.num_unique) for blocks in capacity.blocks)
    cache = SimCache(
        (device, host, disk),
        policy,
        demotion=demotion,
        inclusive=inclusive,
        cost_blocks=cost_blocks,
    )
    hits = np.zeros(trace.num_requests, np.int32)
    tier_hits = np.zeros(len(TIER_NAMES), np.int64)
    bookkeeping_ns = 0
    clock, request, path = time.thread_time_ns, cache.request, trace.path
    for i in range(trace.num_requests):
        asked = path(i)
        start = clock()
        hits[i], by_tier = request(asked)
        bookkeeping_ns += clock() - start
        tier_hits += by_tier
        if i % PROGRESS_EVERY == PROGRESS_EVERY - 1:
            progress.advance(PROGRESS_EVERY)
    progress.advance(trace.num_requests % PROGRESS_EVERY)
    return Outcome(
        hits,
        (int(tier_hits[0]), int(tier_hits[1]), int(tier_hits[2])),
        moved_bytes=moved_bytes(cache.moved, block_bytes),
        bookkeeping_ns=bookkeeping_ns,
        counters=flat_counters(cache.placement.stats()) | {"squeezed_requests": cache.squeezed},
    )


def moved_bytes(moved: Int64, block_bytes: int) -> dict[str, int]:
    """Blocks by ``src * 3 + dst`` to bytes by ``"host_to_device"`` and so on."""
    return {
        f"{TIER_NAMES[i // len(TIER_NAMES)]}_to_{TIER_NAMES[i % len(TIER_NAMES)]}": int(n) * block_bytes
        for i, n in enumerate(moved)
        if n
    }


def flat_counters(stats: dict[str, object]) -> dict[str, int]:
    """Whole numbers of a stats dict, nested names joined by dots, for the report."""
    flat: dict[str, int] = {}
    for name, value in stats.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{inner}": n for inner, n in flat_counters(value).items()})
        elif isinstance(value, int) and not isinstance(value, bool):
            flat[name] = value
    return flat
