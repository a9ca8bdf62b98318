"""Merges attention results over disjoint keys: of a shared prefix and of suffixes, or of parts of a long sequence."""

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
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.dtypes import CUDA_NAMES, ITEMSIZES, QUANTISED, kernel_dtype
from pagedkv.kernels.layer_kv import MAX_GRID_Y, MAX_HEAD_DIM
from pagedkv.kernels.params import address, fill
from pagedkv.kernels.variant import Variant, variant

_AXES = "num_tokens, num_heads, head_dim"


def merge_state(
    backend: Backend,
    o_a: Any,
    lse_a: Any,
    o_b: Any,
    lse_b: Any,
    out: Any,
    lse_out: Any = None,
    *,
    stream: Any = None,
) -> None:
    """Merge two attention results: each counts with the weight e^lse.

    Where an lse is -inf that result's o is not read; where both are, o becomes 0 and lse -inf. NaN stays NaN.

    Parameters
    ----------
    o_a, o_b : float32, float16 or bfloat16 [num_tokens, num_heads, head_dim], any strides of token and head.
    lse_a, lse_b : float32 [num_tokens, num_heads], natural logarithms, any strides.
    out : [num_tokens, num_heads, head_dim], one of those dtypes; may be ``o_a`` or ``o_b`` themselves.
    lse_out : float32 [num_tokens, num_heads], may be ``lse_a`` or ``lse_b``; None: not wanted.
    stream : of the backend; the call returns before the kernel has run.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arguments that do not fit; nothing has been written.
    """
    check_array(backend, "out", out, (None, None, None), _AXES, written=True)
    shape = tuple(out.shape)
    dtype = _check_state(backend, "o_a", o_a, "lse_a", lse_a, shape)
    if _check_state(backend, "o_b", o_b, "lse_b", lse_b, shape) != dtype:
        raise WrongType(f"o_a is {o_a.dtype} and o_b {o_b.dtype}: they must have one dtype")
    out_dtype = _check_out(backend, out, lse_out, (o_a, o_b), (lse_a, lse_b))
    if not out.size:
        return
    num_tokens, num_heads, dim = shape
    vec = _vector(dim, dtype, (o_a, o_b), out_dtype, out)
    params = fill(
        "MergeStateParams",
        o_a=o_a,
        o_b=o_b,
        lse_a=lse_a,
        lse_b=lse_b,
        o=out,
        lse=lse_out,
        **_strides("o_a", o_a),
        **_strides("o_b", o_b),
        **_strides("o", out),
        **_strides("lse_a", lse_a),
        **_strides("lse_b", lse_b),
        **_strides("lse", lse_out),
        num_tokens=num_tokens,
    )
    chosen = _variant("merge_state", dim, dtype, out_dtype, vec)
    grid = row_grid(num_tokens, num_heads, row_lanes(dim, vec))
    backend.launch(chosen, grid, (ROW_THREADS, 1, 1), params, stream=stream)


def merge_states(
    backend: Backend,
    states: Any,
    state_lse: Any,
    out: Any,
    lse_out: Any = None,
    *,
    indptr: Any = None,
    stream: Any = None,
) -> None:
    """Merge any number of attention results per token, in their order.

    Parameters
    ----------
    states : [num_tokens, num_states, num_heads, head_dim]; with ``indptr`` [all states, num_heads, head_dim].
    state_lse : float32, the same without the last axis.
    out : [num_tokens, num_heads, head_dim]; may be a view of ``states``, the first state of each token.
    lse_out : float32 [num_tokens, num_heads]; None: not wanted.
    indptr : int32 [num_tokens + 1]: token t's states are ``indptr[t] .. indptr[t + 1] - 1``, perhaps none.
    stream : of the backend.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arguments that do not fit; nothing has been written.
    """
    check_array(backend, "out", out, (None, None, None), _AXES, written=True)
    num_tokens, num_heads, dim = out.shape
    ragged = indptr is not None
    shape = (None, num_heads, dim) if ragged else (num_tokens, None, num_heads, dim)
    dtype = _check_state(backend, "states", states, "state_lse", state_lse, shape)
    if ragged:
        _check_indptr(backend, indptr, num_tokens, len(states))
    in_place = not ragged and states.shape[1] > 0  # into the first state of each token
    firsts = ((states[:, 0],), (state_lse[:, 0],)) if in_place else ((), ())
    out_dtype = _check_out(backend, out, lse_out, *firsts)
    if not out.size:
        return
    vec = _vector(dim, dtype, (states,), out_dtype, out)
    token, state, head = (0, *element_strides(states)[:2]) if ragged else element_strides(states)[:3]
    lse_token, lse_state, lse_head = (0, *element_strides(state_lse)) if ragged else element_strides(state_lse)
    params = fill(
        "MergeStatesParams",
        states=states,
        state_lse=state_lse,
        indptr=indptr,
        o=out,
        lse=lse_out,
        states_token_stride=token,
        states_state_stride=state,
        states_head_stride=head,
        state_lse_token_stride=lse_token,
        state_lse_state_stride=lse_state,
        state_lse_head_stride=lse_head,
        **_strides("o", out),
        **_strides("lse", lse_out),
        num_tokens=num_tokens,
        num_states=0 if ragged else states.shape[1],
    )
    chosen = _variant("merge_states", dim, dtype, out_dtype, vec)
    grid = row_grid(num_tokens, num_heads, row_lanes(dim, vec))
    backend.launch(chosen, grid, (ROW_THREADS, 1, 1), params, stream=stream)


def _check_state(backend: Backend, name: str, o: Any, lse_name: str, lse: Any, shape: tuple[int | None, ...]) -> str:
    """Raise unless o and its lse fit; the dtype of o."""
    axes = {3: _AXES, 4: "num_tokens, num_states, num_heads, head_dim"}[len(shape)]
    check_array(backend, name, o, shape, axes)
    check_dense_rows(name, o)
    check_array(backend, lse_name, lse, tuple(o.shape[:-1]), axes.rpartition(",")[0], dtype="float32")
    return _float_dtype(name, o)


def _float_dtype(name: str, array: Any) -> str:
    dtype = kernel_dtype(name, array)
    if dtype in QUANTISED:
        raise WrongType(f"{name} has dtype {array.dtype}: results are float32, float16 or bfloat16")
    return dtype


def _check_out(backend: Backend, out: Any, lse_out: Any, states: tuple[Any, ...], lses: tuple[Any, ...]) -> str:
    """Raise unless the outputs fit, and are an input as a whole if they share its memory; the dtype of out."""
    _, num_heads, dim = out.shape
    check_dense_rows("out", out)
    if lse_out is not None:
        check_array(
            backend, "lse_out", lse_out, tuple(out.shape[:2]), "num_tokens, num_heads", dtype="float32", written=True
        )
    if not 1 <= dim <= MAX_HEAD_DIM:
        raise UnsupportedVariant(f"head_dim is {dim}: the kernels take 1..{MAX_HEAD_DIM}")
    if num_heads > MAX_GRID_Y:
        raise UnsupportedVariant(f"num_heads is {num_heads}: at most {MAX_GRID_Y}")
    for name, array, inputs in (("out", out, states), ("lse_out", lse_out, lses)):
        for given in inputs:
            if array is not None and address(array) == address(given) and array.size:
                same = array.dtype == given.dtype and element_strides(array) == element_strides(given)
                if not same:
                    raise LayoutMismatch(f"{name} begins where an input does, but has another dtype or other strides")
    return _float_dtype("out", out)


def _check_indptr(backend: Backend, indptr: Any, num_tokens: int, num_states: int) -> None:
    check_array(backend, "indptr", indptr, (num_tokens + 1,), "num_tokens + 1", dtype="int32")
    check_dense_rows("indptr", indptr)
    if isinstance(indptr, np.ndarray) and (
        indptr[0] < 0 or indptr[-1] > num_states or np.any(indptr[1:] < indptr[:-1])
    ):
        raise InvalidArgument(f"indptr must rise within 0..{num_states}, the number of states")


def _vector(dim: int, dtype: str, inputs: tuple[Any, ...], out_dtype: str, out: Any) -> int:
    vec = min(
        WIDEST_ACCESS // max(ITEMSIZES[dtype], ITEMSIZES[out_dtype]),
        alignment(*inputs) // ITEMSIZES[dtype],
        alignment(out) // ITEMSIZES[out_dtype],
    )
    while dim % vec:
        vec //= 2
    return vec


@functools.lru_cache(maxsize=1024)
def _variant(kernel: str, dim: int, dtype: str, out_dtype: str, vec: int) -> Variant:
    names = {"O_TYPE": CUDA_NAMES[dtype], "OUT_TYPE": CUDA_NAMES[out_dtype]}
    return variant(kernel, DIM=dim, VEC=vec, LANES=row_lanes(dim, vec), **names)


def _strides(name: str, array: Any) -> dict[str, int]:
    token, head = (0, 0) if array is None else element_strides(array)[:2]
    return {f"{name}_token_stride": token, f"{name}_head_stride": head}
