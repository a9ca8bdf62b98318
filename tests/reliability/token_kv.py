"""Serves a request with the toy model, by the name of its weights.

It returns what the request met, and how much of that was wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from tests import toy

SPEC = pk.KVSpec(1, 1, 8, "float32", 4, model="token kv")
GROUPED = pk.KVSpec.of(
    [pk.Attention(1, 8), pk.Attention(1, 8, window=5), pk.Attention(1, 8, window=5)], dtype="float32", block_size=4,
    model="token kv by groups",
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """What a request met: cached tokens whose KV was wrong, and hit tokens by tier."""

    wrong: int
    hits: dict[str, int]


def kv_of(
    weights: str, tokens: Sequence[int] | NDArray[np.int32], spec: pk.KVSpec = SPEC
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return K and V of all tokens, float32 [num_layers, num_tokens, 1, 8].

    `weights` names the model's weights.
    """
    salt = int.from_bytes(hashlib.blake2b(weights.encode(), digest_size=7).digest(), "little")
    return toy.kv(spec, tokens, salt)


def wrong_tokens(seq: pk.Sequence, weights: str) -> int:
    """How many cached tokens of a sequence are not what was computed for exactly that prefix."""
    wanted_k, wanted_v = kv_of(weights, seq.tokens[: seq.num_computed])
    k, v = seq.gather()
    return int(((k != wanted_k) | (v != wanted_v)).any(axis=(0, 2, 3)).sum())


def wrong_in_pages(cache: pk.KVCache, seq: pk.Sequence, weights: str) -> int:
    """The same over groups of layers, as far back as each layer keeps its tokens."""
    size, computed, wrong = cache.spec.block_size, seq.num_computed, set()
    for layer, wanted in enumerate(np.stack(kv_of(weights, seq.tokens[:computed], cache.spec), axis=1)):
        kv: Any = cache._storage.kv
        group, _ = kv.group_of(layer)
        first, pages = cache.table.pages(seq.row, group) if group else (0, cache.table.blocks(seq.row))
        for found, right in zip(kv.layer(layer), wanted, strict=True):
            rows = found[pages].reshape(-1, 8)[: computed - first * size]
            wrong |= set((np.flatnonzero((rows != right[first * size :, 0]).any(axis=1)) + first * size).tolist())
    return len(wrong)


def serve(cache: pk.KVCache, prompt: Sequence[int], namespace: pk.Namespace | None, weights: str) -> Served:
    """Open, check what is cached, compute the rest."""
    with cache.sequence(prompt, namespace) as seq:
        grouped = cache.placement.num_groups > 1
        wrong = wrong_in_pages(cache, seq, weights) if grouped else wrong_tokens(seq, weights)
        found = Served(wrong, dict(seq.hit_tokens))
        compute_rest(seq, weights, cache.spec)
        return found


def compute_rest(seq: pk.Sequence, weights: str, spec: pk.KVSpec = SPEC) -> None:
    """What a model would do with the tokens that were not cached."""
    k, v = kv_of(weights, seq.tokens, spec)
    seq.scatter(k[:, seq.num_computed :], v[:, seq.num_computed :])
