"""Many threads on one cache of three tiers, each served byte compared.

They make every call that a host makes, in any order.

A round is one cache: two phases of work with a quiet point after each, at which all books must agree, or one phase
in which the cache is closed under the threads. The directory goes from round to round.

    python -m tests.reliability.cache_hammer OPERATIONS SEED [MOST_THREADS]
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pagedkv as pk
from tests.cache.conftest import SPEC, Toy, all_free
from tests.reliability import child
from tests.reliability.crowd import restless, together
from tests.reliability.proof import Tally

OPERATIONS = 3000  # of a round, all threads together
LONGEST = 22  # tokens of a prompt of two letters: most of them share a prefix
SHARED = (None, pk.Namespace(tenant="a"), pk.Namespace(tenant="b"))
DISK_BLOCKS = 60


class Cancelled(Exception):
    """A host gives a step up."""


@dataclass
class Host:
    """One thread's share of a round: requests, and everything else a host asks for meanwhile.

    Parameters
    ----------
    cache : the cache of the round.
    choose : what decides; the thread's own.
    name : of the namespace that only this thread uses, and purges.
    salts : how often each such namespace was purged: another salt gives other KV.
    """

    cache: pk.KVCache
    choose: random.Random
    name: str
    salts: Counter[str]
    count: Counter[str] = field(default_factory=Counter)
    held: list[pk.Sequence] = field(default_factory=list)
    pins: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def operations(self) -> int:
        """Calls so far."""
        return sum(n for what, n in list(self.count.items()) if not what.startswith("=")) + self.count["=calls"]

    def work(self, operations: int) -> None:
        """Requests, until so many calls are made."""
        ways: list[Callable[[], None]] = [self.request, self.storm, self.warm_up, self.pin, self.look, self.purge]
        try:
            while self.operations < operations:
                try:
                    self.choose.choices(ways, weights=[60, 4, 12, 8, 10, 4])[0]()
                except pk.OutOfBlocks:
                    self.count["=out of blocks"] += 1
                self.let_go()
        finally:
            self.ended = True
            self.let_go()
            while self.pins:
                self.unpin(0)

    def let_go(self) -> None:
        """Release all sequences in any order."""
        self.choose.shuffle(self.held)
        while self.held:
            self.held.pop().release()
            self.count["=calls"] += 1

    def somewhere(self) -> tuple[pk.Namespace | None, Toy]:
        """A namespace and its model."""
        which = self.choose.randrange(len(SHARED) + 1)
        if which < len(SHARED):
            return SHARED[which], Toy(self.cache, 1000 * which)
        return pk.Namespace(tenant=self.name), Toy(self.cache, 5000 + self.salts[self.name])

    def tokens(self, longest: int = LONGEST) -> list[int]:
        return self.choose.choices([0, 1], k=self.choose.randint(1, longest))

    # ---- what a host does

    def request(self) -> None:
        """Serve one request from start to end.

        Perhaps with forks, further turns, and steps that are given up.
        """
        namespace, toy = self.somewhere()
        first = self.cache.sequence(self.tokens(), namespace)
        self.held.append(first)
        self.count["sequences"] += 1
        self.count["=served"] += bool(first.num_computed)
        self.check(toy)
        self.step(toy)
        if self.choose.random() < 0.4:
            self.held += first.fork(self.choose.randint(1, 2))
            self.count["forks"] += 1
        for _ in range(self.choose.randint(0, 3)):
            for seq in self.held:
                seq.append(self.tokens(3))
                self.count["=calls"] += 1
            self.step(toy)
            self.check(toy)
        if self.choose.random() < 0.2:
            first.truncate(self.choose.randint(0, first.num_tokens))
            self.count["truncations"] += 1
            self.check(toy)

    def step(self, toy: Toy) -> None:
        """A step over all that is held; some are given up half way, and done again."""
        lookahead = self.choose.choice([0, 0, 5])
        if self.choose.random() < 0.1:
            try:
                with self.cache.step(self.held, lookahead=lookahead) as step:
                    toy.write(step, *self.held)
                    raise Cancelled
            except Cancelled:
                self.count["steps given up"] += 1
        toy.run(*self.held, lookahead=lookahead)
        self.count["steps"] += 1

    def check(self, toy: Toy) -> None:
        """Everything that is held, byte by byte."""
        toy.check(*self.held)
        self.count["=compared"] += sum(bool(seq.num_computed) for seq in self.held)

    def storm(self) -> None:
        """Prompts that no other request shares push everything else out."""
        namespace, toy = self.somewhere()
        for start in range(self.choose.randint(2, 6)):
            with self.cache.sequence([start + 2, *self.choose.choices(range(2, 99), k=25)], namespace) as seq:
                toy.run(seq)
                toy.check(seq)
            self.count["strangers"] += 1

    def warm_up(self) -> None:
        """A prefetch; no thread has to wait for it."""
        future = self.cache.prefetch(self.tokens(), self.somewhere()[0])
        self.count["prefetches"] += 1
        if self.choose.random() < 0.5:
            future.wait(600)

    def pin(self) -> None:
        """Pin something, or let something go that is pinned."""
        if self.pins and self.choose.random() < 0.6:
            self.unpin(self.choose.randrange(len(self.pins)))
        else:
            try:
                self.pins.append(self.cache.pin(self.tokens(8), self.choose.choice(SHARED)))
            except pk.PinBudgetExceeded:
                self.count["=pins refused"] += 1
        self.count["pins"] += 1

    def unpin(self, which: int) -> None:
        """Let a pin go."""
        self.pins.pop(which).release()

    def look(self) -> None:
        """What only looks."""
        self.cache.explain(self.tokens(), self.choose.choice(SHARED))
        self.cache.stats()
        self.cache.events()
        self.count["looks"] += 3
        if self.choose.random() < 0.1:
            self.cache.check_integrity()
            self.count["=calls"] += 1

    def purge(self) -> None:
        """Forget a namespace, shared by all threads or used by this one alone.

        The latter gets a new salt, so that a later check would notice what was purged.
        """
        if self.choose.random() < 0.2:
            self.cache.purge(self.choose.choice(SHARED))
        else:
            self.cache.purge(pk.Namespace(tenant=self.name))
            self.salts[self.name] += 1
        self.count["purges"] += 1


def one_round(path: str, operations: int, seed: int, most_threads: int, salts: Counter[str], tally: Tally) -> None:
    """One cache from opening to close. What goes wrong is in the tally."""
    choose = random.Random(seed)
    threads = choose.randint(2, most_threads)
    options: dict[str, Any] = {
        "policy": choose.choice(["lru", "arc", "s3fifo", "hazard"]),
        "demotion": choose.choice(["leaf_first", "oldest_first"]),
        "threads": choose.randint(1, 3),
        "scrub": choose.choice(["across_namespaces", "always", "never"]),
        "deadline_s": choose.choice([None, None, 0.0, 0.002]),
        "pin_budget": pk.Blocks(6),
        "event_words": 1 << 12,
    }
    device = 16 * threads + 8
    disk = pk.Disk(
        path,
        pk.Blocks(DISK_BLOCKS),
        segment_size=pk.Bytes(1 << 16),
        admission=choose.choice(["all", "cost", "second_hit"]),
    )
    cache = pk.KVCache(SPEC, pk.Blocks(device), pk.Blocks(choose.choice([8, 24])), disk, **options)
    hosts = [Host(cache, random.Random(seed * 100 + k), f"own {k}", salts) for k in range(threads)]
    closing = choose.random() < 0.2
    share = max(1, operations // threads // (1 if closing else 2))
    for phase in range(1 if closing else 2):
        jobs: list[Callable[[], object]] = [partial(host.work, share * (phase + 1)) for host in hosts]
        late = choose.randrange(1, 200)  # or when all have ended before
        if closing:
            jobs.append(partial(close_after, cache, hosts, late))
        for problem in problems(together(jobs), closing=closing):
            tally.fail(f"round {seed}, {threads} threads, {options}: {problem}")
        gc.collect()  # an error's frames hold sequences, and are held by it
        cache.check_integrity()
        if not closing:
            cache.prefetch([0]).wait(600)
        pinned = any(host.pins for host in hosts)  # until the cache was closed
        if cache.stats().sequences or not (pinned or all_free(cache)):
            tally.fail(f"round {seed}: blocks are still held: {cache.stats()}")
        tally.add("quiet points")
    cache.close()
    tally.add("closed under the threads" if closing else "closed in peace")
    for host in hosts:
        tally.count += host.operations
        tally.hits += host.count["=compared"]
        for what, n in host.count.items():
            if what not in ("=calls", "=compared"):
                tally.add(what.removeprefix("="), n)


def problems(raised: list[BaseException], *, closing: bool) -> list[str]:
    """Return errors in words; as objects they would keep alive what their frames held.

    While a cache closes, ClosedError is allowed.
    """
    told = [error for error in raised if not (closing and isinstance(error, pk.ClosedError))]
    return ["".join(traceback.format_exception(error)[-4:]) for error in told]


def close_after(cache: pk.KVCache, hosts: list[Host], operations: int) -> None:
    """Close the cache once the threads are in the middle of their work."""
    while sum(host.operations for host in hosts) < operations and not all(host.ended for host in hosts):
        cache.stats()
    cache.close()


def main(operations: int, seed: int, most_threads: int = 16) -> Tally:
    """Rounds until so many calls are made."""
    tally, number = Tally(), 0
    with restless():
        while tally.count < operations and tally.wrong < 10:
            with tempfile.TemporaryDirectory() as folder:
                salts: Counter[str] = Counter()
                for _ in range(random.Random(seed + number).randint(1, 4)):  # opened again, with what it held
                    before = tally.count
                    one_round(
                        f"{folder}/kv",
                        min(operations, OPERATIONS),
                        seed * 1_000_003 + number,
                        most_threads,
                        salts,
                        tally,
                    )
                    number += 1
                    child.done(tally.count - before)
                    if tally.count >= operations:
                        break
    return tally


if __name__ == "__main__":
    child.answer(main(*map(int, sys.argv[1:])))
