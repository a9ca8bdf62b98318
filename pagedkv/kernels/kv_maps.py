"""Parameters of the kernels that read K and V through tensor maps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import Tiling
from pagedkv.kernels.params import Params, fill

PANEL_BYTES = 128  # of a token's K or V that one copy brings: the width of the swizzle


def with_tensor_maps(backend: Backend, tiling: Tiling, attention: Params, k: Any, v: Any) -> Params:
    """TmaAttentionParams: those of every attention kernel, with a map of K and one of V."""
    maps = {name: {"o": _kv_map(backend, array, tiling.box_tokens)} for name, array in (("k_map", k), ("v_map", v))}
    params = fill("TmaAttentionParams", attention=attention.record[0], **maps)
    return Params(params.record, attention.arrays)


def _kv_map(backend: Backend, array: Any, box_tokens: int) -> NDArray[np.uint64]:
    """The tensor map of [num_blocks, block_size, num_kv_heads, head_dim].

    A box is 128 bytes of so many tokens.
    """
    num_blocks, block_size, num_heads, head_dim = array.shape
    block, token, head, _ = array.strides
    box = (PANEL_BYTES // array.dtype.itemsize, 1, box_tokens, 1)
    tensor_map = backend.tensor_map(
        array, (head_dim, num_heads, block_size, num_blocks), (head, token, block), box, 128
    )
    return tensor_map.view(np.uint64)
