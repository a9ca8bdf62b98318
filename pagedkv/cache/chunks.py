"""A step as layers see it whose attention ends where a chunk of tokens begins.

A query sees the tokens since the last multiple of the chunk. A sequence whose new tokens lie in several chunks becomes
several sequences, one for each: its queries, and the blocks of its chunk as a table of its own. The kernels then attend
to short sequences and know of no chunks. K has its positions already, so where a sequence begins does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.storage import StepTables


class ChunkedTables(NamedTuple):
    """Tables of a step in chunks, fields as :class:`StepTables`.

    A sequence has a row for each chunk that it computes tokens of.
    """

    block_tables: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    q_indptr: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]


def in_chunks(step: StepTables, chunk: int, block_size: int) -> StepTables:
    """The step's tables for layers with chunks of so many tokens, a multiple of `block_size`.

    The queries stay in their order. The step itself is returned where no sequence is longer than a chunk.
    """
    ends = step.seq_lens.astype(np.int64)
    if not len(ends) or ends.max() <= chunk:
        return step
    begins = ends - np.diff(step.q_indptr)  # of the new tokens
    first, last = begins // chunk, np.maximum(ends - 1, begins) // chunk
    count = last - first + 1  # rows of each sequence
    of = np.repeat(np.arange(len(ends)), count)
    number = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + first[of]
    start = number * chunk
    stop = np.minimum(ends[of], start + chunk)
    q_lens = stop - np.maximum(begins[of], start)
    columns = start[:, None] // block_size + np.arange(min(chunk // block_size, step.block_tables.shape[1]))
    tables = step.block_tables
    inside = columns < tables.shape[1]
    cut = np.where(inside, tables[of[:, None], np.where(inside, columns, 0)], np.int32(-1))
    return ChunkedTables(
        cut.astype(np.int32), (stop - start).astype(np.int32),
        np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32), step.slot_mapping,
    )  # fmt: skip
