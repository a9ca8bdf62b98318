"""From hits by request to figures.

Shares of what was asked for, and how far LRU was ahead where it was most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from pagedkv.lab.replay import Trace
from pagedkv.lab.replay.trace import Int32, Int64
from pagedkv.lab.replay.weights import flop_weighted_hit_rate, token_hit_rate

WINDOW = 10_000  # requests: the window of the policy hazard's bound


def rates(trace: Trace, hits: Int32) -> dict[str, float]:
    """Hits in percent of blocks, of tokens, and of prefill FLOPs (Llama-3-8B)."""
    return {
        "block_pct": 100 * int(hits.sum(dtype=np.int64)) / trace.num_accesses,
        "token_pct": 100 * token_hit_rate(trace, hits),
        "flop_pct": 100 * flop_weighted_hit_rate(trace, hits),
    }


def against_lru(accesses: Int64, hits: Int32, lru: Int32, window: int = WINDOW) -> dict[str, float]:
    """Where a policy does worst beside LRU, in points: percent of accesses.

    Below 0 where LRU was ahead.

    Parameters
    ----------
    accesses, hits, lru : blocks by request: asked for, hit by the policy, hit by LRU.

    Returns
    -------
    dict
        ``worst_window``: of all windows of `window` requests (the whole trace where it is shorter), of its accesses.
        ``worst_prefix``: of all beginnings of the trace, of its accesses.
        ``worst_stretch``: of all stretches of `window` requests or fewer, of the accesses of the `window` requests
        that end with it: what the bound of the policy hazard is about.
    """
    ahead = np.concatenate(([0], np.cumsum(hits.astype(np.int64) - lru)))
    asked = np.concatenate(([0], np.cumsum(accesses.astype(np.int64))))
    width = min(window, len(hits))
    since = np.maximum(np.arange(len(ahead)) - width, 0)
    recent = np.maximum(asked - asked[since], 1)
    windows = (ahead - ahead[since])[width:] / recent[width:]
    prefixes = ahead[1:] / np.maximum(asked[1:], 1)
    stretches = (ahead - np.fromiter(_highest(ahead.tolist(), width), np.int64, len(ahead))) / recent
    found = {"worst_window": windows, "worst_prefix": prefixes, "worst_stretch": stretches}
    return {name: 100 * float(points.min(initial=1.0)) for name, points in found.items()}


def _highest(values: list[int], width: int) -> Iterator[int]:
    """The largest of each value and the `width` before it."""
    falling: deque[int] = deque()
    for place, value in enumerate(values):
        while falling and values[falling[-1]] <= value:
            falling.pop()
        falling.append(place)
        if falling[0] < place - width:
            falling.popleft()
        yield values[falling[0]]
