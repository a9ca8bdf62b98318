"""Checks of a step's batch: all of its arrays but the values, and that queries fit it."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.attention.checks import check_contiguous, check_dtype, check_indptr, check_int32, check_shape
from pagedkv.attention.layer_checks import check_places
from pagedkv.errors import InvalidArgument, LayoutMismatch
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.batch import Batch
from pagedkv.kernels.config import AttentionConfig


def check_batch(batch: Batch, config: AttentionConfig, backend: Backend | None, max_sequences: int) -> None:
    """Check all of a batch's arrays but the values.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
    """
    paged = config.block_size > 0
    check_places(
        backend, seq_lens=batch.seq_lens, block_tables=batch.block_tables, kv_indptr=batch.kv_indptr,
        q_indptr=batch.q_indptr, mask=batch.mask, mask_indptr=batch.mask_indptr, q_positions=batch.q_positions,
        position_spans=batch.position_spans,
    )  # fmt: skip
    check_int32("seq_lens", batch.seq_lens, ("num_seqs",))
    num_seqs = len(batch.seq_lens)
    if num_seqs > max_sequences:
        raise InvalidArgument(f"{num_seqs} sequences, but this was made for max_sequences = {max_sequences}")
    if (batch.block_tables is not None) != paged or (batch.kv_indptr is not None) == paged:
        wanted = "block_tables and no kv_indptr" if paged else "kv_indptr and no block_tables"
        raise InvalidArgument(f"block_size = {config.block_size} needs {wanted}")
    _check_pair("custom_mask", config.mask, mask=batch.mask, mask_indptr=batch.mask_indptr)
    _check_pair("positions", config.positions, q_positions=batch.q_positions, position_spans=batch.position_spans)
    if paged:
        check_int32("block_tables", batch.block_tables, (num_seqs, "max_blocks"))
    else:
        check_int32("kv_indptr", batch.kv_indptr, (num_seqs + 1,))
    if batch.q_indptr is not None:
        check_int32("q_indptr", batch.q_indptr, (num_seqs + 1,))
    if config.mask:
        check_shape("mask", batch.mask, ("num_bytes",))
        check_dtype("mask", batch.mask, np.uint8)
        check_contiguous("mask", batch.mask)
        check_shape("mask_indptr", batch.mask_indptr, (num_seqs + 1,))
        check_dtype("mask_indptr", batch.mask_indptr, np.int64)
        check_contiguous("mask_indptr", batch.mask_indptr)
    if config.positions:
        check_int32("q_positions", batch.q_positions, ("num_tokens",))
        check_int32("position_spans", batch.position_spans, (num_seqs, 2))


def check_queries(batch: Batch, q: Any) -> None:
    """Raise unless a layer's queries are those of the batch, as far as the host can know.

    Raises
    ------
    InvalidArgument, LayoutMismatch
    """
    if isinstance(batch.q_indptr, np.ndarray):
        check_indptr("q_indptr", batch.q_indptr)
        if len(q) != batch.q_indptr[-1]:
            raise InvalidArgument(f"q has {len(q)} tokens, but q_indptr ends at {batch.q_indptr[-1]}: they must agree")
    if batch.q_positions is not None and len(batch.q_positions) < len(q):
        raise LayoutMismatch(f"q has {len(q)} tokens, but q_positions only {len(batch.q_positions)}")


def _check_pair(name: str, wanted: bool, **arrays: Any) -> None:
    """Two arrays are given if the attention was made for them, and only then."""
    if any((array is not None) != wanted for array in arrays.values()):
        raise InvalidArgument(f"{name} = {wanted}: {' and '.join(arrays)} must {'both' if wanted else 'not'} be given")
