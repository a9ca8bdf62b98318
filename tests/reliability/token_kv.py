"""Serves a request with the toy model, by the name of its weights.

It returns what the request met, and how much of that was wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from tests import toy

SPEC = pk.KVSpec(1, 1, 8, "float32", 4, model="token kv")


@dataclass(frozen=True)
class Served:
    """What a request met: cached tokens whose KV was wrong, and hit tokens by tier."""

    wrong: int
    hits: dict[str, int]


def kv_of(weights: str, tokens: Sequence[int] | NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return K and V of all tokens, float32 [1, num_tokens, 1, 8].

    `weights` names the model's weights.
    """
    salt = int.from_bytes(hashlib.blake2b(weights.encode(), digest_size=7).digest(), "little")
    return toy.kv(SPEC, tokens, salt)


def wrong_tokens(seq: pk.Sequence, weights: str) -> int:
    """How many cached tokens of a sequence are not what was computed for exactly that prefix."""
    wanted_k, wanted_v = kv_of(weights, seq.tokens[: seq.num_computed])
    k, v = seq.gather()
    return int(((k != wanted_k) | (v != wanted_v)).any(axis=(0, 2, 3)).sum())


def serve(cache: pk.KVCache, prompt: Sequence[int], namespace: pk.Namespace | None, weights: str) -> Served:
    """Open, check what is cached, compute the rest."""
    with cache.sequence(prompt, namespace) as seq:
        found = Served(wrong_tokens(seq, weights), dict(seq.hit_tokens))
        compute_rest(seq, weights)
        return found


def compute_rest(seq: pk.Sequence, weights: str) -> None:
    """What a model would do with the tokens that were not cached."""
    k, v = kv_of(weights, seq.tokens)
    seq.scatter(k[:, seq.num_computed :], v[:, seq.num_computed :])
