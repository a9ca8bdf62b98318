"""Drives the real prefix tree, placement and pools with a trace.

It decides everything and moves no bytes.

A trace's block id stands for a whole prefix, so it is fed as one token with a block size of 1. One request::

    acquire -> (hits by tier) -> reserve -> promote -> settle -> reserve -> alloc -> insert -> release

Moves are answered at once with success. A request longer than the device keeps its first ``device`` blocks:
what runs must lie on the device as a whole. Requests that take no time run one at a time, so one always fits.

Where requests take time (``generating``), each owns its blocks on the device until it is over, and what is owned is
never evicted. One that finds no room beside the others keeps the leading blocks that fit after everything that has no
owner is gone; the rest is not cached, nothing else is evicted for it, and it is counted as squeezed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.core import BlockPool, Placement, RadixTree, Tier, policy_needs_chain
from pagedkv.lab.replay.capacity import TIER_NAMES, Capacity
from pagedkv.lab.replay.progress import Progress
from pagedkv.lab.replay.result import Outcome
from pagedkv.lab.replay.schedule import TOKEN_MS, arrivals_and_ends
from pagedkv.lab.replay.trace import Int32, Int64, Trace

PROGRESS_EVERY = 64  # requests
NO_TIERS = np.empty(0, np.uint8)
SEED = 0  # of the tree's own hashing: a replay is the same every time


@dataclass(slots=True)
class Visit:
    """A request in the cache.

    Attributes
    ----------
    owner : its handle; None once its blocks are released.
    reported : the handle under which the policy hazard is told its output; -1: it is not.
    tiers : uint8 [hit], the tier in which each of its leading cached blocks lay.
    hit : how many these are.
    held : leading blocks that it owns on the device, hit and inserted.
    """

    owner: int | None
    tiers: NDArray[np.uint8]
    hit: int
    held: int
    reported: int = -1


class SimCache:
    """Tree, placement and one pool per tier, with the moves between them answered at once.

    Parameters
    ----------
    blocks : blocks of the device, host and disk tier; 0 where there is none.
    policy, demotion : as in ``Placement``.
    inclusive : names of tiers that keep their copy on promotion.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int],
        policy: str,
        *,
        demotion: str = "leaf_first",
        inclusive: tuple[str, ...] = (),
    ) -> None:
        tiers = max(tier for tier, n in enumerate(blocks) if n) + 1
        self.device = BlockPool(blocks[0])
        self.placement = Placement(
            RadixTree(1, tiers, keep_chain=policy_needs_chain(policy), seed=SEED),
            [self.device, *(BlockPool(n) if n else None for n in blocks[1:tiers])],
            policy=policy,
            demotion=demotion,
            inclusive=tuple(name in inclusive for name in TIER_NAMES[:tiers]),
        )
        self.moved = np.zeros(len(TIER_NAMES) ** 2, np.int64)  # blocks, by src * 3 + dst
        self.squeezed = 0  # requests that the placement could not make room for; they keep what fits
        self._capacity = blocks[0]
        self._hazard = self.placement.hazard

    def request(self, path: Int32) -> tuple[int, Int64]:
        """Serve a request that takes no time: its hit blocks, in all and in each tier (int64 [3])."""
        visit = self.open(path)
        self.close(visit)
        return visit.hit, _by_tier([visit.tiers])

    def open(self, path: Int32, session: int = -1) -> Visit:
        """A request arrives: it owns its cached prefix on the device.

        It inserts the rest as far as there is room.
        """
        placement = self.placement
        path = path[: self._capacity]
        owner, hit = placement.acquire(path)
        if self._hazard is not None and session >= 0:
            self._hazard.hint(owner, session=session)
        if self._hazard is not None:
            self._hazard.begin(owner)
        tiers = placement.tiers_of(owner)
        cold = hit - int(np.count_nonzero(tiers == Tier.DEVICE))
        squeezed = False
        if cold:
            room = self._make_room(cold)
            squeezed = room < cold
            if squeezed:
                placement.shorten(owner, int(np.searchsorted(np.cumsum(tiers != Tier.DEVICE), room, "right")))
            placement.promote(owner)
            self._answer_moves()
            hit = placement.settle(owner)
        missing = self._make_room(len(path) - hit)
        if missing:
            placement.insert(owner, path[hit : hit + missing], self.device.alloc(missing))
        self.squeezed += squeezed or hit + missing < len(path)
        return Visit(owner, tiers[:hit], hit, hit + missing)

    def tick(self, now_ms: float) -> None:
        """The trace's clock, for the policy hazard."""
        if self._hazard is not None:
            self._hazard.tick(max(0, int(now_ms * 1e6)))

    def bound(self, stake: float) -> None:
        """How far the policy hazard may fall below LRU, as in ``HazardPolicy.set_bound``.

        inf: no bound.
        """
        if self._hazard is None:
            return
        if stake == math.inf:
            self._hazard.set_bound(stake=stake, slack=math.inf)
        else:
            self._hazard.set_bound(stake=stake)

    def study(self) -> None:
        """Learn from a few of the noted samples, as a server would between two requests."""
        if self._hazard is not None:
            self._hazard.study()

    def close(self, visit: Visit) -> None:
        """Its blocks can be evicted from now on."""
        if visit.owner is None:
            return
        if self._hazard is not None:
            visit.reported = self._hazard.depart(visit.owner, later=True)
        self.placement.release(visit.owner)
        visit.owner = None
        self.study()

    def finished(self, visit: Visit, output_tokens: int) -> None:
        """The request is over, and the length of its output is known now.

        Release the blocks that it still owns.
        """
        self.close(visit)
        if self._hazard is not None and visit.reported >= 0:
            self._hazard.report(visit.reported, output_tokens)
            visit.reported = -1

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
    generating: float | None,
    hazard_stake: float | None,
    progress: Progress,
) -> Outcome:
    """Replay the trace from an empty cache.

    ``block_bytes`` only turns moved blocks into bytes; ``generating`` is the time of an output token in milliseconds,
    None: a request releases its blocks as soon as it has come; ``hazard_stake`` is for the policy ``hazard``, None for
    the policy's default.
    """
    # A tier with room for every block of the trace never lacks any: more room changes nothing but memory.
    device, host, disk = (min(blocks, trace.num_unique) for blocks in capacity.blocks)
    cache = SimCache(
        (device, host, disk),
        policy,
        demotion=demotion,
        inclusive=inclusive,
    )
    if hazard_stake is not None:
        cache.bound(hazard_stake)
    hits, tier_hits, bookkeeping_ns = serve(trace, cache, generating, progress)
    return Outcome(
        hits,
        (int(tier_hits[0]), int(tier_hits[1]), int(tier_hits[2])),
        moved_bytes=moved_bytes(cache.moved, block_bytes),
        bookkeeping_ns=bookkeeping_ns,
        counters=all_counters(cache.placement) | {"squeezed_requests": cache.squeezed},
    )


def serve(trace: Trace, cache: SimCache, generating: float | None, progress: Progress) -> tuple[Int32, Int64, int]:
    """Serve all requests in order.

    Returns hits of each, hits by tier, and nanoseconds of CPU time in the cache's calls.

    In both modes the cache is told at its time that a request is over: with ``generating`` it has owned its blocks
    until then; without, it has released them at once, and a token takes ``TOKEN_MS``.
    """
    hits = np.zeros(trace.num_requests, np.int32)
    tier_hits = np.zeros(len(TIER_NAMES), np.int64)
    bookkeeping_ns = 0
    clock, path, outputs = time.thread_time_ns, trace.path, trace.output_tokens.tolist()
    sessions = trace.sessions.tolist()
    running: dict[int, Visit] = {}
    over: list[tuple[float, Visit, int]] = []
    arrivals = np.maximum.accumulate(trace.t_ms).tolist()
    token_ms = TOKEN_MS if generating is None else generating
    tiers: list[NDArray[np.uint8]] = []  # of the hits since the last progress
    for event in arrivals_and_ends(trace, token_ms).tolist():
        if event < 0:
            over.append((arrivals[~event] + token_ms * outputs[~event], running.pop(~event), outputs[~event]))
            continue
        asked = path(event)
        start = clock()
        for end, visit, output_tokens in over:
            cache.tick(end)
            cache.finished(visit, output_tokens)
        cache.tick(arrivals[event])
        visit = cache.open(asked, sessions[event])
        if generating is None:
            cache.close(visit)
        bookkeeping_ns += clock() - start
        over.clear()
        running[event] = visit
        hits[event] = visit.hit
        tiers.append(visit.tiers)
        if len(tiers) == PROGRESS_EVERY:
            tier_hits += _by_tier(tiers)
            tiers.clear()
            progress.advance(PROGRESS_EVERY)
    progress.advance(len(tiers))
    return hits, tier_hits + _by_tier(tiers), bookkeeping_ns


def _by_tier(tiers: list[NDArray[np.uint8]]) -> Int64:
    """How many of the blocks lay in each tier: int64 [3]."""
    return np.bincount(np.concatenate([*tiers, NO_TIERS]), minlength=len(TIER_NAMES))


def moved_bytes(moved: Int64, block_bytes: int) -> dict[str, int]:
    """Blocks by ``src * 3 + dst`` to bytes by ``"host_to_device"`` and so on."""
    return {
        f"{TIER_NAMES[i // len(TIER_NAMES)]}_to_{TIER_NAMES[i % len(TIER_NAMES)]}": int(n) * block_bytes
        for i, n in enumerate(moved)
        if n
    }


def all_counters(placement: Placement) -> dict[str, int]:
    """Those of the placement, and those of the policy hazard if it is that one."""
    learned = {} if placement.hazard is None else {"hazard": placement.hazard.stats()}
    return flat_counters(placement.stats() | learned)


def flat_counters(stats: dict[str, object]) -> dict[str, int]:
    """Whole numbers of a stats dict, nested names joined by dots, for the report."""
    flat: dict[str, int] = {}
    for name, value in stats.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{inner}": n for inner, n in flat_counters(value).items()})
        elif isinstance(value, int) and not isinstance(value, bool):
            flat[name] = value
    return flat
