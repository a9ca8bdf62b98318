"""One replay: the real tree, placement and policy fed with a trace, and what that took."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from pagedkv.lab.replay import Trace
from pagedkv.lab.replay.engine_sim import SimCache, serve
from pagedkv.lab.replay.progress import Progress
from pagedkv.lab.replay.trace import Int32

STRICT, UNBOUNDED = "hazard, stake 0", "hazard, no bound"
UNNAMED = "hazard, no sessions"  # which the trace knows, and the policy is not told
POLICIES = ("lru", "arc", "s3fifo", "hazard", STRICT, UNBOUNDED, UNNAMED)
STAKES = {STRICT: 0.0, UNBOUNDED: math.inf}


@dataclass(frozen=True, slots=True)
class Run:
    """What a replay came to.

    Attributes
    ----------
    hits : int32 [num_requests], leading cached blocks of each.
    ns_per_access : CPU time of the thread in the cache's calls, by block asked for.
    study_us : the longest call in which the policy hazard learned; 0 for the others.
    learned : ``HazardPolicy.stats`` at the end; empty for the others.
    """

    hits: Int32
    ns_per_access: float
    study_us: float
    learned: dict[str, int]


class WatchedCache(SimCache):
    """Knows the longest call of ``study``."""

    longest_ns = 0

    def study(self) -> None:
        start = time.thread_time_ns()
        super().study()
        self.longest_ns = max(self.longest_ns, time.thread_time_ns() - start)


def run(trace: Trace, policy: str, blocks: int, progress: Progress) -> Run:
    """Replay a trace from an empty cache of one tier. `policy` is one of POLICIES."""
    kind = policy.partition(",")[0]
    room = min(blocks, trace.num_unique)
    cache = WatchedCache((room, 0, 0), kind)
    if policy in STAKES:
        cache.bound(STAKES[policy])
    if policy == UNNAMED:
        trace = replace(trace, sessions=np.full_like(trace.sessions, -1))
    hits, _, ns = serve(trace, cache, None, progress)
    hazard = cache.placement.hazard
    learned = {} if hazard is None else hazard.stats()
    return Run(hits, ns / trace.num_accesses, cache.longest_ns / 1000, learned)
