"""The oracle of the tiny model: llama in float64 from GGUF tensors, without a cache.

It was written apart from the example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def logits_of(
    tensors: Mapping[str, NDArray[Any]], tokens: Sequence[int], *, heads: int, kv_heads: int, base: float, eps: float
) -> NDArray[np.float64]:
    """Return logits of every position [num_tokens, vocab_size].

    It computes the whole sequence at once, with rotations as complex numbers.
    """
    w = {name.removesuffix(".weight"): array.astype(np.float64) for name, array in tensors.items()}
    count = len(tokens)
    x = w["token_embd"][np.asarray(tokens)]
    layer = 0
    while f"blk.{layer}.attn_q" in w:
        blk = f"blk.{layer}."
        h = normed(x, w[blk + "attn_norm"], eps)
        q = turned((h @ w[blk + "attn_q"].T).reshape(count, heads, -1), base)
        k = turned((h @ w[blk + "attn_k"].T).reshape(count, kv_heads, -1), base)
        v = (h @ w[blk + "attn_v"].T).reshape(count, kv_heads, -1)
        k, v = (np.repeat(one, heads // kv_heads, axis=1) for one in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ w[blk + "attn_output"].T
        h = normed(x, w[blk + "ffn_norm"], eps)
        gate = h @ w[blk + "ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[blk + "ffn_up"].T)) @ w[blk + "ffn_down"].T
        layer += 1
    return np.asarray(normed(x, w["output_norm"], eps) @ w.get("output", w["token_embd"]).T)


def normed(x: NDArray[np.float64], weight: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    """RMSNorm."""
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight)


def turned(x: NDArray[np.float64], base: float) -> NDArray[np.float64]:
    """Rotate pair i of the head at position p, as a complex number.

    The factor is ``exp(1j * p * base ** (-2 i / head_dim))``.
    """
    count, _, dim = x.shape
    pairs = np.ascontiguousarray(x).view(np.complex128)
    angles = np.arange(count)[:, None] * base ** (-2 * np.arange(dim // 2) / dim)
    return (pairs * np.exp(1j * angles)[:, None]).view(np.float64)
