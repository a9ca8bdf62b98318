"""Clients of one cache under a schedule.

They open, compute, read, prefetch, cancel, purge and release.

Whatever a sequence holds is compared with what was computed for exactly its namespace and prefix, at every turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

import pagedkv as pk
from pagedkv._core.chain_key import ROOT_PARENT, chain_keys
from pagedkv._core.no_token import NO_TOKEN
from tests.model.toy_kv import SPEC, kv
from tests.reliability.virtual_cache import Scene

NAMESPACES = (None, pk.Namespace(tenant="a"))
SIZE = SPEC.block_size


class Requests:
    """What clients of `cache` do.

    Attributes
    ----------
    reads : tokens compared.
    hits : tokens found, by tier.
    """

    def __init__(self, scene: Scene, cache: pk.KVCache) -> None:
        self.scene, self.cache = scene, cache
        self.reads = 0
        self.known: set[tuple[int, int, tuple[int, ...]]] = set()  # namespace, its epoch, prefix: computed by a client
        self.epochs = [0, 0]

    def read(self, seq: pk.Sequence, namespace: int) -> None:
        tokens, done = seq.tokens.tolist(), seq.num_computed
        for found, wanted in zip(seq.gather(), kv(namespace, tokens, 0, done), strict=True):
            assert np.array_equal(found, wanted), f"wrong KV in {tokens}, of which {done} are computed"
        self.reads += done

    def serve(self, tokens: Sequence[int], namespace: int, turns: int) -> None:
        """One request; the sequence is held, and read, for so many turns after it is computed."""
        epoch = self.epochs[namespace]
        try:
            seq = self.cache.sequence(tokens, NAMESPACES[namespace])
        except pk.OutOfBlocks:
            self.scene.seen["no room"] += 1
            return
        for tier, count in seq.hit_tokens.items():
            self.scene.seen[f"hits {tier}"] += int(count > 0)
        prefix = tuple(tokens[: seq.num_computed])
        epochs = range(epoch, self.epochs[namespace] + 1)  # more than one if it was purged while it was opened
        known = not prefix or any((namespace, since, prefix) in self.known for since in epochs)
        assert known, f"a hit on {prefix} of namespace {namespace}, which was not computed since the last purge"
        try:
            self.read(seq, namespace)
            self.scene.schedule.give_way()
            self.read(seq, namespace)
            self.known.update((namespace, since, tuple(tokens[:i])) for since in epochs for i in range(len(tokens) + 1))
            try:
                seq.scatter(*kv(namespace, tokens, seq.num_computed, len(tokens)))
            except pk.OutOfBlocks:
                self.scene.seen["no room"] += 1
                return
            for _ in range(turns):
                self.read(seq, namespace)
                self.scene.schedule.give_way()
            self.read(seq, namespace)
        finally:
            seq.release()

    def prefetch(self, tokens: Sequence[int], namespace: int, cancel: bool) -> None:
        """Ask for it, perhaps think better of it, and wait."""
        ahead = self.cache.prefetch(tokens, NAMESPACES[namespace])
        self.scene.schedule.give_way()
        if cancel:
            self.scene.seen["prefetches cancelled"] += int(ahead.cancel())
        self.scene.schedule.wait(ahead.done)
        there = ahead.wait(0)
        assert there <= len(tokens)
        self.scene.seen["prefetched"] += int(there > 0)

    def purge(self, namespace: int) -> None:
        """A later hit has to be computed after this."""
        self.epochs[namespace] += 1
        self.cache.purge(NAMESPACES[namespace])
        self.scene.seen["purges"] += 1

    def check_store(self) -> None:
        """A restart would find nothing that was purged."""
        store = self.cache._store
        if store is None:
            return
        keys = set()
        for namespace, since, tokens in self.known:
            if since == self.epochs[namespace]:
                digest = (NAMESPACES[namespace] or pk.Namespace()).digest()
                filled = np.array([*tokens, *[NO_TOKEN] * (-len(tokens) % SIZE)], np.int32)  # a remainder, too
                keys.update(chain_keys(store.secret, digest, ROOT_PARENT, filled, SIZE))
        assert all(found.record.key in keys for found in store.records()), "the disk holds what was purged"


def prompt(rng: Random, length: int) -> list[int]:
    """One of few prompts of that many tokens, so that they share prefixes."""
    first = rng.randint(0, 2)
    return [first] * SIZE + [rng.randint(0, 1) if i % SIZE == 0 else first for i in range(max(0, length - SIZE))]


def some_client(requests: Requests, rng: Random) -> Callable[[], None]:
    """Return a client with a life of one to four requests.

    All chances are taken now, so that only the schedule differs.
    """
    todo: list[Callable[[], object]] = []
    for _ in range(rng.randint(1, 4)):
        tokens, namespace = prompt(rng, rng.randint(1, 5 * SIZE)), int(rng.random() < 0.25)
        kind, turns, cancel = rng.random(), rng.randint(0, 2), rng.random() < 0.3
        if kind < 0.7:
            todo.append(lambda t=tokens, n=namespace, turns=turns: requests.serve(t, n, turns))
        elif kind < 0.95:
            todo.append(lambda t=tokens, n=namespace, c=cancel: requests.prefetch(t, n, c))
        else:
            todo.append(lambda n=namespace: requests.purge(n))

    def live() -> None:
        for one in todo:
            one()
            requests.scene.schedule.give_way()

    return live
