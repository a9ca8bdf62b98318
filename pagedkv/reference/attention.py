"""Exact attention over paged KV in float64: the reference for every faster kernel.

Two ways to the same result, kept apart on purpose: :func:`paged_attention` is the softmax as textbooks write it, over
all visible keys; :func:`online_softmax_attention` walks the KV block by block, in one or several splits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .mask import PackedMask
from .online import OnlineState, divide_out, exp_above, weighted_sum
from .paging import Decode, Floats, PagedBatch
from .scoring import Scoring

QUERY_TILE = 64  # queries at a time: bounds the score matrix without changing a bit of the result


def paged_attention(
    q: NDArray[Any],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    q_indptr: ArrayLike,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    mask_indptr: ArrayLike | None = None,
    q_positions: ArrayLike | None = None,
    decode: Decode | None = None,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
) -> Any:
    """Attention of every query over the keys it may see.

    Parameters
    ----------
    q : [num_tokens, num_qo_heads, head_dim].
    k_cache, v_cache : [num_blocks, block_size, num_kv_heads, head_dim], any strides; V's head_dim may differ.
    block_tables : integers [num_seqs, max_blocks_per_seq], -1 where there is no block.
    seq_lens : integers [num_seqs], keys of each sequence, those of this call's tokens included.
    q_indptr : integers [num_seqs + 1], where each sequence's queries begin.
    softmax_scale : factor of the scores; default ``head_dim ** -0.5``.
    causal : a query at position p sees no key behind p. A sequence's last query is at its last key.
    window : a query sees, of the keys up to p, only the last ``window`` (p's own included).
    soft_cap : scores become ``soft_cap * tanh(score / soft_cap)``.
    alibi_slopes : floating point [num_qo_heads]; scores, capped already, grow by
        ``slope * (key position - query position)``.
    sinks : floating point [num_qo_heads], one more logit in each head's softmax, to which no value belongs:
        what falls to it falls to nothing. -inf for a head without one.
    mask : uint8 [num_bytes], packed bits (:func:`pack_mask`); a query sees, of the keys that ``causal`` and
        ``window`` leave, only those whose bit is 1.
    mask_indptr : integers [num_seqs + 1], where each sequence's bits begin, in bytes; given with ``mask``.
    q_positions : integers [num_tokens], where each query stands, counted from its sequence's first key, for queries
        with further keys elsewhere; default: a sequence's last query is at its last key.
    decode : turns integer arrays (bfloat16 bits as uint16) into floating point.
    return_lse : return ``(o, lse)``.
    out : floating point [num_tokens, num_qo_heads, head_dim_v], written and returned; with float64 nothing is
        rounded.

    Returns
    -------
    o : [num_tokens, num_qo_heads, head_dim_v] in ``q``'s dtype, float32 when ``q`` is integer bits; rounded
        once, at the end. 0 where a query sees no key.
    lse : float32 [num_tokens, num_qo_heads], natural log-sum-exp of the scores and the sink; -inf where there
        is neither.

    Raises
    ------
    TypeError, ValueError
        Arrays that do not fit together; nothing has been written then.
    """
    packed = _packed(mask, mask_indptr)
    batch = _batch(q, k_cache, v_cache, block_tables, seq_lens, q_indptr, decode, causal, window, packed, q_positions)
    scoring = Scoring(batch, softmax_scale, soft_cap, alibi_slopes, sinks)
    results = _Results(batch, out)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for seq, first, last in batch.sequences():
            sight = batch.sight(seq)
            base, top = sight.span()
            keys, values = batch.keys_values(seq, base, top)
            for row in range(0, last - first, QUERY_TILE):
                tile = slice(row, min(row + QUERY_TILE, last - first))
                low, high = sight[tile].span()
                near = slice(low - base, high - base)
                scores = scoring(batch.queries(first + row, first + tile.stop), keys[:, near], sight[tile], low)
                sink = scoring.sink(sight[tile])
                m = np.maximum(scores.max(axis=-1, initial=-np.inf), sink)
                weights = exp_above(scores, m[..., None])
                d = weights.sum(axis=-1) + exp_above(sink, m)
                o, lse = divide_out(weighted_sum(weights, values[:, near]), m, d)
                results.put(first + row, first + tile.stop, o, lse)
    return results.get(return_lse)


def online_softmax_attention(
    q: NDArray[Any],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    q_indptr: ArrayLike,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    mask_indptr: ArrayLike | None = None,
    decode: Decode | None = None,
    num_splits: int = 1,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
) -> Any:
    """As :func:`paged_attention`, one block after the other through an :class:`OnlineState`.

    Parameters
    ----------
    num_splits : how many states share a sequence's blocks, evenly and in order; they are merged at the end.
        The other parameters, the results and the errors are those of :func:`paged_attention`.
    """
    packed = _packed(mask, mask_indptr)
    batch = _batch(q, k_cache, v_cache, block_tables, seq_lens, q_indptr, decode, causal, window, packed)
    scoring = Scoring(batch, softmax_scale, soft_cap, alibi_slopes, sinks)
    if num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, got {num_splits}")
    results = _Results(batch, out)
    block_size = k_cache.shape[1]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for seq, first, last in batch.sequences():
            sight = batch.sight(seq)
            base, top = sight.span()
            queries = batch.queries(first, last)
            shape = (queries.shape[0], queries.shape[1], v_cache.shape[3])
            blocks = range(base // block_size, -(-top // block_size))
            states = [OnlineState(*shape) for _ in range(num_splits)]
            for turn, block in enumerate(blocks):
                low, high = max(block * block_size, base), min((block + 1) * block_size, top)
                keys, values = batch.keys_values(seq, low, high)
                state = states[turn * num_splits // len(blocks)]
                state.update(scoring(queries, keys, sight, low), values)
            for state in states[1:]:
                states[0].merge(state)
            states[0].add_sink(scoring.sink(sight))
            results.put(first, last, *states[0].finish())
    return results.get(return_lse)


def _batch(
    q: NDArray[Any],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    q_indptr: ArrayLike,
    decode: Decode | None,
    causal: bool,
    window: int | None,
    mask: PackedMask | None,
    q_positions: ArrayLike | None = None,
) -> PagedBatch:
    tables, lens, indptr = (np.asarray(array) for array in (block_tables, seq_lens, q_indptr))
    positions = None if q_positions is None else np.asarray(q_positions)
    return PagedBatch(q, k_cache, v_cache, tables, lens, indptr, decode, causal, window, mask, positions)


def _packed(mask: ArrayLike | None, mask_indptr: ArrayLike | None) -> PackedMask | None:
    if mask is None and mask_indptr is None:
        return None
    if mask is None or mask_indptr is None:
        raise ValueError("mask and mask_indptr are given together")
    return PackedMask(np.asarray(mask), np.asarray(mask_indptr))


class _Results:
    """Where outputs go, from the order of the arithmetic back to that of the queries."""

    def __init__(self, batch: PagedBatch, out: NDArray[Any] | None) -> None:
        self.shape = (*batch.q.shape[:2], batch.v_cache.shape[3])
        self.group_size = batch.group_size
        if out is None:
            dtype = np.dtype(np.float32) if batch.q.dtype.kind in "iu" else batch.q.dtype
            out = np.zeros(self.shape, dtype=dtype)
        elif out.shape != self.shape or out.dtype.kind in "biucOSUmM":
            raise ValueError(f"out must be floating point {self.shape}, got {out.dtype} {out.shape}")
        elif not out.flags.writeable:
            raise ValueError("out is read-only")
        self.o = out
        self.lse = np.full(self.shape[:2], -np.inf, dtype=np.float32)

    def put(self, first: int, last: int, o: Floats, lse: Floats) -> None:
        """Results of queries ``first..last - 1``: [num_kv_heads, (last - first) * group_size, ...]."""
        heads, count = o.shape[0], last - first
        rows = o.reshape(heads, count, self.group_size, -1).transpose(1, 0, 2, 3)
        self.o[first:last] = rows.reshape(count, *self.shape[1:]).astype(self.o.dtype)
        flat = lse.reshape(heads, count, self.group_size).transpose(1, 0, 2)
        self.lse[first:last] = flat.reshape(count, self.shape[1])

    def get(self, with_lse: bool) -> Any:
        return (self.o, self.lse) if with_lse else self.o
