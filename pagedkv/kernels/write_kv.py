"""Writes new tokens' K and V into their slots, in one kernel.

It converts, quantises, and rotates K and Q.
"""

from __future__ import annotations

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
from pagedkv.kernels.backend import Dim3
from pagedkv.kernels.config import SCALE_MODES
from pagedkv.kernels.dtypes import CUDA_NAMES, ITEMSIZES, QUANTISED, kernel_dtype
from pagedkv.kernels.layer_kv import KV_ARRAYS, MAX_GRID_Y, LayerKv
from pagedkv.kernels.recipe import Recipes, signature
from pagedkv.kernels.rope import NO_ROPE_ARRAYS, NO_ROPE_FIELDS, NO_ROPE_MACROS, ROPE_ARRAYS, Rope
from pagedkv.kernels.variant import Variant, variant

_recipes = Recipes("WriteKvParams", (*KV_ARRAYS, *ROPE_ARRAYS, "slot_mapping", "k", "v", "q", "q_out"))


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
    cache : the KV to write to, and the scales.
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
    out = q if q_out is None else q_out
    arrays = (slot_mapping, k, v, q, out)
    turning = None if rope is None else rope.signature
    key = (cache.backend, cache.signature, turning, debug, q_out is None, *map(signature, arrays))
    recipe = _recipes.get(key, lambda: _plan(cache, slot_mapping, k, v, q, q_out, rope, debug))
    if isinstance(slot_mapping, np.ndarray):
        check_range("slot_mapping", slot_mapping, cache.num_slots - 1, negative=True)
    if rope is not None:
        rope.check_positions(slot_mapping >= 0 if q is None and isinstance(slot_mapping, np.ndarray) else None)
    angles = NO_ROPE_ARRAYS if rope is None else rope.arrays()
    recipe.launch(cache.backend, (*cache.arrays(), *angles, *arrays), stream)


def _plan(
    cache: LayerKv, slot_mapping: Any, k: Any, v: Any, q: Any, q_out: Any, rope: Rope | None, debug: bool
) -> tuple[Variant, Dim3, Dim3, dict[str, Any]]:
    """Check everything but values, and choose the launch."""
    backend, (_, _, heads, head_dim) = cache.backend, cache.shape
    check_array(backend, "slot_mapping", slot_mapping, (None,), "num_tokens", dtype="int64")
    check_dense_rows("slot_mapping", slot_mapping)
    num_tokens = len(slot_mapping)
    src_dtype = _check_rows(cache, num_tokens, k, v, q, q_out)
    cache.check_writeable()
    if q is None and q_out is not None:
        raise InvalidArgument("q_out is given without q")
    if q is not None and rope is None:
        raise InvalidArgument("q is given without rope: there is nothing to do to it")
    if q is not None and q_out is not None and q_out.shape != q.shape:
        raise InvalidArgument(f"q_out has shape {q_out.shape} and q {q.shape}: they must be the same")
    rows = (1 if v is None else 2) * heads + (0 if q is None else q.shape[1])
    if rows > MAX_GRID_Y:
        raise UnsupportedVariant(f"{rows} heads of K, V and Q: at most {MAX_GRID_Y}")
    if rope is not None:
        rope.check(backend, num_tokens, head_dim)

    out = q if q_out is None else q_out
    vec = _vector(cache, [array for array in (k, v, q, out) if array is not None], src_dtype, rope)
    lanes = row_lanes(max(head_dim, cache.head_dim_v), vec)
    rope_macros: dict[str, Any] = NO_ROPE_MACROS if rope is None else rope.macros(vec)
    chosen = variant(
        "write_kv",
        HEAD_DIM=head_dim,
        HEAD_DIM_V=cache.head_dim_v,
        SRC_TYPE=CUDA_NAMES[src_dtype],
        KV_TYPE=CUDA_NAMES[cache.dtype],
        SCALE_MODE=SCALE_MODES[cache.scale_mode],
        VEC=vec,
        LANES=lanes,
        PAGED=1,
        BLOCK_SIZE=0,
        DEBUG=debug,
        **rope_macros,
    )
    fields: dict[str, Any] = {
        "kv": cache.fields,
        "rope": NO_ROPE_FIELDS if rope is None else rope.fields(),
        "num_tokens": num_tokens,
        "num_kv_heads": heads,
    }
    for name, array in (("k", k), ("v", v), ("q", q), ("q_out", out)):
        token, head, _ = (0, 0, 0) if array is None else element_strides(array)
        fields |= {f"{name}_token_stride": token, f"{name}_head_stride": head}
    return chosen, row_grid(num_tokens, rows, lanes), (ROW_THREADS, 1, 1), fields


def _check_rows(cache: LayerKv, num_tokens: int, k: Any, v: Any, q: Any, q_out: Any) -> str:
    """Raise unless K, V and Q fit the cache and each other; their dtype."""
    if (v is None) != (cache.v is None):
        found, there = ("missing", "a") if v is None else ("given", "no")
        raise InvalidArgument(f"v is {found}, and the cache has {there} V")
    _, _, heads, head_dim = cache.shape
    src_dtype = ""
    for name, array, shape in (
        ("k", k, (num_tokens, heads, head_dim)),
        ("v", v, (num_tokens, heads, cache.head_dim_v)),
        ("q", q, (num_tokens, None, head_dim)),
        ("q_out", q_out, (num_tokens, None, head_dim)),
    ):
        if array is None and name != "k":
            continue
        written = name == "q_out" or (name == "q" and q_out is None)
        check_array(cache.backend, name, array, shape, "num_tokens, heads, head_dim", written=written)
        check_dense_rows(name, array)
        dtype = kernel_dtype(name, array)
        if dtype in QUANTISED:
            raise WrongType(f"{name} has dtype {array.dtype}: K, V and Q come as float32, float16 or bfloat16")
        if dtype != (src_dtype := src_dtype or dtype):
            raise WrongType(f"{name} is {dtype} and k is {src_dtype}: they must have one dtype")
    return src_dtype


def _vector(cache: LayerKv, sources: list[Any], src_dtype: str, rope: Rope | None) -> int:
    """Elements per access.

    16 bytes on the wider side, less where dims, strides or the rotation ask for it.
    """
    vec = min(
        WIDEST_ACCESS // max(ITEMSIZES[src_dtype], ITEMSIZES[cache.dtype]),
        alignment(*sources) // ITEMSIZES[src_dtype],
        cache.alignment // ITEMSIZES[cache.dtype],
    )
    while cache.shape[3] % vec or cache.head_dim_v % vec or (rope is not None and not rope.fits(vec)):
        vec //= 2
    return vec
