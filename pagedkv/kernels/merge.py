"""Merges attention results over disjoint keys.

Of a shared prefix and of suffixes, or of parts of a long sequence.
"""

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
from pagedkv.kernels.backend import Backend, Dim3
from pagedkv.kernels.dtypes import CUDA_NAMES, ITEMSIZES, QUANTISED, kernel_dtype
from pagedkv.kernels.layer_kv import MAX_GRID_Y, MAX_HEAD_DIM
from pagedkv.kernels.params import address
from pagedkv.kernels.recipe import Recipes, signature
from pagedkv.kernels.variant import Variant, variant

_AXES = "num_tokens, num_heads, head_dim"
_pair_recipes = Recipes("MergeStateParams", ("o_a", "lse_a", "o_b", "lse_b", "o", "lse"))
_recipes = Recipes("MergeStatesParams", ("states", "state_lse", "indptr", "o", "lse"))

Plan = tuple[Variant, Dim3, Dim3, dict[str, Any]]


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
    arrays = (o_a, lse_a, o_b, lse_b, out, lse_out)
    key = (backend, *map(signature, arrays))
    recipe = _pair_recipes.get(key, lambda: _plan_pair(backend, o_a, lse_a, o_b, lse_b, out, lse_out))
    _check_overlap(out, lse_out, ((o_a, lse_a), (o_b, lse_b)))
    recipe.launch(backend, arrays, stream)


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
    out : [num_tokens, num_heads, head_dim]; may be a view of ``states``, the first state of each token, but not with
        ``indptr``.
    lse_out : float32 [num_tokens, num_heads], or the first state's view; None: not wanted.
    indptr : int32 [num_tokens + 1]: token t's states are ``indptr[t] .. indptr[t + 1] - 1``, perhaps none.
    stream : of the backend.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arguments that do not fit; nothing has been written.
    """
    arrays = (states, state_lse, indptr, out, lse_out)
    key = (backend, *map(signature, arrays))
    recipe = _recipes.get(key, lambda: _plan_many(backend, states, state_lse, out, lse_out, indptr))
    if indptr is not None:
        _check_indptr(indptr, len(states))
    elif states.shape[1]:
        _check_overlap(out, lse_out, ((states[:, 0], state_lse[:, 0]),))
    recipe.launch(backend, arrays, stream)


def _plan_pair(backend: Backend, o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, lse_out: Any) -> Plan:
    """Check everything but places and values, and choose the launch."""
    check_array(backend, "out", out, (None, None, None), _AXES, written=True)
    shape = tuple(out.shape)
    dtype = _check_state(backend, "o_a", o_a, "lse_a", lse_a, shape)
    if _check_state(backend, "o_b", o_b, "lse_b", lse_b, shape) != dtype:
        raise WrongType(f"o_a is {o_a.dtype} and o_b {o_b.dtype}: they must have one dtype")
    fields = {"num_tokens": shape[0]}
    named = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b, "o": out, "lse": lse_out}
    for name, array in named.items():
        token, head = (0, 0) if array is None else element_strides(array)[:2]
        fields |= {f"{name}_token_stride": token, f"{name}_head_stride": head}
    return _launch(backend, "merge_state", (o_a, o_b), dtype, out, lse_out, fields)


def _plan_many(backend: Backend, states: Any, state_lse: Any, out: Any, lse_out: Any, indptr: Any) -> Plan:
    """Check everything but places and values, and choose the launch."""
    check_array(backend, "out", out, (None, None, None), _AXES, written=True)
    num_tokens, num_heads, dim = out.shape
    ragged = indptr is not None
    shape = (None, num_heads, dim) if ragged else (num_tokens, None, num_heads, dim)
    dtype = _check_state(backend, "states", states, "state_lse", state_lse, shape)
    if ragged:
        check_array(backend, "indptr", indptr, (num_tokens + 1,), "num_tokens + 1", dtype="int32")
        check_dense_rows("indptr", indptr)
    fields = {"num_tokens": num_tokens, "num_states": 0 if ragged else states.shape[1]}
    for name, array in (("states", states), ("state_lse", state_lse)):
        token, state, head = ([0] if ragged else []) + element_strides(array)[: 2 if ragged else 3]
        fields |= {f"{name}_token_stride": token, f"{name}_state_stride": state, f"{name}_head_stride": head}
    for name, array in (("o", out), ("lse", lse_out)):
        token, head = (0, 0) if array is None else element_strides(array)[:2]
        fields |= {f"{name}_token_stride": token, f"{name}_head_stride": head}
    return _launch(backend, "merge_states", (states,), dtype, out, lse_out, fields)


def _launch(
    backend: Backend, kernel: str, inputs: tuple[Any, ...], dtype: str, out: Any, lse_out: Any, fields: dict[str, int]
) -> Plan:
    """Check the outputs, and choose the variant."""
    num_tokens, num_heads, dim = out.shape
    check_dense_rows("out", out)
    if lse_out is not None:
        axes = "num_tokens, num_heads"
        check_array(backend, "lse_out", lse_out, (num_tokens, num_heads), axes, dtype="float32", written=True)
    if not 1 <= dim <= MAX_HEAD_DIM:
        raise UnsupportedVariant(f"head_dim is {dim}: the kernels take 1..{MAX_HEAD_DIM}")
    if num_heads > MAX_GRID_Y:
        raise UnsupportedVariant(f"num_heads is {num_heads}: at most {MAX_GRID_Y}")
    out_dtype = _float_dtype("out", out)
    vec = min(
        WIDEST_ACCESS // max(ITEMSIZES[dtype], ITEMSIZES[out_dtype]),
        alignment(*inputs) // ITEMSIZES[dtype],
        alignment(out) // ITEMSIZES[out_dtype],
    )
    while dim % vec:
        vec //= 2
    lanes = row_lanes(dim, vec)
    names = {"O_TYPE": CUDA_NAMES[dtype], "OUT_TYPE": CUDA_NAMES[out_dtype]}
    chosen = variant(kernel, arch_features="", DIM=dim, VEC=vec, LANES=lanes, **names)
    return chosen, row_grid(num_tokens, num_heads, lanes), (ROW_THREADS, 1, 1), fields


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


def _check_overlap(out: Any, lse_out: Any, inputs: tuple[tuple[Any, Any], ...]) -> None:
    """Raise LayoutMismatch if an output begins where an input does and is not that input."""
    for o, lse in inputs:
        for name, array, given in (("out", out, o), ("lse_out", lse_out, lse)):
            if array is None or not array.size or address(array) != address(given):
                continue
            if array.dtype != given.dtype or element_strides(array) != element_strides(given):
                raise LayoutMismatch(f"{name} begins where an input does, but has another dtype or other strides")


def _check_indptr(indptr: Any, num_states: int) -> None:
    """Raise InvalidArgument if indptr lies on the host and does not rise within the states."""
    if isinstance(indptr, np.ndarray):
        falls = np.any(indptr[1:] < indptr[:-1])
        if falls or indptr[0] < 0 or indptr[-1] > num_states:
            raise InvalidArgument(f"indptr must rise within 0..{num_states}, the number of states")
