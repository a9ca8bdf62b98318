"""What every policy is measured against, computed once per capacity: LRU, MIN, MIN-bypass, infinite.

A bound knows one tier. Over several tiers its total is that of one tier of their summed capacity; what it
gives a tier is what that tier adds to the hotter ones (MIN at the device's size, then at device + host, ...):
no replay with these tiers can have more hits down to any of them than the matching MIN-bypass.
"""

from __future__ import annotations

from pagedkv.replay import bounds
from pagedkv.replay.capacity import Capacity
from pagedkv.replay.result import Outcome
from pagedkv.replay.trace import Int32, Trace

BOUNDS = ("infinite", "min", "min-bypass")


class References:
    """Bounds and plain LRU of one trace, remembered by capacity in blocks."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._next_use: Int32 | None = None
        self._hits: dict[tuple[str, int], Int32] = {}

    def hits(self, name: str, capacity: int) -> Int32:
        """Hit blocks per request of ``lru``, ``min``, ``min-bypass``, ``infinite``: int32 [num_requests]."""
        trace = self._trace
        capacity = min(capacity, trace.num_unique)  # more room than blocks changes nothing
        key = (name, 0 if name == "infinite" else capacity)
        if key not in self._hits:
            if name == "infinite":
                found = trace.seen_before()
            elif name == "lru":
                found = bounds.lru_hits(trace.paths, trace.offsets, trace.parents, capacity)
            else:
                solve = {"min": bounds.min_hits, "min-bypass": bounds.min_bypass_hits}[name]
                found = solve(trace.paths, trace.offsets, trace.parents, self._next_uses(), capacity)
            self._hits[key] = found
        return self._hits[key]

    def total(self, name: str, capacity: int) -> int:
        """Hit blocks in all."""
        return int(self.hits(name, capacity).sum(dtype="int64"))

    def outcome(self, name: str, capacity: Capacity) -> Outcome:
        """A bound as the outcome of a replay."""
        hits = self.hits(name, capacity.total)
        total = self.total(name, capacity.total)
        if name == "infinite":
            return Outcome(hits, (total, 0, 0))
        device = min(self.total(name, capacity.device), total)
        warm = min(max(self.total(name, capacity.device + capacity.host), device), total)
        return Outcome(hits, (device, warm - device, total - warm))

    def gap_closed(self, hits: int, capacity: int) -> float | None:
        """Share of the way from LRU to MIN at one tier of ``capacity`` blocks; None where there is none."""
        lru, best = self.total("lru", capacity), self.total("min", capacity)
        return (hits - lru) / (best - lru) if best > lru else None

    def _next_uses(self) -> Int32:
        if self._next_use is None:
            trace = self._trace
            self._next_use = bounds.next_uses(trace.paths, trace.offsets, trace.num_unique)
        return self._next_use
