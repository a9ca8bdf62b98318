"""K and V of sequences out of their blocks into contiguous arrays, and back."""

from __future__ import annotations

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
from pagedkv.kernels.backend import Dim3
from pagedkv.kernels.config import SCALE_MODES
from pagedkv.kernels.dtypes import CUDA_NAMES, ITEMSIZES, QUANTISED, kernel_dtype
from pagedkv.kernels.layer_kv import KV_ARRAYS, LayerKv
from pagedkv.kernels.recipe import Recipes, signature
from pagedkv.kernels.variant import Variant, variant

_recipes = Recipes("GatherKvParams", (*KV_ARRAYS, "indptr", "first_positions", "k", "v"))


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
    """Copy tokens of sequences from the cache to contiguous arrays.

    Quantised caches are decoded if ``k_out`` is wider.

    Parameters
    ----------
    cache : to read from.
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
    _run("gather_kv", cache, block_tables, indptr, k_out, v_out, first_positions, debug, stream)


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
    """Copy tokens of sequences from contiguous arrays into their blocks, bit for bit.

    The arrays have the cache's dtype.

    The inverse of :func:`gather_kv`, with the same parameters. No two sequences may share a block that is written.
    Caches with scales are written by :func:`pagedkv.kernels.write_kv.write_kv`.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arguments that do not fit; nothing has been written.
    """
    _run("scatter_kv", cache, block_tables, indptr, k, v, first_positions, debug, stream)


def _run(
    kernel: str,
    cache: LayerKv,
    block_tables: Any,
    indptr: Any,
    k: Any,
    v: Any,
    first_positions: Any,
    debug: bool,
    stream: Any,
) -> None:
    own = (indptr, first_positions, k, v)
    key = (kernel, cache.backend, cache.signature, debug, signature(block_tables), *map(signature, own))
    recipe = _recipes.get(key, lambda: _plan(kernel, cache, block_tables, indptr, k, v, first_positions, debug))
    _check_values(cache, block_tables, indptr, first_positions, len(k))
    recipe.launch(cache.backend, (*cache.arrays(block_tables), *own), stream)


def _plan(
    kernel: str, cache: LayerKv, block_tables: Any, indptr: Any, k: Any, v: Any, first_positions: Any, debug: bool
) -> tuple[Variant, Dim3, Dim3, dict[str, Any]]:
    """Check everything but values, and choose the launch."""
    gathers = kernel == "gather_kv"
    dtype = _check_rows(cache, k, v, *(("k_out", "v_out") if gathers else ("k", "v")), written=gathers)
    if gathers:
        _check_decoding(cache, dtype)
    else:
        cache.check_writeable()
        if dtype != cache.dtype or cache.scale_mode != "none":
            scaled = "" if cache.scale_mode == "none" else " with scales"
            raise UnsupportedVariant(f"k is {dtype} and the cache {cache.dtype}{scaled}: only equal bits are scattered")
    num_tokens, heads, head_dim = k.shape
    _check_indices(cache, block_tables, indptr, first_positions, num_tokens)

    rows = (k,) if v is None else (k, v)
    vec = min(
        WIDEST_ACCESS // max(ITEMSIZES[dtype], ITEMSIZES[cache.dtype]),
        alignment(*rows) // ITEMSIZES[dtype],
        cache.alignment // ITEMSIZES[cache.dtype],
    )
    while head_dim % vec or cache.head_dim_v % vec:
        vec //= 2
    lanes = row_lanes(max(head_dim, cache.head_dim_v), vec)
    macros: dict[str, Any] = {"OUT_TYPE": CUDA_NAMES[dtype]} if gathers else {}
    chosen = variant(
        kernel,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=cache.head_dim_v,
        KV_TYPE=CUDA_NAMES[cache.dtype],
        SCALE_MODE=SCALE_MODES[cache.scale_mode],
        VEC=vec,
        LANES=lanes,
        PAGED=1,
        BLOCK_SIZE=0,
        DEBUG=debug,
        **macros,
    )
    k_token, k_head, _ = element_strides(k)
    v_token, v_head, _ = (0, 0, 0) if v is None else element_strides(v)
    fields = {
        "kv": cache.fields | {"table_stride": element_strides(block_tables)[0]},
        "k_token_stride": k_token,
        "k_head_stride": k_head,
        "v_token_stride": v_token,
        "v_head_stride": v_head,
        "num_seqs": len(indptr) - 1,
        "num_tokens": num_tokens,
        "num_kv_heads": heads,
    }
    return chosen, row_grid(num_tokens, heads * len(rows), lanes), (ROW_THREADS, 1, 1), fields


def _check_rows(cache: LayerKv, k: Any, v: Any, k_name: str, v_name: str, written: bool) -> str:
    """Raise unless the contiguous K and V fit the cache; their dtype."""
    if (v is None) != (cache.v is None):
        found, there = ("missing", "a") if v is None else ("given", "no")
        raise InvalidArgument(f"{v_name} is {found}, and the cache has {there} V")
    dtype = ""
    num_tokens = None
    for name, array, stored, dim in ((k_name, k, cache.k, cache.shape[3]), (v_name, v, cache.v, cache.head_dim_v)):
        if array is None and name == v_name:
            continue
        shape = (num_tokens, cache.shape[2], dim)
        check_array(cache.backend, name, array, shape, "num_tokens, num_kv_heads, head_dim", written=written)
        check_dense_rows(name, array)
        num_tokens = len(array)
        found = cache.dtype if array.dtype == stored.dtype else kernel_dtype(name, array)
        if found != (dtype := dtype or found):
            raise WrongType(f"{name} is {found} and {k_name} is {dtype}: they must have one dtype")
    return dtype


def _check_decoding(cache: LayerKv, dtype: str) -> None:
    """Raise unless the cache's elements can be given as this dtype."""
    if dtype != cache.dtype and (cache.dtype not in QUANTISED or dtype in QUANTISED):
        raise UnsupportedVariant(
            f"k_out is {dtype} and the cache {cache.dtype}: outputs have the cache's dtype, or, of quantised KV, "
            f"float32, float16 or bfloat16"
        )
    if dtype == cache.dtype and cache.scale_mode != "none":
        raise UnsupportedVariant(f"the cache has scales, so k_out must be float32, float16 or bfloat16, not {dtype}")


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


def _check_values(cache: LayerKv, block_tables: Any, indptr: Any, first_positions: Any, num_tokens: int) -> None:
    """Raise InvalidArgument for tokens without a block, where the index arrays lie on the host."""
    if not isinstance(indptr, np.ndarray):
        return
    if indptr[0] != 0 or indptr[-1] != num_tokens or np.any(indptr[1:] < indptr[:-1]):
        raise InvalidArgument(f"indptr must rise from 0 to {num_tokens}, the number of tokens")
    lengths = np.diff(indptr.astype(np.int64))
    first = np.zeros(len(lengths), np.int64) if first_positions is None else first_positions
    if not (isinstance(block_tables, np.ndarray) and isinstance(first, np.ndarray)):
        return
    if np.any(first < 0):
        raise InvalidArgument(f"first_positions has {int(first.min())}: positions begin at 0")
    num_blocks, block_size = cache.shape[:2]
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
