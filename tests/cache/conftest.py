"""A cache run by the toy model, which compares every read from every tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from tests import toy
from tests.in_blocks import cache_options

SPEC = pk.KVSpec(2, 2, 4, "float32", 4, model="toy")
BLOCK = SPEC.block_size


class Toy:
    """Runs a cache: whatever is not cached is computed, whatever is cached is compared.

    Parameters
    ----------
    cache : the cache under test.
    salt : stands for the weights; another salt gives other KV for the same tokens.
    """

    def __init__(self, cache: pk.KVCache, salt: int = 0) -> None:
        self.cache, self.spec, self.salt = cache, cache.spec, salt
        self.tokens_checked = 0

    def kv(self, tokens: Any, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return K and V of all tokens in one layer, exact in the dtype.

        float32 [num_tokens, num_kv_heads, head_dim].
        """
        k, v = toy.kv(self.spec, tokens, self.salt)
        return k[layer], v[layer]

    def new_kv(self, step: pk.Step, seqs: list[pk.Sequence], layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a step's tokens, float32 [num_tokens, num_kv_heads, head_dim]."""
        ks, vs = [], []
        for i, seq in enumerate(seqs):
            done = seq.num_computed
            k, v = self.kv(seq.tokens, layer)
            count = int(step.q_indptr[i + 1] - step.q_indptr[i])
            ks.append(k[done : done + count])
            vs.append(v[done : done + count])
        return np.concatenate(ks), np.concatenate(vs)

    def run(self, *seqs: pk.Sequence, q_lens: Any = None, lookahead: int = 0) -> None:
        """One step over these sequences."""
        with self.cache.step(seqs, q_lens=q_lens, lookahead=lookahead) as step:
            self.write(step, *seqs)

    def write(self, step: pk.Step, *seqs: pk.Sequence) -> None:
        """Write all layers of a step that is under way."""
        for layer in range(self.spec.num_layers):
            step.write(layer, *self.new_kv(step, list(seqs), layer))

    def check(self, *seqs: pk.Sequence) -> None:
        """What each sequence holds is what was computed for exactly its prefix."""
        for seq in seqs:
            tokens, done = seq.tokens, seq.num_computed
            found = [self.floats(array) for array in seq.gather()]
            for layer in range(self.spec.num_layers):
                for name, got, wanted in zip("kv", found, self.kv(tokens, layer), strict=True):
                    wrong = np.flatnonzero((got[layer] != wanted[:done]).any(axis=(1, 2)))
                    assert not wrong.size, (
                        f"layer {layer} {name}: wrong at tokens {wrong.tolist()} of {tokens.tolist()}"
                    )
            self.tokens_checked += done

    def floats(self, array: NDArray[Any]) -> NDArray[np.float32]:
        """Stored values as float32."""
        decode = self.cache.decode
        return np.asarray(decode(array) if decode else array).astype(np.float32)

    def use(self, tokens: Any, namespace: pk.Namespace | None = None) -> dict[str, int]:
        """Serve a whole request and return its non-zero hits by tier.

        Opens a sequence, checks what is cached, computes the rest, checks it, and releases.
        """
        with self.cache.sequence(tokens, namespace) as seq:
            self.check(seq)
            assert seq.num_computed == sum(seq.hit_tokens.values())
            self.run(seq)
            self.check(seq)
            return {tier: count for tier, count in seq.hit_tokens.items() if count}


def prompt(start: int, num_tokens: int = 3 * BLOCK + 1) -> list[int]:
    """Return tokens that share no prefix with a prompt of another start.

    By default the cache keeps three whole blocks of them.
    """
    return [1000 * start + i for i in range(num_tokens)]


def where(cache: pk.KVCache, tokens: Any, namespace: pk.Namespace | None = None) -> list[tuple[str, int]]:
    """The runs of a prompt as (tier, blocks)."""
    return [(str(run.tier), len(run.block_ids)) for run in cache.explain(tokens, namespace).runs]


class QueueClock:
    """The clock of a cache's mover from now on: it stands still until it is turned."""

    def __init__(self, cache):
        self.now, self._cache = 0.0, cache
        cache._storage.carrier._queue.clock = lambda: self.now

    def turn(self, seconds):
        """So many seconds pass, and what is overdue by then is given up."""
        self.now += seconds
        self._cache.stats()


def all_free(cache: pk.KVCache) -> bool:
    """Whether only the tree holds blocks, in every tier, once all moves have ended."""
    until = time.monotonic() + 60
    while cache.stats().placement["in_flight"] and time.monotonic() < until:
        time.sleep(0.001)
    return all(counts["live"] == 0 for counts in cache.stats().blocks.values())


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Callable[..., pk.KVCache]]:
    """Opens caches, and checks the books of each one at the end.

    ``disk=n`` is a disk of n blocks; all caches of a test use the same place.
    """
    opened: list[pk.KVCache] = []

    def open_it(device: Any = 16, spec: pk.KVSpec = SPEC, disk: Any = None, **options: Any) -> pk.KVCache:
        if isinstance(disk, int):
            disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(disk))
        cache = pk.KVCache(spec, **cache_options(device=device, disk=disk, **options))
        opened.append(cache)
        return cache

    yield open_it
    for cache in opened:
        cache.check_integrity()
        cache.close()
