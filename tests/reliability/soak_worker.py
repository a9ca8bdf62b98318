"""A cache at work on a directory while its disk misbehaves.

It tells after every epoch, until it is killed or done.

    python -m tests.reliability.soak_worker DIRECTORY SEED

Whatever the faults do, no call may raise, and every byte that is served must be the one that was stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pagedkv as pk
from tests.cache.conftest import SPEC, Toy
from tests.reliability.crowd import together

REQUESTS = 120  # of an epoch, both threads together
EPOCHS = 8  # of a process that is not killed
FAMILIES, TURNS = 24, 6
NAMESPACES = (None, pk.Namespace(tenant="a"), pk.Namespace(tenant="b"))
WATCHDOG_S = 120.0  # seconds; a block held for longer is held for good
FAULTS = ("none", "damage", "truncation", "failing writes", "purge", "reopening")


@dataclass
class Epoch:
    """What happened in one epoch."""

    fault: str
    operations: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    held: int = 0  # blocks that are still held when all requests are over
    wrong: str = ""


def open_cache(directory: str, seed: int) -> pk.KVCache:
    """The cache; a store that cannot be used any more is begun anew."""
    disk = pk.Disk(directory, pk.Blocks(96), segment_size=pk.Bytes(1 << 17), admission="all", on_mismatch="reset")
    return pk.KVCache(
        SPEC,
        pk.Blocks(48),
        pk.Blocks(24),
        disk,
        policy=random.Random(seed).choice(["lru", "s3fifo"]),
        pin_budget=pk.Blocks(4),
    )


@contextlib.contextmanager
def fault(kind: str, directory: str, choose: random.Random) -> Iterator[None]:
    """Something that happens to the files, and for some kinds ends again."""
    files = sorted(Path(directory).glob("data.*"))
    file = choose.choice(files)
    size = file.stat().st_size
    if kind == "damage":
        with file.open("r+b") as opened:
            for _ in range(choose.randint(1, 40)):
                opened.seek(choose.randrange(size))
                opened.write(choose.randbytes(choose.randint(1, 600)))
        os.truncate(file, size)
    elif kind == "truncation":
        os.truncate(file, choose.randrange(size))
    elif kind == "failing writes":
        resource.setrlimit(resource.RLIMIT_FSIZE, (choose.randrange(size), resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if kind == "truncation" and choose.random() < 0.5:
            os.truncate(file, size)


def requests(cache: pk.KVCache, choose: random.Random, done: Counter[str]) -> None:
    """Run one thread's share of an epoch: conversations of a few families.

    Some are longer than others, and the thread asks for them again.
    """
    for _ in range(REQUESTS // 2):
        which = choose.randrange(len(NAMESPACES))
        toy = Toy(cache, 1000 * which)
        family = min(choose.randrange(FAMILIES), choose.randrange(FAMILIES))
        tokens = [family * 100 + i for i in range(SPEC.block_size * choose.randint(1, TURNS) + 1)]
        with cache.sequence(tokens, NAMESPACES[which]) as seq:
            done["hits"] += bool(seq.num_computed)
            toy.check(seq)
            toy.run(seq)
            fork = seq.fork()[0]
            fork.append([choose.randrange(99)])
            toy.run(fork)
            toy.check(seq, fork)
            fork.release()
        done["operations"] += 8
        if choose.random() < 0.05:
            cache.prefetch(tokens[:9], NAMESPACES[which])
            done["operations"] += 1


def held_by(stats: pk.CacheStats) -> int:
    """Blocks that something holds, and sequences."""
    return sum(blocks["live"] for blocks in stats.blocks.values()) + stats.sequences


def at_rest(cache: pk.KVCache) -> pk.CacheStats:
    """The counters once the moves under way have ended, which hold blocks; a leak stays one."""
    until = time.monotonic() + WATCHDOG_S
    while held_by(stats := cache.stats()) and time.monotonic() < until:
        time.sleep(0.01)
    return stats


def work(directory: str, seed: int) -> Iterator[Epoch]:
    """Epochs, each with its fault."""
    choose = random.Random(seed)
    cache = open_cache(directory, seed)
    for number in range(EPOCHS):
        epoch = Epoch(choose.choice(FAULTS))
        before = cache.stats()
        done = {seed * 1000 + 2 * number + k: Counter[str]() for k in range(2)}
        with fault(epoch.fault, directory, choose):
            raised = together([partial(requests, cache, random.Random(s), counts) for s, counts in done.items()])
            if epoch.fault == "purge":
                cache.purge(choose.choice(NAMESPACES))
        if raised:
            epoch.wrong = "".join(traceback.format_exception(raised[0])[-6:])
        cache.prefetch([0]).wait(600)
        after, counts = at_rest(cache), sum(done.values(), Counter())
        epoch.operations, epoch.hits = counts["operations"], counts["hits"]
        epoch.prompt_tokens = after.prompt_tokens - before.prompt_tokens
        epoch.hit_tokens = sum(after.hit_tokens.values()) - sum(before.hit_tokens.values())
        epoch.held = held_by(after)
        cache.check_integrity()
        if epoch.fault in ("reopening", "truncation"):
            cache.close()
            cache = open_cache(directory, seed)
        yield epoch
    cache.close()


def read(line: str) -> Epoch:
    """What a line tells of."""
    return Epoch(**json.loads(line))


def main(directory: str, seed: int) -> None:
    """Tell of every epoch in one line of JSON."""
    for epoch in work(directory, seed):
        print(json.dumps(asdict(epoch)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
