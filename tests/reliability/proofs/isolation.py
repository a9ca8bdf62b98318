"""Isolation both ways.

What must not share never does, on any level; what is the same always shares.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

import pagedkv as pk
from pagedkv._core.chain_key import ROOT_PARENT, chain_key, chain_keys
from tests.reliability import small_store as small
from tests.reliability.namespace_pairs import copied, decode, given, pair
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.token_kv import GROUPED, SPEC, serve

SECRET = bytes(range(32))
ONE_IN = 250  # pairs go through a whole cache; all others stop at the names under which blocks are kept
PER_CACHE = 8  # pairs that share one; every second cache is by groups of layers
ROOM_OF_GROUPS = 2  # times as much memory: an extent holds the pages of one group
PROMPT = list(range(50, 63))  # three blocks and a token
FILLER = pk.Namespace(tenant="filler", extra=b"pushes all others down")


def check_names(choose: random.Random, tally: Tally) -> None:
    """Check that different namespaces have different keys, digests and chain keys.

    The same namespace, made anew, has the same.
    """
    kind, fields, others = pair(choose)
    here, there, again = pk.Namespace(**fields), pk.Namespace(**others), copied(fields)
    tally.add(kind)
    how = f"{kind}: {fields} and {others}"
    if here == there or here.key() == there.key() or here.digest() == there.digest():
        tally.fail(f"{how} are one namespace")
    if decode(here.key()) != given(fields) or decode(there.key()) != given(others):
        tally.fail(f"{how}: the encoding cannot be read back")
    if (here, hash(here), here.key()) != (again, hash(again), again.key()):
        tally.fail(f"{fields} twice are two namespaces")
    tokens = np.array(choose.choices(range(-2, 3), k=4), np.int32)
    names = {name.digest(): chain_keys(SECRET, name.digest(), ROOT_PARENT, tokens, 2) for name in (here, there)}
    if set(names[here.digest()]) & set(names[there.digest()]):
        tally.fail(f"{how} share a chain key")
    if chain_keys(SECRET, again.digest(), ROOT_PARENT, tokens.tolist(), 2) != names[here.digest()]:
        tally.fail(f"{fields} twice have two chain keys")


def check_chain(choose: random.Random, tally: Tally) -> None:
    """Check that the same bytes, split otherwise, name other blocks.

    The split is between namespace, parent, tokens and extra digests.
    """
    digest, parent, extra = (choose.randbytes(32) for _ in range(3))
    tokens = np.frombuffer(choose.randbytes(32), np.int32)
    spread = np.concatenate((tokens, np.frombuffer(extra, np.int32)))
    names = [
        (digest, parent, tokens, extra), (digest, parent, spread, b""), (digest, parent, tokens, b""),
        (parent, digest, tokens, extra), (digest, extra, tokens, parent), (digest, parent, tokens, extra + parent),
        (digest, parent, tokens[:4], extra), (digest, parent, tokens[::-1], extra),
        (digest, ROOT_PARENT, tokens, extra),
    ]  # fmt: skip
    keys = {chain_key(SECRET, *name) for name in names}
    if len(keys) < len(names):
        tally.fail(f"two splits of {(digest, parent, tokens.tobytes(), extra)} have one key")
    if chain_key(SECRET, digest, parent, tokens.tolist(), extra) not in keys:
        tally.fail("a name twice has two keys")
    if chain_key(SECRET[::-1], *names[0]) in keys:
        tally.fail("another store's secret gives the same key")
    tally.add("split otherwise")


class Shared:
    """One cache for several pairs of namespaces.

    All use the same prompt, and each namespace has weights of its own. Over groups of layers the bytes of all groups
    are compared.
    """

    def __init__(self, path: Path, choose: random.Random, count: int, tally: Tally, *, by_group: bool) -> None:
        self.path, self.tally, self.by_group = path, tally, by_group
        self.pairs = [pair(choose)[1:] for _ in range(count)]
        self.disk = pk.Disk(str(path), pk.Blocks(8 * 6 * PER_CACHE), segment_size=pk.Bytes(64 * 8192), admission="all")

    def play(self) -> None:
        """Side by side, moved down, reopened, purged, reopened."""
        with self._cache() as cache:
            for number, (mine, theirs) in enumerate(self.pairs):
                known = {pk.Namespace(**fields) for one in self.pairs[:number] for fields in one}
                for fields in (mine, theirs):
                    if pk.Namespace(**fields) not in known:
                        self._ask(cache, fields, "never asked before", hit=False)
                for fields in (mine, theirs):
                    self._ask(cache, fields, "asked just before", hit=True)
            self._all(cache, "asked again", gone=set())
            self._push_down(cache)
            self._all(cache, "pushed down", gone=set())
            self._push_down(cache)
        with self._cache() as cache:
            self._all(cache, "reopened", gone=set())
            gone = {pk.Namespace(**mine) for mine, _ in self.pairs}
            for namespace in gone:
                cache.purge(namespace)
            self._purged(cache, gone, "purged")
            self._push_down(cache)
        with self._cache() as cache:
            self._purged(cache, gone, "purged and reopened")
        self.tally.add(f"pairs through a cache{' by groups' * self.by_group}", len(self.pairs))

    def _cache(self) -> pk.KVCache:
        if self.by_group:
            sizes = pk.Blocks(8 * ROOM_OF_GROUPS), pk.Blocks(6 * ROOM_OF_GROUPS)
            return pk.KVCache(GROUPED, *sizes, self.disk, by_group=True)
        return pk.KVCache(SPEC, pk.Blocks(8), pk.Blocks(6), self.disk)

    def _push_down(self, cache: pk.KVCache) -> None:
        for start in range(5):
            serve(cache, [1000 + start, *PROMPT], FILLER, "filler")

    def _all(self, cache: pk.KVCache, when: str, gone: set[pk.Namespace]) -> None:
        for fields in reversed([fields for one in self.pairs for fields in one]):  # the latest first: from every tier
            if pk.Namespace(**fields) not in gone:
                self._ask(cache, fields, when, hit=True)

    def _purged(self, cache: pk.KVCache, gone: set[pk.Namespace], when: str) -> None:
        for namespace in gone:
            if cache.explain(PROMPT, namespace).cached_tokens:
                self.tally.fail(f"{when}: {namespace} is there still")
        self._all(cache, f"neighbour {when}", gone)

    def _ask(self, cache: pk.KVCache, fields: dict[str, object], when: str, *, hit: bool) -> None:
        namespace = copied(fields)
        served = serve(cache, PROMPT, namespace, repr(sorted(given(fields).items())))
        tokens = sum(served.hits.values())
        if served.wrong:
            self.tally.fail(f"{when}: {namespace} was served another's KV")
        if (tokens > 0) != hit:
            self.tally.fail(f"{when}: {namespace} hit {tokens} tokens")
        self.tally.hits += tokens // SPEC.block_size
        for tier, count in served.hits.items():
            self.tally.add(f"hit tokens, {tier}{' by groups' * self.by_group}", count)


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Run pairs of names, of which one in `ONE_IN` goes through a cache.

    Of the others, every fifth splits a block's name; the rest are two namespaces.
    """
    tally, choose = Tally(), random.Random(seed)
    with small.quiet(), small.scratch() as folder:
        through = 0
        while tally.count < count:
            here = min(count - tally.count, ONE_IN * PER_CACHE)
            shared = max(here // ONE_IN, 1)
            Shared(folder / str(through), choose, shared, tally, by_group=through % 2 == 1).play()
            through += 1
            for number in range(here - shared):
                (check_chain if number % 5 == 0 else check_names)(choose, tally)
            tally.count += here
            tick(here)
    if through > 1:
        tally.require(*(f"hit tokens, {tier} by groups" for tier in ("device", "host", "disk")))
    return tally


PROOF = Proof(
    claim=f"namespaces that differ in one field, or by bytes moved between fields, never share a name or (one in "
    f"{ONE_IN}, through three tiers, reopening and purging, half of them by groups of layers) a block; the same one "
    f"always does",
    unit="pairs",
    quick=20_000,
    full=1_000_000,
    run=run,
)
