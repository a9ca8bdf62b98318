"""Writes new tokens' K and V into their slots: conversion, quantisation, and rotation of K and Q, in one kernel."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument, UnsupportedVariant, WrongType
from pagedkv.kernels.arrays import (
    ROW_THREADS,
    WIDEST_ACCESS,
    alignment,
    check_array,
    check_dense_rows,
    check_range,
    element_strides,
    row_grid,
    row_lanes,
)
from pagedkv.kernels.config import SCALE_MODES
from pagedkv.kernels.dtypes import CUDA_NAMES, ITEMSIZES, QUANTISED, kernel_dtype
from pagedkv.kernels.layer_kv import MAX_GRID_Y, LayerKv
from pagedkv.kernels.params import fill
from pagedkv.kernels.rope import NO_ROPE_FIELDS, NO_ROPE_MACROS, Rope
from pagedkv.kernels.variant import Variant, variant


def write_kv(
    cache: LayerKv,
    slot_mapping: Any,
    k: Any,
    v: Any = None,
    *,
    q: Any = None,
    q_out: Any = None,
    rope: Rope | None = None,
    debug: bool = False,
    stream: Any = None,
) -> None:
    """Put K and V of tokens into slots; rotate K and Q on the way.

    Rounding is to nearest even; fp8 and int8 saturate. With ``scale_mode="token_head"`` each row's scale is computed
    (its largest absolute value over 448, 57344 or 127) and stored; a row with a NaN or an infinity becomes NaN as a
    whole. With other scales a NaN stays NaN, but in int8, which has none, it becomes 0.

    Parameters
    ----------
    cache : what is written, and the scales.
    slot_mapping : int64 [num_tokens], contiguous; negative: the token is written nowhere. No slot twice.
    k, v : float32, float16 or bfloat16 [num_tokens, num_kv_heads, head_dim] and [.., head_dim_v], any strides of token
        and head. ``v`` is None where the cache has no V.
    q, q_out : [num_tokens, num_qo_heads, head_dim] of k's dtype: Q is rotated into ``q_out``, or in place. Needs
        ``rope``; tokens whose slot is negative are rotated as well.
    rope : how K and Q turn; None: not at all.
    debug : slots and positions are checked on the device too; a bad one stops the kernel.
    stream : of the backend; the call returns before the kernel has run.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arguments that do not fit. Nothing has been written. Values of index arrays are checked if they lie on the host.
    """
    src_dtype = _check(cache, slot_mapping, k, v, q, q_out, rope)
    num_tokens = len(slot_mapping)
    if num_tokens == 0:
        return
    out = q if q_out is None else q_out
    vec = _vector(cache, [array for array in (k, v, q, out) if array is not None], src_dtype, rope)
    rope_macros = NO_ROPE_MACROS if rope is None else rope.macros(vec)
    chosen = _variant(cache.shape[3], cache.head_dim_v, src_dtype, cache.dtype, cache.scale_mode, vec,
                      tuple(rope_macros.items()), debug)  # fmt: skip
    params = fill(
        "WriteKvParams",
        kv=cache.fields,
        rope=NO_ROPE_FIELDS if rope is None else rope.fields(),
        slot_mapping=slot_mapping,
        k=k,
        v=v,
        q=q,
        q_out=out,
        **_row_strides("k", k),
        **_row_strides("v", v),
        **_row_strides("q", q),
        **_row_strides("q_out", out),
        num_tokens=num_tokens,
        num_kv_heads=cache.shape[2],
    )
    grid = row_grid(num_tokens, _num_rows(cache, q), row_lanes(max(cache.shape[3], cache.head_dim_v), vec))
    cache.backend.launch(chosen, grid, (ROW_THREADS, 1, 1), params, stream=stream)


def _check(cache: LayerKv, slot_mapping: Any, k: Any, v: Any, q: Any, q_out: Any, rope: Rope | None) -> str:
    """Raise unless everything fits; the dtype of k."""
    backend = cache.backend
    _, _, heads, head_dim = cache.shape
    check_array(backend, "slot_mapping", slot_mapping, (None,), "num_tokens", dtype="int64")
    if len(slot_mapping) > 1 and slot_mapping.strides[0] != 8:
        raise InvalidArgument(f"slot_mapping has stride {slot_mapping.strides[0]}: it must be contiguous")
    check_range("slot_mapping", slot_mapping, -(2**63), cache.num_slots - 1, "slots are")
    num_tokens = len(slot_mapping)
    if (v is None) != (cache.v is None):
        raise InvalidArgument(
            f"v is {'missing' if v is None else 'given'}, and the cache has {'no' if v is not None else 'a'} V"
        )
    src_dtype = ""
    for name, array, shape in (
        ("k", k, (num_tokens, heads, head_dim)),
        ("v", v, (num_tokens, heads, cache.head_dim_v)),
        ("q", q, (num_tokens, None, head_dim)),
        ("q_out", q_out, (num_tokens, None, head_dim)),
    ):
        if array is None and name != "k":
            continue
        check_array(backend, name, array, shape, "num_tokens, heads, head_dim", written=name == "q_out")
        check_dense_rows(name, array)
        dtype = kernel_dtype(name, array)
        if dtype in QUANTISED:
            raise WrongType(f"{name} has dtype {array.dtype}: K, V and Q come as float32, float16 or bfloat16")
        if dtype != (src_dtype := src_dtype or dtype):
            raise WrongType(f"{name} is {dtype} and k is {src_dtype}: they must have one dtype")
    cache.check_writeable()
    if q is None and q_out is not None:
        raise InvalidArgument("q_out is given without q")
    if q is not None:
        if rope is None:
            raise InvalidArgument("q is given without rope: there is nothing to do to it")
        if q_out is not None and q_out.shape != q.shape:
            raise InvalidArgument(f"q_out has shape {q_out.shape} and q {q.shape}: they must be the same")
        if q_out is None:
            check_array(backend, "q", q, q.shape, "num_tokens, num_qo_heads, head_dim", written=True)
    if _num_rows(cache, q) > MAX_GRID_Y:
        raise UnsupportedVariant(f"{_num_rows(cache, q)} heads of K, V and Q: at most {MAX_GRID_Y}")
    if rope is not None:
        used = slot_mapping >= 0 if q is None and isinstance(slot_mapping, np.ndarray) else None
        rope.check(backend, num_tokens, head_dim, used)
    return src_dtype


def _num_rows(cache: LayerKv, q: Any) -> int:
    """Rows of one token: heads of K, of V, of Q."""
    return int((1 if cache.v is None else 2) * cache.shape[2] + (0 if q is None else q.shape[1]))


def _vector(cache: LayerKv, sources: list[Any], src_dtype: str, rope: Rope | None) -> int:
    """Elements of one access: 16 bytes on the wider side, less where dims, strides or the rotation ask for it."""
    vec = min(
        WIDEST_ACCESS // max(ITEMSIZES[src_dtype], ITEMSIZES[cache.dtype]),
        alignment(*sources) // ITEMSIZES[src_dtype],
        cache.alignment // ITEMSIZES[cache.dtype],
    )
    while cache.shape[3] % vec or cache.head_dim_v % vec or (rope is not None and not rope.fits(vec)):
        vec //= 2
    return vec


@functools.lru_cache(maxsize=1024)
def _variant(
    head_dim: int,
    head_dim_v: int,
    src_dtype: str,
    kv_dtype: str,
    scale_mode: str,
    vec: int,
    rope_macros: tuple[tuple[str, int], ...],
    debug: bool,
) -> Variant:
    macros: dict[str, int | str] = dict(rope_macros)
    return variant(
        "write_kv",
        arch_features="",
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        SRC_TYPE=CUDA_NAMES[src_dtype],
        KV_TYPE=CUDA_NAMES[kv_dtype],
        SCALE_MODE=SCALE_MODES[scale_mode],
        VEC=vec,
        LANES=row_lanes(max(head_dim, head_dim_v), vec),
        PAGED=1,
        BLOCK_SIZE=0,
        DEBUG=debug,
        **macros,
    )


def _row_strides(name: str, array: Any) -> dict[str, int]:
    token, head, _ = (0, 0, 0) if array is None else element_strides(array)
    return {f"{name}_token_stride": token, f"{name}_head_stride": head}
