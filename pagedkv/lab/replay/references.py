"""Reference hit counts per capacity: LRU, MIN, MIN-bypass, infinite.

Each is computed once.

A bound knows one tier. Over several tiers its total is that of one tier of their summed capacity; what it
gives a tier is what that tier adds to the hotter ones (MIN at the device's size, then at device + host, ...):
no replay with these tiers can have more hits down to any of them than the matching MIN-bypass.

With ``generating``, requests hold their blocks here as they do in the replay: the leading ones that fit on the device
beside what others hold. MIN is then the most that any policy can hit, also in several tiers, and MIN-bypass is the same
number (bounds.pyx says why). ``infinite`` has room for everything and stays what it is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv.lab.replay import bounds
from pagedkv.lab.replay.capacity import Capacity
from pagedkv.lab.replay.result import Outcome
from pagedkv.lab.replay.schedule import arrivals_and_ends, require_outputs, require_token_ms
from pagedkv.lab.replay.trace import Int32, Int64, Trace

BOUNDS = ("infinite", "min", "min-bypass")


class Held(NamedTuple):
    """What requests hold while they run.

    Paths cut to what fits, the next uses in these, and how many were cut.
    """

    paths: Int32
    offsets: Int64
    next_use: Int32
    squeezed: int


class References:
    """Bounds and plain LRU of one trace, remembered by capacity in blocks.

    Parameters
    ----------
    trace : the requests.
    generating : time of an output token in milliseconds, for which requests hold their blocks; None: they take no time.

    Raises
    ------
    InvalidArgument, WrongType : ``generating`` is no time, or the trace has no output lengths.
    """

    def __init__(self, trace: Trace, generating: float | None = None) -> None:
        self._trace = trace
        self.generating = generating
        self._events: Int32 | None = None
        if generating is not None:
            require_token_ms(generating)
            require_outputs(trace)
            self._events = arrivals_and_ends(trace, generating)
        self._held: tuple[int, Held] | None = None  # of the device asked for last
        self._hits: dict[tuple[str, int, int], Int32] = {}

    def hits(self, name: str, capacity: Capacity | int) -> Int32:
        """Hit blocks per request of ``lru``, ``min``, ``min-bypass``, ``infinite``.

        int32 [num_requests] each.

        An int is one tier of that many blocks.
        """
        if name == "infinite":
            return self._trace.seen_before()
        device, total = self._blocks(capacity)
        key = (name, device, total)
        if key not in self._hits:
            self._hits[key] = self._solve(name, device, total)
        return self._hits[key]

    def total(self, name: str, capacity: Capacity | int) -> int:
        """Hit blocks in all."""
        return int(self.hits(name, capacity).sum(dtype="int64"))

    def outcome(self, name: str, capacity: Capacity) -> Outcome:
        """A bound as the outcome of a replay."""
        hits = self.hits(name, capacity)
        total = self.total(name, capacity)
        if name == "infinite":
            return Outcome(hits, (total, 0, 0))
        device = min(self.total(name, capacity.device), total)
        warm = min(max(self.total(name, Capacity(capacity.device, capacity.host)), device), total)
        return Outcome(hits, (device, warm - device, total - warm), counters=self._counters(capacity))

    def gap_closed(self, hits: int, capacity: Capacity | int) -> float | None:
        """Share of the way from LRU to MIN at one tier of the summed capacity.

        None where LRU and MIN are equal.
        """
        lru, best = self.total("lru", capacity), self.total("min", capacity)
        return (hits - lru) / (best - lru) if best > lru else None

    def _blocks(self, capacity: Capacity | int) -> tuple[int, int]:
        """Blocks of the device, and in all; more than the trace has blocks changes nothing."""
        size = Capacity(capacity) if isinstance(capacity, int) else capacity
        total = min(size.total, self._trace.num_unique)
        return (total if self._events is None else min(size.device, total)), total

    def _solve(self, name: str, device: int, total: int) -> Int32:
        parents, events, held = self._trace.parents, self._events, self._holding(device)
        if name == "lru":
            return bounds.lru_hits(held.paths, held.offsets, parents, total, events)
        if name == "min-bypass" and events is None:
            return bounds.min_bypass_hits(held.paths, held.offsets, parents, held.next_use, total)
        return bounds.min_hits(held.paths, held.offsets, parents, held.next_use, total, events)

    def _holding(self, device: int) -> Held:
        trace, events = self._trace, self._events
        known = 0 if events is None else device
        if self._held is None or self._held[0] != known:
            paths, offsets, squeezed = trace.paths, trace.offsets, 0
            if events is not None:
                fits = bounds.held_prefixes(paths, offsets, trace.num_unique, events, device)
                lengths = np.diff(offsets)
                squeezed = int(np.count_nonzero(fits < np.minimum(lengths, device)))
                paths = paths[trace.depths[paths] < np.repeat(fits, lengths)]
                offsets = np.concatenate(([0], np.cumsum(fits, dtype=np.int64)))
            next_use = bounds.next_uses(paths, offsets, trace.num_unique)
            self._held = (known, Held(paths, offsets, next_use, squeezed))
        return self._held[1]

    def _counters(self, capacity: Capacity) -> dict[str, int]:
        if self._events is None:
            return {}
        return {"squeezed_requests": self._holding(self._blocks(capacity)[0]).squeezed}
