"""K and V of sequences out of their blocks into contiguous arrays, and back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument, LayoutMismatch, UnsupportedVariant, WrongType
from pagedkv.kernels.arrays import (
    ROW_THREADS,
    WIDEST_ACCESS,
    alignment,
    check_array,
    check_dense_rows,
    element_strides,
    row_grid,
    row_lanes,
)
from pagedkv.kernels.config import SCALE_MODES
from pagedkv.kernels.dtypes import CUDA_NAMES, ITEMSIZES, QUANTISED, kernel_dtype
from pagedkv.kernels.layer_kv import LayerKv
from pagedkv.kernels.params import fill
from pagedkv.kernels.variant import Variant, variant


def gather_kv(
    cache: LayerKv,
    block_tables: Any,
    indptr: Any,
    k_out: Any,
    v_out: Any = None,
    *,
    first_positions: Any = None,
    debug: bool = False,
    stream: Any = None,
) -> None:
    """Copy tokens of sequences from the cache to contiguous arrays; quantised caches are decoded if ``k_out`` is wider.

    Parameters
    ----------
    cache : what is read.
    block_tables : int32 [num_seqs, max_blocks_per_seq], rows any stride apart.
    indptr : int32 [num_seqs + 1]: tokens ``indptr[s] .. indptr[s + 1] - 1`` of the outputs are sequence s's. Its last
        entry is num_tokens.
    k_out, v_out : [num_tokens, num_kv_heads, head_dim] and [.., head_dim_v] of the cache's dtype (then it must have
        no scales), or float32, float16 or bfloat16.
    first_positions : int32 [num_seqs], position of each sequence's first token here; None: 0.
    debug : block ids are checked on the device too.
    stream : of the backend.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arguments that do not fit; nothing has been written.
    """
    out_dtype = _check_rows(cache, {"k_out": k_out, "v_out": v_out}, written=True)
    if out_dtype != cache.dtype and (cache.dtype not in QUANTISED or out_dtype in QUANTISED):
        raise UnsupportedVariant(
            f"k_out is {out_dtype} and the cache {cache.dtype}: outputs have the cache's dtype, or, of quantised KV, "
            f"float32, float16 or bfloat16"
        )
    if out_dtype == cache.dtype and cache.scale_mode != "none":
        raise UnsupportedVariant(
            f"the cache has scales, so k_out must be float32, float16 or bfloat16, not {out_dtype}"
        )
    _launch("gather_kv", cache, block_tables, indptr, k_out, v_out, first_positions, out_dtype, debug, stream)


def scatter_kv(
    cache: LayerKv,
    block_tables: Any,
    indptr: Any,
    k: Any,
    v: Any = None,
    *,
    first_positions: Any = None,
    debug: bool = False,
    stream: Any = None,
) -> None:
    """Copy tokens of sequences from contiguous arrays of the cache's dtype into their blocks, bit by bit.

    The inverse of :func:`gather_kv`, with the same parameters. No two sequences may share a block that is written.
    Caches with scales are written by :func:`pagedkv.kernels.write_kv.write_kv`.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arguments that do not fit; nothing has been written.
    """
    dtype = _check_rows(cache, {"k": k, "v": v}, written=False)
    cache.check_writeable()
    if dtype != cache.dtype or cache.scale_mode != "none":
        scaled = "" if cache.scale_mode == "none" else " with scales"
        raise UnsupportedVariant(f"k is {dtype} and the cache {cache.dtype}{scaled}: only equal bits are scattered")
    _launch("scatter_kv", cache, block_tables, indptr, k, v, first_positions, dtype, debug, stream)


def _check_rows(cache: LayerKv, rows: dict[str, Any], written: bool) -> str:
    """Raise unless the contiguous K and V fit the cache; their dtype."""
    (k_name, k), (v_name, v) = rows.items()
    if (v is None) != (cache.v is None):
        raise InvalidArgument(
            f"{v_name} is {'missing' if v is None else 'given'}, the cache has {'a' if v is None else 'no'} V"
        )
    dtype = ""
    num_tokens = None
    for name, array, dim in ((k_name, k, cache.shape[3]), (v_name, v, cache.head_dim_v)):
        if array is None and name == v_name:
            continue
        shape = (num_tokens, cache.shape[2], dim)
        check_array(cache.backend, name, array, shape, "num_tokens, num_kv_heads, head_dim", written=written)
        check_dense_rows(name, array)
        num_tokens = len(array)
        same_bits = array.dtype == (cache.k if name == k_name else cache.v).dtype
        found = cache.dtype if same_bits else kernel_dtype(name, array)
        if found != (dtype := dtype or found):
            raise WrongType(f"{name} is {found} and {k_name} is {dtype}: they must have one dtype")
    return dtype


def _check_indices(cache: LayerKv, block_tables: Any, indptr: Any, first_positions: Any, num_tokens: int) -> None:
    backend = cache.backend
    check_array(backend, "indptr", indptr, (None,), "num_seqs + 1", dtype="int32")
    num_seqs = len(indptr) - 1
    if num_seqs < 0:
        raise LayoutMismatch("indptr is empty: it needs num_seqs + 1 entries")
    check_array(backend, "block_tables", block_tables, (num_seqs, None), "num_seqs, max_blocks", dtype="int32")
    check_dense_rows("indptr", indptr)
    check_dense_rows("block_tables", block_tables)
    if first_positions is not None:
        check_array(backend, "first_positions", first_positions, (num_seqs,), "num_seqs", dtype="int32")
        check_dense_rows("first_positions", first_positions)
    if num_seqs == 0 and num_tokens:
        raise InvalidArgument(f"{num_tokens} tokens of no sequence: indptr has one entry")
    if isinstance(indptr, np.ndarray):
        if indptr[0] != 0 or indptr[-1] != num_tokens or np.any(indptr[1:] < indptr[:-1]):
            raise InvalidArgument(f"indptr must rise from 0 to {num_tokens}, the number of tokens")
        if isinstance(block_tables, np.ndarray) and not (
            first_positions is not None and not isinstance(first_positions, np.ndarray)
        ):
            _check_blocks(cache, block_tables, indptr, first_positions)


def _check_blocks(cache: LayerKv, block_tables: Any, indptr: Any, first_positions: Any) -> None:
    """Raise InvalidArgument for tokens that lie in no block; all arrays on the host."""
    num_blocks, block_size = cache.shape[:2]
    lengths = np.diff(indptr.astype(np.int64))
    first = np.zeros(len(lengths), np.int64) if first_positions is None else first_positions.astype(np.int64)
    if np.any(first < 0):
        raise InvalidArgument(f"first_positions has {int(first.min())}: positions begin at 0")
    for seq in np.flatnonzero(lengths).tolist():
        begin, end = int(first[seq]) // block_size, -(-int(first[seq] + lengths[seq]) // block_size)
        if end > block_tables.shape[1]:
            raise InvalidArgument(
                f"sequence {seq} needs {end} blocks: block_tables has {block_tables.shape[1]} columns"
            )
        ids = block_tables[seq, begin:end]
        if ids.min() < 0 or ids.max() >= num_blocks:
            bad = int(ids.min() if ids.min() < 0 else ids.max())
            raise InvalidArgument(f"block_tables has {bad} for sequence {seq}: block ids are 0..{num_blocks - 1}")


def _launch(
    kernel: str,
    cache: LayerKv,
    block_tables: Any,
    indptr: Any,
    k: Any,
    v: Any,
    first_positions: Any,
    dtype: str,
    debug: bool,
    stream: Any,
) -> None:
    _check_indices(cache, block_tables, indptr, first_positions, len(k))
    num_tokens, heads, head_dim = k.shape
    if num_tokens == 0:
        return
    rows = (k,) if v is None else (k, v)
    vec = min(
        WIDEST_ACCESS // max(ITEMSIZES[dtype], ITEMSIZES[cache.dtype]),
        alignment(*rows) // ITEMSIZES[dtype],
        cache.alignment // ITEMSIZES[cache.dtype],
    )
    while head_dim % vec or cache.head_dim_v % vec:
        vec //= 2
    k_strides, v_strides = element_strides(k), (0, 0, 0) if v is None else element_strides(v)
    params = fill(
        "GatherKvParams",
        kv=cache.fields | {"block_tables": block_tables, "table_stride": element_strides(block_tables)[0]},
        indptr=indptr,
        first_positions=first_positions,
        k=k,
        v=v,
        k_token_stride=k_strides[0],
        k_head_stride=k_strides[1],
        v_token_stride=v_strides[0],
        v_head_stride=v_strides[1],
        num_seqs=len(indptr) - 1,
        num_tokens=num_tokens,
        num_kv_heads=heads,
    )
    chosen = _variant(kernel, head_dim, cache.head_dim_v, cache.dtype, dtype, cache.scale_mode, vec, debug)
    grid = row_grid(num_tokens, heads * len(rows), row_lanes(max(head_dim, cache.head_dim_v), vec))
    cache.backend.launch(chosen, grid, (ROW_THREADS, 1, 1), params, stream=stream)


@functools.lru_cache(maxsize=1024)
def _variant(
    kernel: str, head_dim: int, head_dim_v: int, kv_dtype: str, out_dtype: str, scale_mode: str, vec: int, debug: bool
) -> Variant:
    own = {"OUT_TYPE": CUDA_NAMES[out_dtype]} if kernel == "gather_kv" else {}
    return variant(
        kernel,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        KV_TYPE=CUDA_NAMES[kv_dtype],
        SCALE_MODE=SCALE_MODES[scale_mode],
        VEC=vec,
        LANES=row_lanes(max(head_dim, head_dim_v), vec),
        PAGED=1,
        BLOCK_SIZE=0,
        DEBUG=debug,
        **own,
    )
