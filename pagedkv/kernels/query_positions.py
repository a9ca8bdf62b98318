"""Positions of the queries of a cascade's level, computed on the device."""

from __future__ import annotations

from typing import Any

from pagedkv.kernels.backend import Backend
from pagedkv.kernels.params import fill
from pagedkv.kernels.variant import variant

QUERY_POSITIONS = variant("query_positions")
_THREADS = 128


def place_queries(
    backend: Backend, seq_lens: Any, q_indptr: Any, below: Any, positions: Any, spans: Any, *, stream: Any = None
) -> None:
    """Write the positions of a level's queries, counted from their sequence's first key.

    Parameters
    ----------
    seq_lens, q_indptr : int32, of the level's sequences, as in :class:`pagedkv.kernels.batch.Batch`.
    below : int32 [num_tokens], the positions in the next level; None for the last level.
    positions : int32 [num_tokens or more], written.
    spans : int32 [num_seqs, 2], written: the least and the greatest position of each sequence.
    stream : of the backend; the call returns before the kernel has run.
    """
    if not len(seq_lens):
        return
    params = fill(
        "PositionParams", seq_lens=seq_lens, q_indptr=q_indptr, below=below, q_positions=positions, position_spans=spans
    )
    backend.launch(QUERY_POSITIONS, (len(seq_lens), 1, 1), (_THREADS, 1, 1), params, stream=stream)
