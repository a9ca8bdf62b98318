"""Attention on NumPy arrays: the C kernels, or the exact and slow float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv import cpu
from pagedkv.attention.planned import Arrays
from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, WrongType
from pagedkv.kernels.attention import Batch, Options
from pagedkv.kernels.config import AttentionConfig
from pagedkv.reference import paged_attention
from pagedkv.spec.dtypes import bfloat16_to_float32, float32_to_bfloat16

KERNELS = ("auto", "cpu", "reference")


def kernel_on_cpu(kernel: str) -> str:
    """The name of what computes: ``"cpu_<instruction set>"`` or ``"reference"``.

    Raises
    ------
    InvalidArgument
        The CPU has no kernel of that name.
    """
    if kernel not in KERNELS:
        raise InvalidArgument(f"on the CPU the kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    return "reference" if kernel == "reference" else f"cpu_{cpu.isa()}"


def attend_on_cpu(
    arrays: Arrays, batch: Batch, options: Options, config: AttentionConfig, *, exact: bool = False
) -> None:
    """Write the attention of a layer into its `out` and, where there is one, its `lse`.

    Parameters
    ----------
    arrays : those of `NAMES`, with shapes as in :class:`PagedAttention`.
    exact : the float64 reference computes.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
        The arrays do not fit together. Nothing was written.
    """
    if exact:
        _attend_exactly(arrays, batch, options, config)
        return
    q, out, lse, k, v, k_scale, v_scale, sinks = arrays
    cpu.attend(
        q, k, v, batch.seq_lens, block_tables=batch.block_tables, q_indptr=batch.q_indptr, kv_indptr=batch.kv_indptr,
        out=out, lse=lse, softmax_scale=options.softmax_scale, causal=config.causal, window=options.window or None,
        soft_cap=options.soft_cap or None, alibi_slopes=options.alibi_slopes, sinks=sinks, mask=batch.mask,
        mask_indptr=batch.mask_indptr, q_positions=_positions(batch, len(q)), k_scale=k_scale, v_scale=v_scale,
        q_dtype=config.q_dtype,
        kv_dtype=config.kv_dtype,
    )  # fmt: skip


def _attend_exactly(arrays: Arrays, batch: Batch, options: Options, config: AttentionConfig) -> None:
    q, out, lse, k, v, k_scale, v_scale, sinks = arrays
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
            soft_cap=options.soft_cap or None, alibi_slopes=options.alibi_slopes, sinks=sinks,
            mask=batch.mask, mask_indptr=batch.mask_indptr, q_positions=_positions(batch, len(q)), return_lse=True,
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


def _positions(batch: Batch, num_tokens: int) -> NDArray[np.int32] | None:
    positions: NDArray[np.int32] | None = batch.q_positions
    return None if positions is None else positions[:num_tokens]


def _floats(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values of an array whose elements may be kept as bits."""
    if dtype == "bfloat16" and array.dtype == np.uint16:
        return bfloat16_to_float32(array)
    if dtype.startswith("float8") and array.dtype == np.uint8:
        raise WrongType(f"{dtype} as uint8 is not for the reference: use the dtype of ml_dtypes, or kernel='cpu'")
    return array.astype(np.float64)


def _store(values: NDArray[np.float64], out: NDArray[Any], dtype: str) -> None:
    if dtype == "bfloat16" and out.dtype == np.uint16:
        float32_to_bfloat16(values.astype(np.float32), out=out)
    else:
        out[...] = values.astype(out.dtype)
