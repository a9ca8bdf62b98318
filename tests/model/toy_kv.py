"""KV that follows from namespace, whole token prefix and layer, so that a wrong block anywhere is a wrong read."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk

SPEC = pk.KVSpec(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_size=3, model="toy")
PLACES = np.arange(4, dtype=np.int64).reshape(2, 1, 2) * 2 + 1  # of K and V of one token


@lru_cache(maxsize=1 << 16)
def _number(namespace: int, prefix: tuple[int, ...]) -> int:
    before = _number(namespace, prefix[:-1]) if prefix else namespace + 1
    token = prefix[-1] if prefix else 0
    return ((before ^ token) * 6364136223846793005 + 1442695040888963407) % (1 << 61)


@lru_cache(maxsize=1 << 14)
def _all_layers(namespace: int, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    numbers = [_number(namespace, tokens[:i]) >> 20 for i in range(1, len(tokens) + 1)]
    chain = np.array(numbers, np.int64).reshape(1, -1, 1, 1, 1)
    layers = np.arange(SPEC.num_layers, dtype=np.int64).reshape(-1, 1, 1, 1, 1)
    return ((chain * PLACES + layers * 7919) % (1 << 20)).astype(np.float32)  # exact in float32


def kv(namespace: int, tokens: Seq[int], first: int, last: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """K and V of tokens [first, last) of a prefix, float32 [num_layers, last - first, num_kv_heads, head_dim]."""
    values = _all_layers(namespace, tuple(tokens))[:, first:last]
    return values[:, :, 0], values[:, :, 1]
