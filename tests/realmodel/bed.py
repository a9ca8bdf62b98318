"""A test bed: a model, prompts with golden results, and what the model computes cold.

The golden tokens and logits come from elsewhere.

Tokens are compared at every step, and the golden ones are followed, so that a near-tie cannot send two runs apart: of
tokens whose logits lie within the bed's `tie` of the best, any may win.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import pagedkv as pk
from examples.llama_numpy.errors import WeightsMissing
from examples.llama_numpy.model import Llama
from tests.in_blocks import cache_options
from tests.realmodel import plain_llama, tiny

COLD_TOLERANCE = 1e-3  # of a logit, between two runs of ours
STEPS = 6  # tokens that a scenario decodes
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Golden:
    """A prompt, the tokens that follow it greedily, and the 20 largest logits of each.

    Attributes
    ----------
    ids, greedy : token ids.
    top_ids, top_logits : [len(greedy), 20], the largest first.
    """

    ids: list[int]
    greedy: list[int]
    top_ids: NDArray[np.int64]
    top_logits: NDArray[np.float64]

    @classmethod
    def from_logits(cls, ids: list[int], greedy: list[int], logits: NDArray[np.float64]) -> Golden:
        """From all logits [len(greedy), vocab_size]."""
        order = np.argsort(-logits, axis=1)[:, :20]
        return cls(ids, greedy, order, np.take_along_axis(logits, order, axis=1))


@dataclass(frozen=True, slots=True)
class Cold:
    """Logits of a prompt's continuation, computed with nothing cached.

    [len(greedy), vocab_size].
    """

    logits: Logits


class Bed:
    """What a scenario runs on.

    Parameters
    ----------
    name : of the model, for its cache.
    path : of its GGUF.
    model : Llama, or Gemma.
    goldens : by name of the prompt; the same names in every bed.
    block_size : of the caches that it opens.
    tie : of the tokens whose golden logits are this close to the best, any may win.
    tolerance : of a golden logit.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        model: Llama,
        goldens: dict[str, Golden],
        *,
        block_size: int,
        tie: float,
        tolerance: float,
    ) -> None:
        self.path, self.model, self.goldens = path, model, goldens
        self.tie, self.tolerance, self.block_size = tie, tolerance, block_size
        self.spec = model.config.kv_spec(name, block_size=block_size)

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def whole(self, num_tokens: int) -> int:
        """Tokens of the whole blocks among so many."""
        return num_tokens // self.block_size * self.block_size

    def so_far(self, name: str, count: int = 0) -> list[int]:
        """A prompt and the first golden tokens behind it."""
        golden = self.goldens[name]
        return golden.ids + golden.greedy[:count]

    def open(self, num_tokens: int, **options: Any) -> pk.KVCache:
        """A cache whose device holds so many tokens."""
        return pk.KVCache(self.spec, **cache_options(device=self.blocks(num_tokens), **options))

    @functools.cached_property
    def cold(self) -> dict[str, Cold]:
        """Compute every prompt in a namespace of its own, so that nothing is shared.

        Prompts come in chunks, then all decode together.
        """
        longest = {name: len(golden.ids) + len(golden.greedy) for name, golden in self.goldens.items()}
        with one_blas_thread(), self.open(sum(longest.values()) + len(longest) * self.block_size) as cache:
            seqs = {name: cache.sequence(self.goldens[name].ids, pk.Namespace(tenant=name)) for name in longest}
            logits: dict[str, list[Logits]] = {name: [] for name in longest}
            for name, seq in seqs.items():
                while seq.num_computed < seq.num_tokens:
                    with cache.step([seq], q_lens=[min(256, seq.num_tokens - seq.num_computed)]) as step:
                        last = self.model.forward(step)
                logits[name].append(last[0])
            for place in range(max(len(golden.greedy) for golden in self.goldens.values()) - 1):
                going = [name for name, golden in self.goldens.items() if place + 1 < len(golden.greedy)]
                for name in going:
                    seqs[name].append(self.goldens[name].greedy[place])
                with cache.step([seqs[name] for name in going]) as step:
                    for name, row in zip(going, self.model.forward(step), strict=True):
                        logits[name].append(row)
            assert all(not any(seq.hit_tokens.values()) for seq in seqs.values())
            for seq in seqs.values():
                seq.release()
            cache.check_integrity()
        return {name: Cold(np.stack(rows)) for name, rows in logits.items()}

    def decode(self, cache: pk.KVCache, seq: pk.Sequence, name: str, *, start: int = 0, count: int = STEPS) -> None:
        """Continue with a prompt's golden tokens, from the one at `start`.

        Each step must match the cold logits and choose the golden token.
        """
        for place in range(start, start + count):
            with cache.step([seq]) as step:
                logits = self.model.forward(step)
            self.check(name, place, logits[0])
            seq.append(self.goldens[name].greedy[place])

    def check(self, name: str, place: int, logits: Logits) -> None:
        """Check that logits [vocab_size] for token `place` match the cold run's.

        They must also choose the golden token.
        """
        np.testing.assert_allclose(logits, self.cold[name].logits[place], rtol=0, atol=COLD_TOLERANCE)
        self.check_token(name, place, logits)

    def check_token(self, name: str, place: int, logits: Logits) -> None:
        """The best token is the golden one, or at a near-tie one of those that tie."""
        golden = self.goldens[name]
        top = golden.top_logits[place]
        allowed = golden.top_ids[place][top >= top[0] - self.tie]
        assert int(np.argmax(logits)) in allowed.tolist(), f"token {place} behind {name!r}: {allowed} expected"


def weights_from(source: Any) -> Path:
    """A real model's file, downloaded once into the user's cache directory.

    Where it cannot be had the test is skipped, or fails if PAGEDKV_REQUIRE_REALMODEL says so.
    """
    if source.find() is None:
        try:
            source.download()
        except WeightsMissing as problem:
            if os.environ.get("PAGEDKV_REQUIRE_REALMODEL"):
                raise
            pytest.skip(f"no weights of a real model here: {problem}")
    found: Path = source.find_checked()
    return found


def one_blas_thread() -> AbstractContextManager[object]:
    """Small products are faster on one thread, and other tests are left some."""
    return threadpool_limits(1, user_api="blas")


def kv_of(seq: pk.Sequence, num_tokens: int, last: int | None = None) -> bytes:
    """The stored K and V of a sequence's first tokens, or of the `last` ones of them."""
    k, v = seq.gather(0 if last is None else num_tokens - last, num_tokens)
    return bytes(k.tobytes() + v.tobytes())


def fill_device(cache: pk.KVCache) -> None:
    """Pressure: another tenant's sequence takes every block of the device, and lets go."""
    num_tokens = cache.stats().blocks["device"]["max"] * cache.spec.block_size
    with cache.sequence(np.full(num_tokens, 7), pk.Namespace(tenant="pressure")) as seq:
        spec = cache.spec
        zeros = np.zeros((1, num_tokens - seq.num_computed, spec.num_kv_heads, spec.head_dim), spec.np_dtype)
        seq.scatter(*[np.broadcast_to(zeros, (spec.num_layers, *zeros.shape[1:]))] * 2)


def all_down(cache: pk.KVCache) -> None:
    """All cached blocks that no sequence holds leave the device, for the tier below if any."""
    placement = cache.placement
    pool = placement.pools[0]
    assert pool is not None
    most, others = pool.num_obtainable, placement.num_groups - 1
    cache.moves.make_room(np.array([most] + [0] * others) if others else most)


def read_goldens(path: Path) -> dict[str, Golden]:
    """The goldens of the real model."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Golden(one["ids"], one["greedy"], np.array(one["top_ids"]), np.array(one["top_logits"]))
        for name, one in stored.items()
    }


def tiny_logits(tensors: tiny.Tensors, tokens: Sequence[int]) -> NDArray[np.float64]:
    """The oracle's logits [num_tokens, vocab_size] of the tiny model."""
    shape = {"heads": tiny.HEADS, "kv_heads": tiny.KV_HEADS, "base": tiny.BASE, "eps": tiny.EPS}
    return plain_llama.logits_of(tensors, tokens, **shape)  # type: ignore[arg-type]


def tiny_goldens(tensors: tiny.Tensors) -> dict[str, Golden]:
    """Those of the tiny llama."""
    return goldens_of(lambda tokens: tiny_logits(tensors, tokens), range(len(tiny.SPECIALS), len(tiny.TOKENS)))


def goldens_of(logits_of: Callable[[list[int]], NDArray[np.float64]], among: range) -> dict[str, Golden]:
    """Make random prompts like the real model's, continued greedily by an oracle.

    They have the same names and like lengths.

    Parameters
    ----------
    logits_of : the oracle: logits of every position.
    among : tokens to draw from.
    """
    draw = np.random.default_rng(5)

    def some(count: int) -> list[int]:
        return draw.integers(among.start, among.stop, count).tolist()

    system = some(171)
    prompts = {
        "france": some(5), "code": some(13), "mixed": some(59), "table": some(300), "shared_a": [*system, *some(2)],
        "shared_b": [*system, *some(2)], "single": some(1),
    }  # fmt: skip
    goldens = {}
    for name, ids in prompts.items():
        greedy: list[int] = []
        for _ in range(16):
            logits = logits_of(ids + greedy)
            greedy.append(int(np.argmax(logits[-1])))
        goldens[name] = Golden.from_logits(ids, greedy, logits[len(ids) - 1 :])
    return goldens
