"""Rows of K and V of ggml's types as numbers, for comparing them; others stay bytes.

A block of q8_0 is a float16 scale and 32 int8; one of q4_0 a float16 scale and 16 bytes with two numbers each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30  # ggml's numbers of these types
_BLOCK = 32  # numbers with a scale


def numbers_of(rows: NDArray[Any], kind: int) -> NDArray[Any]:
    """Rows [..., words] of one of ggml's types as float32 [..., numbers].

    Types that are not known here stay uint8.
    """
    data = rows.view(np.uint8)
    if kind == F32:
        return data.view(np.float32)
    if kind == F16:
        return data.view(np.float16).astype(np.float32)
    if kind == BF16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind == Q8_0:
        blocks = data.reshape(*data.shape[:-1], -1, 2 + _BLOCK)
        return _scaled(blocks, blocks[..., 2:].view(np.int8))
    if kind == Q4_0:
        blocks = data.reshape(*data.shape[:-1], -1, 2 + _BLOCK // 2)
        packed = blocks[..., 2:]
        return _scaled(blocks, np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8) - 8)
    return data


def _scaled(blocks: NDArray[np.uint8], numbers: NDArray[np.int8]) -> NDArray[np.float32]:
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    values: NDArray[np.float32] = numbers * scales
    return values.reshape(*values.shape[:-2], -1)
