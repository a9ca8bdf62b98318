"""The arrays of one paged attention call, checked once and read sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .mask import PackedMask
from .sight import Sight

Floats: TypeAlias = NDArray[np.float64]
Decode: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Queries of several sequences and the paged KV that they look at.

    Without ``q_positions``, query ``i`` of a sequence with ``q_len`` queries and ``seq_len`` keys stands at position
    ``seq_len - q_len + i``: the last query is at the last key (bottom-right alignment).

    Parameters
    ----------
    q : [num_tokens, num_qo_heads, head_dim].
    k_cache : [num_blocks, block_size, num_kv_heads, head_dim], any strides.
    v_cache : [num_blocks, block_size, num_kv_heads, head_dim_v], any strides.
    block_tables : integers [num_seqs, max_blocks_per_seq]; entries that no query can see may be anything.
    seq_lens : integers [num_seqs], keys of each sequence, those of this call's queries included.
    q_indptr : integers [num_seqs + 1], where each sequence's queries begin in ``q``.
    decode : turns integer arrays (bfloat16 bits, say) into floating point; not called for other arrays.
    causal : a query sees no key behind its own position.
    window : a query sees, of the keys up to its position, only the last ``window``; None for all.
    mask : which of the keys that are left a query sees; None for all. A hidden key's block must exist.
    q_positions : integers [num_tokens], where each query stands, counted from its sequence's first key.

    Raises
    ------
    TypeError
        An array of the wrong kind; or integer KV or queries without ``decode``.
    ValueError
        Shapes, lengths, offsets or a visible block id that do not fit together.
    """

    q: NDArray[Any]
    k_cache: NDArray[Any]
    v_cache: NDArray[Any]
    block_tables: NDArray[Any]
    seq_lens: NDArray[Any]
    q_indptr: NDArray[Any]
    decode: Decode | None
    causal: bool
    window: int | None
    mask: PackedMask | None
    q_positions: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        self._check_kv()
        self._check_indices()
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.mask is not None:
            self.mask.check(self.q_indptr, self.seq_lens)
        self._check_block_ids()

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return int(self.q.shape[1] // self.k_cache.shape[2])

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """``(seq, first, last)``: queries ``first..last - 1`` of ``q`` belong to sequence ``seq``."""
        for seq in range(len(self.seq_lens)):
            first, last = int(self.q_indptr[seq]), int(self.q_indptr[seq + 1])
            if first < last:
                yield seq, first, last

    def sight(self, seq: int) -> Sight:
        """The tokens that the queries of a sequence see."""
        q_len, seq_len = int(self.q_indptr[seq + 1] - self.q_indptr[seq]), int(self.seq_lens[seq])
        mask = None if self.mask is None else self.mask.rows(seq, q_len, seq_len)
        if self.q_positions is None:
            position = seq_len - q_len + np.arange(q_len, dtype=np.int64)
        else:
            position = self.q_positions[self.q_indptr[seq] : self.q_indptr[seq + 1]].astype(np.int64)
        return Sight.of(position, seq_len, self.causal, self.window, mask)

    def queries(self, first: int, last: int) -> Floats:
        """Queries ``first..last - 1``.

        float64 [num_kv_heads, (last - first) * group_size, head_dim].
        """
        heads = self.k_cache.shape[2]
        rows = self._floats(self.q[first:last]).reshape(last - first, heads, self.group_size, -1)
        return rows.transpose(1, 0, 2, 3).reshape(heads, (last - first) * self.group_size, -1)

    def keys_values(self, seq: int, begin: int, end: int) -> tuple[Floats, Floats]:
        """K and V of tokens ``begin..end - 1``.

        float64 [num_kv_heads, end - begin, head_dim], head_dim_v.
        """
        ids = self._blocks(seq, begin, end)
        skip = begin % self.k_cache.shape[1]

        def tokens(cache: NDArray[Any]) -> Floats:
            rows = self._floats(cache[ids]).reshape(-1, *cache.shape[2:])
            return rows[skip : skip + end - begin].transpose(1, 0, 2)

        return tokens(self.k_cache), tokens(self.v_cache)

    def _blocks(self, seq: int, begin: int, end: int) -> NDArray[Any]:
        """Ids of the blocks that hold tokens ``begin..end - 1``."""
        block_size = self.k_cache.shape[1]
        first = begin // block_size
        return self.block_tables[seq, first : -(-end // block_size) if begin < end else first]

    def _floats(self, array: NDArray[Any]) -> Floats:
        if array.dtype.kind in "iu" and self.decode is not None:
            return self.decode(array).astype(np.float64)
        return array.astype(np.float64)

    def _check_kv(self) -> None:
        q, k, v = self.q, self.k_cache, self.v_cache
        for name, array, num_axes in (("q", q, 3), ("k_cache", k, 4), ("v_cache", v, 4)):
            if array.ndim != num_axes:
                raise ValueError(f"{name} must have {num_axes} axes, got shape {array.shape}")
            if array.dtype.kind in "iu" and self.decode is None:
                raise TypeError(f"{name} is {array.dtype}, and must be floating point; integer bits need decode=")
            if array.dtype.kind in "bcOSUmM":
                raise TypeError(f"{name} must be floating point, not {array.dtype}")
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"k_cache {k.shape} and v_cache {v.shape} must agree but in the last axis")
        if q.shape[2] != k.shape[3]:
            raise ValueError(f"head_dim of q is {q.shape[2]}, of k_cache {k.shape[3]}")
        if min(k.shape[1:3]) < 1 or q.shape[1] < 1 or q.shape[1] % k.shape[2]:
            raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[2]} KV heads evenly")

    def _check_indices(self) -> None:
        tables, lens, indptr = self.block_tables, self.seq_lens, self.q_indptr
        for name, array, num_axes in (
            ("block_tables", tables, 2),
            ("seq_lens", lens, 1),
            ("q_indptr", indptr, 1),
        ):
            if array.dtype.kind not in "iu":
                raise TypeError(f"{name} must be integers, not {array.dtype}")
            if array.ndim != num_axes:
                raise ValueError(f"{name} must have {num_axes} axes, got shape {array.shape}")
        if len(tables) != len(lens) or len(indptr) != len(lens) + 1:
            raise ValueError(f"{len(tables)} tables, {len(lens)} lengths, {len(indptr)} offsets do not fit together")
        if indptr[0] != 0 or indptr[-1] != len(self.q) or np.any(indptr[1:] < indptr[:-1]):
            raise ValueError(f"q_indptr must rise from 0 to {len(self.q)}, the number of query tokens")
        positions = self.q_positions
        if positions is not None and (positions.dtype.kind not in "iu" or positions.shape != self.q.shape[:1]):
            raise ValueError(
                f"q_positions must be integers [{len(self.q)}], one for each query token, got {positions.dtype} "
                f"{list(positions.shape)}"
            )
        room = tables.shape[1] * self.k_cache.shape[1]
        if lens.size and (lens.min() < 0 or lens.max() > room):
            raise ValueError(f"seq_lens must be in 0..{room}, the tokens that the block tables can hold")

    def _check_block_ids(self) -> None:
        num_blocks = self.k_cache.shape[0]
        for seq, _, _ in self.sequences():
            low, high = self.sight(seq).span()
            ids = self._blocks(seq, low, high)
            if ids.size and (ids.min() < 0 or ids.max() >= num_blocks):
                raise ValueError(f"sequence {seq} sees a block id outside 0..{num_blocks - 1}")
