"""Histograms of how long things take. They are always on."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

BOUNDS_S = (*(factor * 10.0**power for power in range(-5, 2) for factor in (1, 2, 5)), 100.0)  # 10 us to 100 s


@dataclass(frozen=True, slots=True)
class Latency:
    """The counts of a histogram at one moment.

    Attributes
    ----------
    counts : tuple of int, one more than `bounds_s`
        Observations of at most each bound and more than the one before it; the last one counts those beyond all bounds.
    total_s : float
        Their sum in seconds.
    bounds_s : tuple of float
        Upper bounds in seconds, ascending.
    """

    counts: tuple[int, ...]
    total_s: float
    bounds_s: tuple[float, ...] = BOUNDS_S

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """Their mean in seconds; 0 before the first."""
        return self.total_s / self.count if self.count else 0.0

    def cumulative(self) -> list[tuple[str, int]]:
        """Prometheus' buckets: bounds as text, ``+Inf`` last, and observations of at most that."""
        names = [*(f"{bound:g}" for bound in self.bounds_s), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Histogram:
    """Counts seconds by their size. Any thread may call it."""

    __slots__ = ("_changing", "_counts", "_total_s")

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._counts, self._total_s = [0] * (len(BOUNDS_S) + 1), 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` things that took so long each.

        Less than nothing, of a clock that went back, is 0.
        """
        if seconds < 0.0:
            seconds = 0.0
        at = bisect_left(BOUNDS_S, seconds)
        with self._changing:
            self._counts[at] += count
            self._total_s += seconds * count

    def read(self) -> Latency:
        """The counts now."""
        with self._changing:
            return Latency(tuple(self._counts), self._total_s)


class CacheLatencies:
    """The histograms of a cache.

    Attributes
    ----------
    match : of a prompt, with its wait for blocks that are being promoted for others.
    promotion : of a prompt's blocks, from whatever tiers, with the room that is made for them.
    disk_read, disk_write, remote_read, remote_write : of a ticket, the blocks that one call of the mover carries, from
        its making to its end.
    lookup : of a question to the remote store.
    """

    __slots__ = ("disk_read", "disk_write", "lookup", "match", "promotion", "remote_read", "remote_write")

    def __init__(self) -> None:
        self.match, self.promotion = Histogram(), Histogram()
        self.disk_read, self.disk_write = Histogram(), Histogram()
        self.lookup, self.remote_read, self.remote_write = Histogram(), Histogram(), Histogram()

    def read(self) -> dict[str, Latency]:
        """All of them by name."""
        return {name: getattr(self, name).read() for name in self.__slots__}
