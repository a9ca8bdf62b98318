"""Requests for the policy ``hazard`` by a clock of their own, plain LRU, and traces.

A block is one token, and its token names the whole prefix up to it: no two prefixes share one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.core import BlockPool, Placement, RadixTree

Prompt = Sequence[int]
NS = 1_000_000_000


class HazardCache:
    """A placement with the policy ``hazard``, served one request at a time.

    Parameters
    ----------
    capacity : blocks of the device; more numbers are those of colder tiers.
    study : samples learned after each request.
    """

    def __init__(self, *capacity: int, study: int = 0, **options: Any) -> None:
        self.tree = RadixTree(1, len(capacity), keep_chain=True, seed=0)
        self.root = self.tree.namespace(b"")
        self.placement = Placement(self.tree, [BlockPool(n) for n in capacity], policy="hazard", **options)
        hazard = self.placement.hazard
        assert hazard is not None
        self.hazard, self.capacity, self.study = hazard, capacity[0], study

    def arrive(self, path: Prompt, namespace: int = 0) -> tuple[int, int]:
        """A request that computes all that it finds room for: its owner and its hits."""
        tokens = np.asarray(path[: self.capacity], np.int32)
        owner, hits = self.placement.acquire(tokens, namespace)
        missing = len(tokens) - hits
        missing -= self.placement.reserve(missing)
        if missing > 0:
            self.placement.insert(owner, tokens[hits : hits + missing], self.placement.allocate(missing))
        return owner, hits

    def request(self, path: Prompt, now: float, **departs: Any) -> int:
        """The hits of a request that comes and goes at `now` seconds."""
        self.hazard.tick(int(now * NS))
        owner, hits = self.arrive(path)
        self.leave(owner, **departs)
        return hits

    def leave(self, owner: int, **departs: Any) -> int:
        visit = self.hazard.depart(owner, **departs)
        self.placement.release(owner)
        self.hazard.study(self.study)
        return visit

    def cached(self, path: Prompt) -> int:
        """Leading blocks of the path that are cached."""
        return len(self.placement.match(np.asarray(path, np.int32))[0])


class PlainLru:
    """Leaf-first LRU over single blocks; the first `capacity` of a longer request."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, path: Prompt) -> int:
        return next((i for i, block in enumerate(path) if block not in self.blocks), len(path))

    def request(self, path: Prompt) -> int:
        path = path[: self.capacity]
        hits = self.cached(path)
        for block in reversed(path):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return hits


class HeldLru:
    """Leaf-first LRU over single blocks, where running requests hold their blocks.

    A request that finds no room keeps the leading blocks that fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, int] = OrderedDict()  # how many hold it; coldest first

    def arrive(self, path: Prompt) -> tuple[int, Prompt]:
        """Hits, and what of the path it holds now."""
        path = path[: self.capacity]
        hits = next((i for i, block in enumerate(path) if block not in self.blocks), len(path))
        for block in path[:hits]:
            self.blocks[block] += 1
        free = [block for block, users in self.blocks.items() if not users]
        lacking = len(path) - hits - (self.capacity - len(self.blocks))
        for block in free[: max(0, lacking)]:
            del self.blocks[block]
        path = path[: hits + self.capacity - len(self.blocks)]
        self.blocks |= dict.fromkeys(path[hits:], 1)
        return hits, path

    def leave(self, path: Prompt) -> None:
        """It holds this no more: hottest from its end to its beginning, but for what others hold."""
        for block in reversed(path):
            self.blocks[block] -= 1
            self.blocks.move_to_end(block)


Ask = Callable[[int], Prompt]


def branching(rng: Random, longest: int = 12) -> Ask:
    """Return requests that branch off earlier ones, return to hot ones, or share nothing."""
    requests: list[list[int]] = []
    fresh = iter(range(2**30))

    def ask(_: int) -> Prompt:
        draw = rng.random()
        stem: list[int] = []
        if requests and draw > 0.25:
            earlier = rng.choice(requests[-15:] if draw < 0.8 else requests[:8])
            stem = earlier[: rng.randint(0, min(len(earlier), 100))]
        requests.append(stem + [next(fresh) for _ in range(rng.randint(0, longest))])
        return requests[-1]

    return ask


def conversations(rng: Random, num_sessions: int = 60, longest: int = 60) -> Ask:
    """Return turns that each continue the one before.

    A conversation that grows too long restarts behind its first three blocks.
    """
    sessions: list[list[int]] = []
    fresh = iter(range(2**30))

    def ask(_: int) -> Prompt:
        if len(sessions) < num_sessions:
            sessions.append([])
        elif rng.random() < 0.1:
            sessions[rng.randrange(num_sessions)] = []
        k = rng.randrange(len(sessions))
        sessions[k] = sessions[k] + [next(fresh) for _ in range(rng.randint(1, 6))]
        if len(sessions[k]) > longest:
            sessions[k] = sessions[k][:3]
        return sessions[k]

    return ask


def documents(rng: Random, num_documents: int, length: int, first: int = 0) -> Ask:
    """Whole documents, some far more popular than others."""

    def ask(_: int) -> Prompt:
        which = min(int(rng.paretovariate(0.7)) - 1, num_documents - 1)
        return range(first + which * 1000, first + which * 1000 + length)

    return ask


def scan(num_documents: int, length: int, first: int = 0) -> Ask:
    """The same documents in the same order, again and again."""
    return lambda i: range(first + i % num_documents * 1000, first + i % num_documents * 1000 + length)


def empty_tables() -> NDArray[np.float32]:
    """Tables for a HazardPolicy, of weights 0."""
    cache = HazardCache(4, study=64)
    cache.request([1], 0)
    cache.request([1], 5)
    tables = cache.hazard.tables()
    assert tables is not None
    tables[0], tables[1] = 0, 1
    return tables


def rising(cache: HazardCache) -> None:
    """Set tables after which hazards rise with age.

    The most recently used block goes first, the opposite of LRU.
    """
    tables = empty_tables()
    tables[0, :22] = np.linspace(-12, 3, 22)
    cache.hazard.load_tables(tables)
