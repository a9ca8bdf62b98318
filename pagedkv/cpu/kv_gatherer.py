"""Copies a range of a sequence's tokens out of the blocks of an arena.

Bit for bit, in one call for all layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cpu import _gather
from pagedkv.cpu.threads import num_threads
from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType


def gather(
    k: NDArray[Any],
    v: NDArray[Any],
    blocks: NDArray[np.int32],
    start: int,
    stop: int,
    k_out: NDArray[Any],
    v_out: NDArray[Any],
) -> None:
    """Copy tokens ``start`` to ``stop - 1`` of a sequence into `k_out` and `v_out`.

    Nothing is allocated. It runs on the threads of :func:`pagedkv.cpu.set_num_threads`, without the GIL.

    Parameters
    ----------
    k, v : [num_blocks, num_layers, block_size, num_kv_heads, head_dim (head_dim_v)] of one dtype, with the
        last axis contiguous.
    blocks : int32 [n], C-contiguous: the blocks of the sequence's tokens 0, 1, ...
    start, stop : 0 <= start <= stop <= n * block_size.
    k_out, v_out : [num_layers, stop - start, num_kv_heads, head_dim (head_dim_v)] of the same dtype, any strides,
        outside the arena.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
        Arguments that do not fit. Nothing was written.
    """
    for name, array in (("k", k), ("v", v), ("blocks", blocks), ("k_out", k_out), ("v_out", v_out)):
        if not isinstance(array, np.ndarray):
            raise WrongType(f"{name} must be a NumPy array, not {type(array).__name__}")
    if k.ndim != 5 or v.ndim != 5 or v.shape[:4] != k.shape[:4] or v.dtype != k.dtype or k.dtype.hasobject:
        raise LayoutMismatch(
            f"k and v must be [num_blocks, num_layers, block_size, num_kv_heads, head_dim] of one dtype, got "
            f"{k.dtype} {k.shape} and {v.dtype} {v.shape}"
        )
    for name, array in (("k", k), ("v", v)):
        if array.shape[4] > 1 and array.strides[4] != array.itemsize:
            raise LayoutMismatch(f"the last axis of {name} must be contiguous, its stride is {array.strides[4]} bytes")
    if blocks.ndim != 1 or blocks.dtype != np.int32 or not blocks.flags.c_contiguous or not blocks.dtype.isnative:
        raise LayoutMismatch(f"blocks must be contiguous int32 [n], got {blocks.dtype} {blocks.shape}")
    if not 0 <= start <= stop:
        raise InvalidArgument(f"start = {start} and stop = {stop} are no range of tokens")
    for name, array, cache in (("k_out", k_out, k), ("v_out", v_out, v)):
        shape = (k.shape[1], stop - start, *cache.shape[3:])
        if array.shape != shape or array.dtype != k.dtype:
            raise LayoutMismatch(f"{name} must be {k.dtype} {shape}, got {array.dtype} {array.shape}")
        if not array.flags.writeable:
            raise LayoutMismatch(f"{name} is read-only")
        if np.may_share_memory(array, k) or np.may_share_memory(array, v):
            raise LayoutMismatch(f"{name} shares memory with the arena; give an array of your own")
    _gather.gather(k, v, blocks, start, stop, k_out, v_out, num_threads())
