"""A stand-in for a model: KV that follows from the weights and every token so far, so that each hit can be checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk

SPEC = pk.KVSpec(1, 1, 8, "float32", 4, model="token kv")


@dataclass(frozen=True)
class Served:
    """What a request met: cached tokens whose KV was wrong, and hit tokens by tier."""

    wrong: int
    hits: dict[str, int]


def kv_of(weights: str, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """K [1, n, 1, 8]; V is its negative."""
    state, rows = hashlib.blake2b(weights.encode(), digest_size=32), []
    for token in tokens.tolist():
        state.update(token.to_bytes(4, "little"))
        rows.append(state.copy().digest())
    whole = np.frombuffer(b"".join(rows), np.uint32).reshape(1, len(rows), 1, 8) >> 8
    return whole.astype(np.float32)  # 24 bits: exact


def wrong_tokens(seq: pk.Sequence, weights: str) -> int:
    """How many cached tokens of a sequence are not what was computed for exactly that prefix."""
    wanted = kv_of(weights, seq.tokens[: seq.num_computed])
    k, v = seq.gather()
    return int(((k != wanted) | (v != -wanted)).any(axis=(0, 2, 3)).sum())


def serve(cache: pk.KVCache, prompt: Sequence[int], namespace: pk.Namespace | None, weights: str) -> Served:
    """Open, check what is cached, compute the rest."""
    with cache.sequence(prompt, namespace) as seq:
        found = Served(wrong_tokens(seq, weights), dict(seq.hit_tokens))
        compute_rest(seq, weights)
        return found


def compute_rest(seq: pk.Sequence, weights: str) -> None:
    """What a model would do with the tokens that were not cached."""
    rest = kv_of(weights, seq.tokens)[:, seq.num_computed :]
    seq.scatter(rest, -rest)
