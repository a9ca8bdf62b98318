"""The same attention on NumPy arrays: the float64 reference computes, exactly and not fast."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.dtypes import bfloat16_to_float32, float32_to_bfloat16
from pagedkv.errors import LayoutMismatch, PagedKVError, WrongType
from pagedkv.kernels.attention import Batch, Options
from pagedkv.kernels.config import AttentionConfig
from pagedkv.reference import paged_attention


def attend_on_cpu(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    batch: Batch,
    options: Options,
    config: AttentionConfig,
    *,
    lse: NDArray[np.float32] | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
) -> None:
    """Write the attention of `q` over `k` and `v` into `out` (and `lse`). Shapes as in :class:`PagedAttention`.

    Raises
    ------
    WrongType, LayoutMismatch
        The arrays do not fit together. Nothing was written.
    """
    floats = _floats(q, config.q_dtype)
    tables = batch.block_tables
    k, v = _floats(k, config.kv_dtype), _floats(v, config.kv_dtype)
    if k_scale is not None and v_scale is not None:
        k, v = (
            x * (s[..., None] if s.ndim > 1 or len(s) > 1 else s).astype(np.float64)
            for x, s in ((k, k_scale), (v, v_scale))
        )
    if tables is None:  # contiguous: every token is a block of one
        k, v = k[:, None], v[:, None]
        longest = int(batch.seq_lens.max(initial=0))
        tables = batch.kv_indptr[:-1, None] + np.arange(max(longest, 1), dtype=np.int32)
    indptr = np.arange(len(batch.seq_lens) + 1) if batch.q_indptr is None else batch.q_indptr
    try:
        exact, exact_lse = paged_attention(
            floats, k, v, tables, batch.seq_lens, indptr,
            softmax_scale=options.softmax_scale, causal=config.causal, window=options.window or None,
            soft_cap=options.soft_cap or None, alibi_slopes=options.alibi_slopes, sinks=options.sinks,
            mask=batch.mask, mask_indptr=batch.mask_indptr, return_lse=True,
            out=np.zeros(out.shape, np.float64),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        if isinstance(error, PagedKVError):
            raise
        kind = WrongType if isinstance(error, TypeError) else LayoutMismatch
        raise kind(str(error)) from error
    _store(exact, out, config.q_dtype)
    if lse is not None:
        lse[...] = exact_lse


def _floats(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values of an array whose elements may be kept as bits."""
    if dtype == "bfloat16" and array.dtype == np.uint16:
        return bfloat16_to_float32(array)
    if dtype.startswith("float8") and array.dtype == np.uint8:
        raise WrongType(f"{dtype} as uint8 is for the GPU; on the CPU use the dtype of ml_dtypes")
    return array.astype(np.float64)


def _store(values: NDArray[np.float64], out: NDArray[Any], dtype: str) -> None:
    if dtype == "bfloat16" and out.dtype == np.uint16:
        float32_to_bfloat16(values.astype(np.float32), out=out)
    else:
        out[...] = values.astype(out.dtype)
