"""Opens, uses and closes caches with a disk tier again and again.

It checks what must stay the same and what may not grow.

python -m tests.reliability.leak_cycles CYCLES SEED
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import pagedkv as pk
from tests.cache.conftest import SPEC, Toy, where
from tests.reliability import child
from tests.reliability.proof import Tally

WARM_UP = 200  # cycles in which caches of the interpreter fill
SAMPLES = 10
REQUESTS = 5  # of a cycle
CALM, GONE_S = 50, 60.0  # looks (a millisecond apart) at threads, none of which goes; a watchdog
OTHER_SPEC = pk.KVSpec(3, 2, 4, "float32", 4, model="toy")
NAMESPACE = pk.Namespace(tenant="a")
TOKENS = np.arange(40, dtype=np.int32)
# A leak is what grows in the second half of all cycles by more than both: so much per cycle, and so much in all.
OBJECTS_PER_CYCLE, NOISE_OBJECTS = 0.75, 150
BYTES_PER_CYCLE, NOISE_BYTES = 1024, 512 << 10


@dataclass(frozen=True)
class Sample:
    """What this process holds now, after a collection."""

    cycles: int
    descriptors: int
    threads: int
    objects: int  # of Python, tracked by the collector or not
    private_bytes: int
    references: tuple[int, ...]  # on what was given to every call

    @staticmethod
    def now(cycles: int) -> Sample:
        """Count."""
        gc.collect()
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Private_"))
        watched = SPEC, OTHER_SPEC, NAMESPACE, TOKENS
        return Sample(
            cycles, len(os.listdir("/proc/self/fd")), threads(), sys.getallocatedblocks(), private,
            tuple(map(sys.getrefcount, watched)),
        )  # fmt: skip


def threads(at_most: int = -1) -> int:
    """Return how many threads the process has, by the system's count.

    Threads that have done their work may take a moment to be gone. The call waits until there are `at_most`, a minute
    at the longest; or until none has gone for a while.
    """
    fewest, calm = len(os.listdir("/proc/self/task")), 0
    until = time.monotonic() + GONE_S
    while (fewest > at_most if at_most >= 0 else calm < CALM) and time.monotonic() < until:
        time.sleep(0.001)
        now = len(os.listdir("/proc/self/task"))
        fewest, calm = min(now, fewest), calm + 1 if now >= fewest else 0
    return fewest


def cycle(path: str, choose: random.Random, tally: Tally) -> None:
    """One cache from opening to close, refusals included."""
    disk = pk.Disk(path, pk.Blocks(24), segment_size=pk.Bytes(1 << 16), admission="all")
    with pk.KVCache(
        SPEC,
        pk.Blocks(16),
        pk.Blocks(8),
        disk,
        policy=choose.choice(["lru", "arc"]),
        pin_budget=pk.Blocks(8),
        event_words=256,
    ) as cache:
        toy = Toy(cache)
        for number in range(REQUESTS):
            tokens = TOKENS[: choose.choice([9, 26, 40])] + number % 3 * 1000
            tally.hits += bool(toy.use(tokens, NAMESPACE))
        with cache.sequence(TOKENS, NAMESPACE) as seq:
            tally.hits += bool(seq.num_computed)
            toy.check(seq)
            toy.run(seq)
            for other in seq.fork(2):
                other.append(7)
                toy.run(other)
                toy.check(other)
                other.release()
        cache.prefetch(TOKENS, NAMESPACE).wait(600)
        cache.pin(TOKENS[:8], NAMESPACE).release()
        cache.pin(TOKENS[:8], NAMESPACE)
        where(cache, TOKENS, NAMESPACE)
        cache.stats()
        cache.events()
        _refused(cache.sequence, "no tokens")
        _refused(cache.pin, "no tokens")
        _refused(pk.KVCache, SPEC, pk.Blocks(4), None, disk)  # it is open already
        if choose.random() < 0.2:
            cache.purge(NAMESPACE)
    if choose.random() < 0.5:
        _refused(pk.KVCache, OTHER_SPEC, pk.Blocks(4), None, disk)


def _refused(call: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(pk.PagedKVError):
        call(*arguments)
        raise AssertionError(f"{call} with {arguments} was not refused")


def main(cycles: int, seed: int) -> Tally:
    """Warm up, then cycles with samples in between, and judge them."""
    choose, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/kv"
        for _ in range(WARM_UP):
            cycle(path, choose, tally)
        tally.hits = 0
        samples = [Sample.now(0) for _ in range(2)][1:]  # the first makes what sampling itself keeps
        every = max(1, cycles // SAMPLES)
        while tally.count < cycles:
            cycle(path, choose, tally)
            tally.count += 1
            if tally.count % every == 0 or tally.count == cycles:
                samples.append(Sample.now(tally.count))
                child.done(every)
    judge(samples, seed, tally)
    return tally


def judge(samples: list[Sample], seed: int, tally: Tally) -> None:
    """What must be equal is equal, and what may vary does not grow."""
    first, last = samples[0], samples[-1]
    if last.threads > first.threads and (left := threads(first.threads)) > first.threads:
        tally.fail(f"seed {seed}: {first.threads} threads before and {left} after {last.cycles} cycles")
    for what in ("descriptors", "references"):
        before, after = getattr(first, what), getattr(last, what)
        if before != after:
            tally.fail(f"seed {seed}: {what} {before} before and {after} after {last.cycles} cycles")
    later = samples[len(samples) // 2 :]  # whatever fills up slowly is full by then
    objects, memory = (
        float(np.polyfit([s.cycles for s in later], [getattr(s, what) for s in later], 1)[0])
        for what in ("objects", "private_bytes")
    )
    if objects > OBJECTS_PER_CYCLE and last.objects - later[0].objects > NOISE_OBJECTS:
        tally.fail(f"seed {seed}: {objects:.2f} objects more per cycle: {[s.objects for s in samples]}")
    if memory > BYTES_PER_CYCLE and last.private_bytes - later[0].private_bytes > NOISE_BYTES:
        tally.fail(f"seed {seed}: {memory:.0f} bytes more per cycle: {[s.private_bytes for s in samples]}")
    tally.found |= {
        "descriptors more": last.descriptors - first.descriptors,
        "threads more": max(0, threads(first.threads) - first.threads),
        "objects more": last.objects - first.objects,
        "private bytes more": last.private_bytes - first.private_bytes,
    }


if __name__ == "__main__":
    child.answer(main(*map(int, sys.argv[1:])))
