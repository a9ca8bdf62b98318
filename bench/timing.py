"""The one timing harness.

Warm up, garbage collector off, time rounds, report median, p99 and minimum.

The default clock is the CPU time of the calling thread, so that other processes on the machine add little
noise; work that waits for a device, a disk or another thread is timed with ``clock=WALL``. The helpers that
describe the machine, write the JSON and draw the table are re-exported: a bench imports one module.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from bench.results import environment, read_results, rss_bytes, write_results
from bench.table import print_table, render_table

__all__ = [
    "CPU",
    "WALL",
    "Sample",
    "environment",
    "gc_off",
    "measure",
    "measure_each",
    "print_table",
    "read_results",
    "render_table",
    "rss_bytes",
    "summarise",
    "write_results",
]

Clock = Callable[[], float]
CPU: Clock = time.thread_time
WALL: Clock = time.perf_counter

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Sample:
    """Time of one call, over the rounds of a measurement.

    Attributes
    ----------
    median_s, p99_s, min_s : float
        Seconds per call. The p99 is the nearest rank: under 100 rounds it is the slowest round.
    rounds : int
        Timed rounds (warm-up not counted).
    inner : int
        Calls per round; a round's time is divided by it.
    """

    median_s: float
    p99_s: float
    min_s: float
    rounds: int
    inner: int

    def us(self, per: float = 1.0) -> float:
        """Median in microseconds, divided by `per` (blocks, sequences, requests in one call)."""
        return self.median_s * 1e6 / per

    def ns(self, per: float = 1.0) -> float:
        """Median in nanoseconds, divided by `per`."""
        return self.median_s * 1e9 / per

    def gb_per_s(self, num_bytes: float) -> float:
        """Bandwidth at the median, in 1e9 bytes per second, of a call that moves `num_bytes`."""
        return num_bytes / self.median_s / 1e9


def summarise(times_s: Sequence[float], inner: int = 1) -> Sample:
    """Reduce the times of whole rounds to a :class:`Sample` per call.

    Parameters
    ----------
    times_s : sequence of float
        Seconds per round; at least one.
    inner : int
        Calls in one round.

    Raises
    ------
    ValueError
        If there is no round, or `inner` is under 1.
    """
    if not times_s or inner < 1:
        raise ValueError(f"need a round and inner >= 1, got {len(times_s)} rounds and inner={inner}")
    ordered = sorted(times_s)
    p99 = ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)]
    return Sample(statistics.median(ordered) / inner, p99 / inner, ordered[0] / inner, len(ordered), inner)


@contextmanager
def gc_off() -> Iterator[None]:
    """Collect once, then keep the cyclic garbage collector off inside the block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def measure(
    fn: Callable[[], object],
    *,
    inner: int = 1,
    rounds: int = 15,
    warmup: int = 3,
    setup: Callable[[], object] | None = None,
    teardown: Callable[[], object] | None = None,
    clock: Clock = CPU,
) -> Sample:
    """Time `fn`, called `inner` times in each of `rounds` rounds.

    Choose `inner` so that a round lasts 100 microseconds or more: reading the CPU clock costs about 0.4.

    Parameters
    ----------
    fn : callable
        The work. What it returns is dropped inside the timed part.
    inner, rounds, warmup : int
        Calls per round, timed rounds, and rounds thrown away first.
    setup, teardown : callable, optional
        Run before and after each round, warm-up included, outside the timed part.
    clock : callable
        ``CPU`` (thread CPU seconds, the default) or ``WALL`` (elapsed seconds).

    Raises
    ------
    ValueError
        If `rounds` or `inner` is under 1.
    """
    times = []
    calls = range(inner)
    with gc_off():
        for round_idx in range(warmup + rounds):
            if setup is not None:
                setup()
            start = clock()
            for _ in calls:
                fn()
            elapsed = clock() - start
            if teardown is not None:
                teardown()
            if round_idx >= warmup:
                times.append(elapsed)
    return summarise(times, inner)


def measure_each(
    fn: Callable[[Item], object],
    items: Iterable[Item],
    *,
    warmup: int = 3,
    teardown: Callable[[Item], object] | None = None,
    clock: Clock = CPU,
) -> Sample:
    """Time one call of `fn` per item.

    For work that cannot be repeated on one input (insert, evict).

    Parameters
    ----------
    fn : callable
        The work on one item.
    items : iterable
        Inputs; a lazy iterable is advanced outside the timed part.
    warmup : int
        Leading items whose time is thrown away.
    teardown : callable, optional
        Run on each item after its timed call.
    clock : callable
        ``CPU`` or ``WALL``.

    Raises
    ------
    ValueError
        If there are not more items than `warmup`.
    """
    times = []
    with gc_off():
        for item_idx, item in enumerate(items):
            start = clock()
            fn(item)
            elapsed = clock() - start
            if teardown is not None:
                teardown(item)
            if item_idx >= warmup:
                times.append(elapsed)
    return summarise(times)
