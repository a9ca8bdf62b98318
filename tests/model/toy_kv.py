"""The toy model's KV for a tiny cache with namespaces, whose content is read by spans."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from tests import toy

SPEC = pk.KVSpec(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_size=3, model="toy")


@lru_cache(maxsize=1 << 14)
def _whole(namespace: int, tokens: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return toy.kv(SPEC, tokens, namespace)


def kv(namespace: int, tokens: Seq[int], first: int, last: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return K and V of tokens [first, last) of a prefix.

    float32 [num_layers, last - first, num_kv_heads, head_dim].
    """
    k, v = _whole(namespace, tuple(tokens))
    return k[:, first:last], v[:, first:last]
