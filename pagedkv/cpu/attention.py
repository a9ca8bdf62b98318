"""One attention call on NumPy arrays.

Refuses arguments that the kernels do not support, before anything is written.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cpu import _attend
from pagedkv.cpu.numbers import dtype_of
from pagedkv.cpu.threads import checked, isa, num_threads
from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType

_SCALES = np.dtype(np.float32)
_QUERIES = ("float32", "float16", "bfloat16")
MOST_POSITION = 1 << 30  # of a query, counted from its sequence's first key


def attend(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    seq_lens: NDArray[np.int32],
    *,
    block_tables: NDArray[np.int32] | None = None,
    q_indptr: NDArray[np.int32] | None = None,
    kv_indptr: NDArray[np.int32] | None = None,
    out: NDArray[Any] | None = None,
    lse: NDArray[np.float32] | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: NDArray[np.float32] | None = None,
    sinks: NDArray[np.float32] | None = None,
    mask: NDArray[np.uint8] | None = None,
    mask_indptr: NDArray[np.int64] | None = None,
    q_positions: NDArray[np.int32] | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    q_dtype: str = "",
    kv_dtype: str = "",
    threads: int | None = None,
) -> NDArray[Any]:
    """Paged or contiguous attention of one layer, in float32 arithmetic.

    The bits of the result depend on each sequence alone: not on the threads, and not on the rest of the batch.

    Parameters
    ----------
    q : float32, float16 or bfloat16 [num_tokens, num_qo_heads, head_dim], the last axis contiguous.
    k, v : [num_blocks, block_size, num_kv_heads, head_dim (head_dim_v)] with `block_tables`, else [num_kv_tokens,
        num_kv_heads, head_dim (head_dim_v)]; any strides but the last. float32, float16, bfloat16, int8,
        float8_e4m3 or float8_e5m2.
    seq_lens : int32 [num_seqs], keys of each sequence, this step's included.
    block_tables : int32 [num_seqs, max_blocks].
    q_indptr : int32 [num_seqs + 1], first query of each sequence; default one query each.
    kv_indptr : int32 [num_seqs + 1], first token of each sequence in contiguous KV.
    out : [num_tokens, num_qo_heads, head_dim_v] of q's dtype, the last axis contiguous; default a new array.
    lse : float32 [num_tokens, num_qo_heads], contiguous; written if given: the natural log-sum-exp.
    softmax_scale, causal, window, soft_cap, alibi_slopes, sinks, mask, mask_indptr, q_positions
        As :func:`pagedkv.reference.paged_attention`; arrays float32, uint8, int64 and int32.
    k_scale, v_scale : float32 [1], [num_kv_heads], or like k without its last axis.
    q_dtype, kv_dtype : names where the arrays only hold bits: ``"bfloat16"`` in uint16, fp8 in uint8.
    threads : default :func:`num_threads`.

    Returns
    -------
    out

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
        Arrays that do not fit, ids or lengths that point outside them. Nothing was written.
    """
    paged = block_tables is not None
    q_name, kv_name = dtype_of("q", q, q_dtype, _QUERIES), dtype_of("k", k, kv_dtype)
    unusual = (kv_indptr, alibi_slopes, sinks, mask, mask_indptr, q_positions)
    usual = all(array is None for array in unusual) and _scales_are_plain(k_scale, v_scale, k)
    if not usual or not _attend.plainly_fits(q, k, v, seq_lens, block_tables, q_indptr, out, lse):
        _check_arrays(q, k, v, seq_lens, block_tables, q_indptr, out, lse, *unusual, k_scale, v_scale)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int | np.integer)):
        raise WrongType(f"window must be a whole number, not {type(window).__name__}")
    if window is not None and not 1 <= window < 2**31:
        raise InvalidArgument(f"window must be in 1..{2**31 - 1}, got {window}")
    scale = q.shape[2] ** -0.5 if softmax_scale is None else _number("softmax_scale", softmax_scale)
    cap = 0.0 if soft_cap is None else _number("soft_cap", soft_cap)
    if soft_cap is not None and cap <= 0:
        raise InvalidArgument(f"soft_cap must be positive, got {soft_cap}")
    if out is None:
        out = np.empty((*q.shape[:2], v.shape[-1]), q.dtype)
    _attend.attend(
        q, k, v, out, seq_lens, block_tables, q_indptr, kv_indptr, lse, alibi_slopes, sinks, mask, mask_indptr,
        q_positions, k_scale, v_scale, q_name, kv_name, k.shape[1] if paged else 0, scale, cap,
        0 if window is None else window, causal, num_threads() if threads is None else checked(threads), isa(),
    )  # fmt: skip
    return out


def _scales_are_plain(k_scale: Any, v_scale: Any, k: NDArray[Any]) -> bool:
    """Fast check of scales: True if they are valid or there are none.

    False where the full check must decide.
    """
    if k_scale is None and v_scale is None:
        return True
    if type(k_scale) is not np.ndarray or type(v_scale) is not np.ndarray:
        return False
    shape, dtype = k_scale.shape, k_scale.dtype
    return (
        dtype is v_scale.dtype is _SCALES  # NumPy has one object for each plain dtype
        and shape == v_scale.shape
        and k_scale.strides == v_scale.strides
        and k_scale.flags.aligned
        and v_scale.flags.aligned
        and (shape == k.shape[:-1] or shape == (1,) or shape == k.shape[-2:-1])
    )


def _check_arrays(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    seq_lens: NDArray[np.int32],
    block_tables: NDArray[np.int32] | None,
    q_indptr: NDArray[np.int32] | None,
    out: NDArray[Any] | None,
    lse: NDArray[np.float32] | None,
    kv_indptr: NDArray[np.int32] | None,
    alibi_slopes: NDArray[np.float32] | None,
    sinks: NDArray[np.float32] | None,
    mask: NDArray[np.uint8] | None,
    mask_indptr: NDArray[np.int64] | None,
    q_positions: NDArray[np.int32] | None,
    k_scale: NDArray[np.float32] | None,
    v_scale: NDArray[np.float32] | None,
) -> None:
    """Raise what `attend` says where an array does not fit."""
    paged = block_tables is not None
    if q.ndim != 3 or k.ndim != 3 + paged or v.ndim != k.ndim:
        layout = "[num_blocks, block_size, num_kv_heads, head_dim]" if paged else "[tokens, num_kv_heads, head_dim]"
        raise LayoutMismatch(
            f"q must be [num_tokens, num_qo_heads, head_dim] and k and v {layout}, got {q.shape}, {k.shape}, {v.shape}"
        )
    if v.dtype != k.dtype or v.shape[:-1] != k.shape[:-1] or k.shape[-1] != q.shape[2]:
        raise LayoutMismatch(
            f"q {q.shape}, k {k.dtype} {k.shape} and v {v.dtype} {v.shape} do not fit: k and v must agree but for the "
            f"head dim of v, and k must have q's"
        )
    if not k.shape[-2] or not q.shape[1] or q.shape[1] % k.shape[-2]:
        raise LayoutMismatch(f"{q.shape[1]} query heads are no multiple of {k.shape[-2]} KV heads")
    if paged == (kv_indptr is not None):
        raise InvalidArgument("give block_tables (paged KV) or kv_indptr (contiguous KV), one of the two")
    if (mask is None) != (mask_indptr is None):
        raise InvalidArgument("mask and mask_indptr are given together: pagedkv.attention.pack_mask makes both")
    if (k_scale is None) != (v_scale is None):
        raise InvalidArgument("k_scale and v_scale are given together")
    shape = (*q.shape[:2], v.shape[-1])
    if out is not None and (out.shape != shape or out.dtype != q.dtype):
        raise LayoutMismatch(f"out must be {q.dtype} {shape}, got {out.dtype} {out.shape}")
    for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        if array is not None:
            _check_strides(name, array)
    if out is not None and not out.flags.writeable:
        raise LayoutMismatch("out is read-only")
    num_seqs = len(seq_lens)
    arrays: tuple[tuple[str, Any, Any, tuple[int | None, ...]], ...] = (
        ("seq_lens", seq_lens, np.int32, (num_seqs,)),
        ("block_tables", block_tables, np.int32, (num_seqs, None)),
        ("q_indptr", q_indptr, np.int32, (num_seqs + 1,)),
        ("kv_indptr", kv_indptr, np.int32, (num_seqs + 1,)),
        ("lse", lse, np.float32, shape[:2]),
        ("alibi_slopes", alibi_slopes, np.float32, (q.shape[1],)),
        ("sinks", sinks, np.float32, (q.shape[1],)),
        ("mask", mask, np.uint8, (None,)),
        ("mask_indptr", mask_indptr, np.int64, (num_seqs + 1,)),
        ("q_positions", q_positions, np.int32, (len(q),)),
    )
    for name, array, dtype, wanted in arrays:
        if array is not None:
            _check(name, array, dtype, wanted)
    if lse is not None and not lse.flags.writeable:
        raise LayoutMismatch("lse is read-only")
    if k_scale is not None and v_scale is not None:
        _check_scales(k_scale, v_scale, k)
    if alibi_slopes is not None and not np.isfinite(alibi_slopes).all():
        raise InvalidArgument("alibi_slopes must be finite")
    if q_positions is not None and np.abs(q_positions.astype(np.int64)).max(initial=0) >= MOST_POSITION:
        raise InvalidArgument(
            f"q_positions must lie within {MOST_POSITION} of the first key, got {q_positions.min()} to "
            f"{q_positions.max()}"
        )
    if sinks is not None and not (sinks < np.inf).all():
        raise InvalidArgument("sinks must be finite, or -inf for a head without one")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise WrongType(f"{name} must be a number, not {type(value).__name__}")
    if not math.isfinite(value):
        raise InvalidArgument(f"{name} must be finite, got {value}")
    return float(value)


def _check_strides(name: str, array: NDArray[Any]) -> None:
    item = array.itemsize
    if not array.size:
        return
    if array.shape[-1] > 1 and array.strides[-1] != item:
        raise LayoutMismatch(f"the last axis of {name} must be contiguous, got strides {array.strides}")
    if any(stride % item for stride in array.strides) or array.ctypes.data % item:
        raise LayoutMismatch(f"{name} must be aligned to its {item}-byte elements, got strides {array.strides}")


def _check(name: str, array: NDArray[Any], dtype: Any, shape: tuple[int | None, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = getattr(array, "dtype", type(array).__name__)
        raise WrongType(f"{name} must be {np.dtype(dtype).name}, got {found}")
    fits = array.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, array.shape))
    if not fits or not array.flags.c_contiguous:
        raise LayoutMismatch(f"{name} must be contiguous {list(shape)}, got {list(array.shape)}")


def _check_scales(k_scale: NDArray[np.float32], v_scale: NDArray[np.float32], k: NDArray[Any]) -> None:
    shapes = ((1,), (k.shape[-2],), k.shape[:-1])
    for name, array in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(array, np.ndarray):
            raise WrongType(f"{name} must be a NumPy array of float32, not {type(array).__name__}")
        if array.dtype != np.float32:
            raise WrongType(f"{name} must be float32, got {array.dtype}")
        if array.shape not in shapes:
            raise LayoutMismatch(f"{name} must have one of the shapes {shapes}, got {array.shape}")
        if any(stride % 4 for stride in array.strides) or array.ctypes.data % 4:
            raise LayoutMismatch(f"{name} must be aligned to its 4-byte elements, got strides {array.strides}")
    if k_scale.shape != v_scale.shape or k_scale.strides != v_scale.strides:
        raise LayoutMismatch("k_scale and v_scale must have the same shape and strides")
