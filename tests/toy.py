"""The toy model of all tests: KV that follows from the weights and every token so far.

So tests can check what they read.

A block in the wrong place, of another namespace, or from before, holds other numbers than its reader expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.spec.dtypes import LARGEST

# Whole numbers below are exact in the dtype; in a quantised one where the scale is 1.
EXACT = {
    "float32": 1 << 20, "float16": 1 << 10, "bfloat16": 1 << 7, "int8": 1 << 7, "float8_e4m3": 1 << 4,
    "float8_e5m2": 1 << 3,
}  # fmt: skip


def chain(tokens: Sequence[int] | NDArray[Any], salt: int = 0) -> NDArray[np.int64]:
    """Return a number per token that follows from the salt and all tokens up to it.

    Read-only int64 [num_tokens], each below 2**41.

    Parameters
    ----------
    salt : stands for the weights, or for the namespace; 0 or more.
    """
    return _chain(np.asarray(tokens, np.int32).tobytes(), salt)


@lru_cache(maxsize=1 << 14)
def _chain(tokens: bytes, salt: int) -> NDArray[np.int64]:
    state, out = salt + 1, []
    for token in np.frombuffer(tokens, np.int32).tolist():
        state = (state * 6364136223846793005 + token * 2654435761 + 1442695040888963407) % (1 << 61)
        out.append(state >> 20)
    numbers = np.array(out, np.int64)
    numbers.flags.writeable = False
    return numbers


def kv(
    spec: pk.KVSpec, tokens: Sequence[int] | NDArray[Any], salt: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return K and V of all tokens in all layers.

    float32 [num_layers, num_tokens, num_kv_heads, head_dim].

    They are whole numbers that are exact in the dtype of the spec. Where it has scales, each row begins with the
    dtype's largest number, so that a computed scale is 1.
    """
    places = np.arange(2 * spec.num_kv_heads * spec.head_dim, dtype=np.int64) * 2 + 1
    layers = np.arange(spec.num_layers, dtype=np.int64).reshape(-1, 1, 1, 1, 1) * 7919
    places = places.reshape(2, spec.num_kv_heads, spec.head_dim)
    whole = (chain(tokens, salt)[None, :, None, None, None] * places + layers) % EXACT[spec.dtype]
    if spec.scales is not None:
        whole[..., 0] = LARGEST[spec.dtype]
    return whole[:, :, 0].astype(np.float32), whole[:, :, 1].astype(np.float32)
