"""Results of replaying one policy at one capacity: counts (Outcome) and rates (Result)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pagedkv.lab.replay.capacity import TIER_NAMES, Capacity
from pagedkv.lab.replay.trace import Int32, Int64

Json = dict[str, object]
MOVES = tuple(f"{src}_to_{dst}" for src in TIER_NAMES for dst in TIER_NAMES if src != dst)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """An engine's counts.

    Attributes
    ----------
    hits : int32 [num_requests], leading cached blocks of each request, in whatever tier.
    tier_hits : blocks hit in (device, host, disk); their sum is ``hits.sum()``.
    moved_bytes : bytes moved, by ``"host_to_device"`` and so on; what is absent is 0.
    bookkeeping_ns : CPU time of this thread inside the cache's calls, nanoseconds; None for a bound.
    wrong_bytes : bytes served that differ from the stored ones.
    verified_bytes : bytes served and compared.
    counters : whatever else the engine counts, by name.
    """

    hits: Int32
    tier_hits: tuple[int, int, int]
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    bookkeeping_ns: int | None = None
    wrong_bytes: int = 0
    verified_bytes: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """One line of the report.

    Attributes
    ----------
    policy, engine : as asked; a bound's engine is ``"bound"``.
    capacity : blocks per tier.
    block_accesses : blocks asked for by all requests.
    hit_blocks : by tier name, and ``total``.
    token_hit_rate, flop_weighted_hit_rate : 0..1, of all input tokens and of their prefill work.
    lru_hit_blocks, min_hit_blocks : of LRU and of MIN at one tier of the summed capacity.
    gap_to_min_closed : (hits - LRU hits) / (MIN hits - LRU hits), both at one tier of the summed capacity;
        None where MIN hits no more than LRU.
    bytes : moved between tiers, by ``"host_to_device"`` and so on.
    bookkeeping_us_per_request : CPU time inside the cache's calls; None for a bound.
    wrong_bytes, verified_bytes : of the bytes served from any tier (real engine).
    wall_s : time the replay took.
    parameters : everything else that shaped the run.
    counters : what else the engine counted.
    hits_per_request : int64 [num_requests], not part of the JSON.
    """

    policy: str
    engine: str
    capacity: Capacity
    block_accesses: int
    hit_blocks: dict[str, int]
    token_hit_rate: float
    flop_weighted_hit_rate: float
    lru_hit_blocks: int
    min_hit_blocks: int
    gap_to_min_closed: float | None
    bytes: dict[str, int]
    bookkeeping_us_per_request: float | None
    wrong_bytes: int
    verified_bytes: int
    wall_s: float
    parameters: Json
    counters: dict[str, int]
    hits_per_request: Int64

    @property
    def block_hit_rate(self) -> float:
        """Hit blocks over block accesses."""
        return self.hit_blocks["total"] / self.block_accesses

    def to_json(self) -> Json:
        """The result as the JSON report writes it."""
        rate = self.block_hit_rate
        return {
            "policy": self.policy,
            "engine": self.engine,
            "capacity_blocks": dict(zip(TIER_NAMES, self.capacity.blocks, strict=True)),
            "block_accesses": self.block_accesses,
            "hit_blocks": dict(self.hit_blocks),
            "block_hit_rate": rate,
            "token_hit_rate": self.token_hit_rate,
            "flop_weighted_hit_rate": self.flop_weighted_hit_rate,
            "prefill_work_ratio": 1.0 / (1.0 - rate) if rate < 1.0 else None,
            "lru_hit_blocks": self.lru_hit_blocks,
            "min_hit_blocks": self.min_hit_blocks,
            "gap_to_min_closed": self.gap_to_min_closed,
            "bytes": dict(self.bytes),
            "bookkeeping_us_per_request": self.bookkeeping_us_per_request,
            "wrong_bytes": self.wrong_bytes,
            "verified_bytes": self.verified_bytes,
            "wall_s": round(self.wall_s, 4),
            "parameters": dict(self.parameters),
            "counters": dict(self.counters),
        }


def hit_counts(outcome: Outcome) -> dict[str, int]:
    """The outcome's hits by tier name, and their total."""
    counts = {name: int(n) for name, n in zip(TIER_NAMES, outcome.tier_hits, strict=True)}
    counts["total"] = int(outcome.hits.sum(dtype=np.int64))
    return counts
