"""The load of a process that is going to be killed: caches and tiers in use.

The parent can check their contents.

The content of a namespace depends on its version. A purge that returned ends a version, and says so; from then on not
one byte of it may be served again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.tiers import DiskTier, Record
from tests.reliability import small_store as small
from tests.reliability.fork_server import Child
from tests.reliability.token_kv import GROUPED, SPEC, compute_rest, serve

DEVICE, HOST, DISK = 8, 3, 64
ROOM_OF_GROUPS = 2  # times as much: an extent holds the pages of one group
TENANTS = [f"tenant {number}" for number in range(3)]
PROMPTS = [  # three blocks and a token each; those of a family share none, one or two blocks
    [*[family] * (1 + 4 * common), *range(100, 112 - 4 * common)] for family in range(5) for common in range(3)
]
SLOTS, BLOCK_BYTES, THREADS = 32, 20_000, 3
Say = Callable[[str], object]


def open_cache(path: str, *, by_group: bool = False) -> pk.KVCache:
    """The cache under test: small tiers, so that everything moves all the time."""
    disk = pk.Disk(path, pk.Blocks(DISK), segment_size=pk.Bytes(16 * 8192), admission="all")
    if by_group:
        sizes = pk.Blocks(ROOM_OF_GROUPS * DEVICE), pk.Blocks(ROOM_OF_GROUPS * HOST)
        return pk.KVCache(GROUPED, *sizes, disk, partial_hits=False, by_group=True)
    return pk.KVCache(SPEC, pk.Blocks(DEVICE), pk.Blocks(HOST), disk, partial_hits=False)


def source(tenant: int, version: int) -> str:
    """What stands for the weights of one version of a namespace."""
    return f"{tenant} {version}"


def churn_cache(path: str, seed: int, versions: list[int], say: Say, *, by_group: bool = False) -> None:
    """Use a cache until the parent kills this process.

    Requests, prefetches, a sequence held for a while, and purges (of what is held, too).
    """
    choose = random.Random(seed)
    cache = open_cache(path, by_group=by_group)
    held: list[pk.Sequence] = []
    say("open")
    while True:
        tenant, prompt, kind = choose.randrange(len(TENANTS)), choose.choice(PROMPTS), choose.random()
        namespace, weights = pk.Namespace(tenant=TENANTS[tenant]), source(tenant, versions[tenant])
        try:
            if kind < 0.04:
                cache.purge(namespace)
                versions[tenant] += 1
                say(f"purged {tenant}")
            elif kind < 0.1 and held:
                held.pop().release()
            elif kind < 0.1:
                held.append(cache.sequence(prompt, namespace))
                compute_rest(held[0], weights, cache.spec)
            elif kind < 0.2:
                cache.prefetch(prompt, namespace)
            elif wrong := serve(cache, prompt, namespace, weights).wrong:
                say(f"wrong {wrong} tokens of {namespace}, version {versions[tenant]}, prompt {prompt}")
        except pk.OutOfBlocks:  # what is held and what is prefetched may leave too little
            held.clear()


def tier_record(number: int) -> Record:
    """A record of the tier that several threads fill."""
    return small.record_of(1000 + number)


def open_tier(path: str) -> DiskTier:
    """The tier under test."""
    return small.open_store(Path(path), num_blocks=SLOTS, block_bytes=BLOCK_BYTES, segment_bytes=10 * 24576)


def churn_tier(path: str, seed: int, say: Say) -> None:
    """Use a tier until the parent kills this process.

    Several threads write, read and bury, each in slots of its own.
    """
    tier = open_tier(path)
    held = {found.block: found.record for found in tier.records()}
    say("open")

    def work(thread: int) -> None:
        choose = random.Random(seed * THREADS + thread)
        own = range(thread, SLOTS, THREADS)
        names = {slot: held[slot] for slot in own if slot in held}
        arena = np.empty((4, BLOCK_BYTES), np.uint8)
        while True:
            some = choose.sample(own, choose.randint(1, 4))
            if choose.random() < 0.1:
                tier.invalidate(some)
                for slot in some:
                    names.pop(slot, None)
            elif choose.random() < 0.5:
                records = [tier_record(choose.randrange(10_000)) for _ in some]
                stored = tier.write(some, records, small.payloads(records, 0, BLOCK_BYTES), np.arange(len(some)))
                names.update(zip(some, records))
                if not stored.all():
                    say(f"wrong: slots {some} could not be written")
            elif some := [slot for slot in some if slot in names]:
                records = [names[slot] for slot in some]
                hit = tier.read(some, records, arena, np.arange(len(some)))
                wanted = small.payloads(records, 0, BLOCK_BYTES)
                if not hit.all() or (arena[: len(some)] != wanted).any():
                    say(f"wrong: slots {some} of seed {seed}, hits {hit.tolist()}")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def kill_one(kind: str, path: str, seed: int, wait_s: float, opening: bool, versions: list[int]) -> dict[str, Any]:
    """Start a child, kill it after `wait_s`, and return what it said until then.

    The time counts from the end of its opening, or from the beginning.
    """
    if kind in ("cache", "groups"):
        child = Child(lambda say: churn_cache(path, seed, versions, say, by_group=kind == "groups"))
    else:
        child = Child(lambda say: churn_tier(path, seed, say))
    heard = [] if opening else [child.line()]
    time.sleep(wait_s)
    child.kill()
    heard += child.heard()
    return {"heard": heard, "ended": child.end()}
