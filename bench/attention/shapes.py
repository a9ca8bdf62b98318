"""Attention problems as numbers: the model, the lengths, how KV lies.

The bytes and operations of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Layout = Literal["shuffled", "sequential", "contiguous", "pool"]

ELEMENT_BYTES = {"bfloat16": 2, "float8_e4m3": 1}
QUERY_BYTES = 2  # Q and O are bfloat16
INDEX_BYTES = 4


@dataclass(frozen=True, slots=True)
class Model:
    """The heads of a model.

    Parameters
    ----------
    name : such as ``"8B"``.
    num_qo_heads, num_kv_heads, head_dim : of one layer.
    """

    name: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class Shape:
    """One problem.

    Parameters
    ----------
    model : its heads.
    kv_lens : keys of each sequence, those of its queries included.
    q_lens : queries of each sequence; None: one each, decode.
    block_size : tokens of a block.
    kv_dtype : of K and V; Q and the output are bfloat16.
    layout : where KV lies. ``"shuffled"``, ``"sequential"``: arrays of K and of V [num_blocks, block_size,
        num_kv_heads, head_dim], the block tables in random order or in order. ``"contiguous"``: [num_tokens,
        num_kv_heads, head_dim]. ``"pool"``: a layer of a block-major pool of many layers, shuffled tables.
    prefix : tokens at the start that all sequences share, in the same blocks; a multiple of the block size.
    """

    model: Model
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    block_size: int = 16
    kv_dtype: str = "bfloat16"
    layout: Layout = "shuffled"
    prefix: int = 0

    @property
    def num_seqs(self) -> int:
        """Sequences."""
        return len(self.kv_lens)

    @property
    def paged(self) -> bool:
        """Whether KV lies in blocks."""
        return self.layout != "contiguous"

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one query."""
        return self.q_lens is None

    @cached_property
    def queries(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        return self.q_lens if self.q_lens is not None else (1,) * self.num_seqs

    @cached_property
    def num_tokens(self) -> int:
        """Queries of the batch."""
        return sum(self.queries)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that hold the batch's KV; contiguous KV is counted in tokens."""
        if not self.paged:
            return sum(self.kv_lens)
        own = sum(-(-(length - self.prefix) // self.block_size) for length in self.kv_lens)
        return self.prefix // self.block_size + own

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 1 where KV is contiguous."""
        return self.block_size if self.paged else 1

    @property
    def token_elements(self) -> int:
        """Elements of one token's K."""
        return self.model.num_kv_heads * self.model.head_dim

    @property
    def side_elements(self) -> int:
        """Elements of all K."""
        return self.num_blocks * self.block_tokens * self.token_elements

    @property
    def pool_bytes(self) -> int:
        """Memory of one copy of K and V."""
        return 2 * self.side_elements * ELEMENT_BYTES[self.kv_dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call has to read: each distinct token once."""
        tokens = self.prefix + sum(length - self.prefix for length in self.kv_lens)
        return 2 * tokens * self.token_elements * ELEMENT_BYTES[self.kv_dtype]

    @property
    def moved_bytes(self) -> int:
        """KV, Q, O and the table: what a call moves at least."""
        q = self.num_tokens * self.model.num_qo_heads * self.model.head_dim * QUERY_BYTES
        return self.kv_bytes + 2 * q + (self.num_blocks * INDEX_BYTES if self.paged else 0)

    @property
    def flops(self) -> float:
        """Multiplications and additions of causal attention.

        4 * head_dim for every query head and pair it sees.
        """
        pairs = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in zip(self.queries, self.kv_lens, strict=True))
        return 4.0 * self.model.num_qo_heads * self.model.head_dim * pairs

    def block_tables(self, seed: int = 0) -> NDArray[np.int32]:
        """int32 [num_seqs, max_blocks], -1 where there is no block.

        Shared prefixes name the same blocks.
        """
        counts = [-(-length // self.block_size) for length in self.kv_lens]
        order = np.arange(self.num_blocks, dtype=np.int32)
        if self.layout != "sequential":
            order = np.random.default_rng(seed).permutation(order)
        shared = self.prefix // self.block_size
        tables = np.full((self.num_seqs, max(counts)), -1, np.int32)
        tables[:, :shared] = order[:shared]
        taken = shared
        for seq, count in enumerate(counts):
            tables[seq, shared:count] = order[taken : taken + count - shared]
            taken += count - shared
        return tables


def zipf_lens(count: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Lengths that fall with a power of the rank, in a shuffled order.

    From the longest to the shortest.
    """
    power = np.log(longest / shortest) / np.log(count)
    lens = np.round(longest / np.arange(1, count + 1) ** power).astype(int)
    return tuple(int(n) for n in np.random.default_rng(1).permutation(lens))


def indptr(counts: tuple[int, ...]) -> NDArray[np.int32]:
    """Offsets [len(counts) + 1] of ranges that follow one another."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
