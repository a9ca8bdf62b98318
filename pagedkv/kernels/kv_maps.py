"""Tensor maps of a layer's K and V."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.kernels.backend import Backend

PANEL_BYTES = 128  # of a token's K or V that one copy brings: the width of the swizzle


def kv_map(backend: Backend, array: Any, box_tokens: int) -> NDArray[np.void]:
    """The tensor map of [num_blocks, block_size, num_kv_heads, head_dim].

    A box is 128 bytes of so many tokens.
    """
    num_blocks, block_size, num_heads, head_dim = array.shape
    block, token, head, _ = array.strides
    box = (PANEL_BYTES // array.dtype.itemsize, 1, box_tokens, 1)
    return backend.tensor_map(array, (head_dim, num_heads, block_size, num_blocks), (head, token, block), box, 128)
