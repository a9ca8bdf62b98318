"""Attention in one pass over blocks.

A running maximum, a running sum, a result rescaled when the maximum rises.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.reference import OnlineState


def online_attention(query: Any, key_blocks: list[Any], value_blocks: list[Any]) -> Any:
    """Attention of a query over blocks, each seen once.

    The query is [num_heads, head_dim], a block [block_size, num_heads, head_dim].
    """
    num_heads, head_dim = query.shape
    state = OnlineState(num_heads, 1, head_dim)
    for keys, values in zip(key_blocks, value_blocks, strict=True):
        scores = np.einsum("hd,thd->ht", query, keys) / np.sqrt(head_dim)
        state.update(scores[:, None], values.swapaxes(0, 1))
    output, _ = state.finish()
    return output[:, 0]


def standard_attention(query: Any, keys: Any, values: Any) -> Any:
    """The same as textbooks write it: all scores, their softmax, one product."""
    scores = np.einsum("hd,thd->ht", query, keys) / np.sqrt(query.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)


def main() -> None:
    draw = np.random.default_rng(0)
    query = draw.standard_normal((8, 64))
    keys, values = draw.standard_normal((2, 5 * 16 - 3, 8, 64))  # five blocks of 16, the last not full
    starts = range(0, len(keys), 16)
    output = online_attention(query, [keys[i : i + 16] for i in starts], [values[i : i + 16] for i in starts])
    difference = np.abs(output - standard_attention(query, keys, values)).max()
    print(f"output {output.shape}, largest difference from standard attention {difference:.1e}")
    assert difference < 1e-14


if __name__ == "__main__":
    main()
