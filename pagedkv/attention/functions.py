"""One-shot attention over dense K and V, without a plan.

Contiguous or paged, by a threshold.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention.kv_writer import write_kv
from pagedkv.attention.paged_attention import PagedAttention
from pagedkv.attention.places import Device, backend_of, home_of
from pagedkv.errors import InvalidArgument, LayoutMismatch

DEFAULT_THRESHOLD = 2048  # keys of the longest sequence from which "auto" takes the paged path (Aule's default)


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_indptr: Any = None,
    kv_indptr: Any = None,
    path: Literal["auto", "contiguous", "paged"] = "auto",
    paged_threshold: int = DEFAULT_THRESHOLD,
    block_size: int = 16,
    out: Any = None,
    lse: Any = None,
    device: Device | None = None,
    stream: Any = None,
    **options: Any,
) -> Any:
    """Attention over dense K and V of one or several sequences.

    Workspaces are made for the call, so on a GPU it waits until the result is there; loops keep a
    :class:`PagedAttention`. The contiguous path reads K and V where they are. The paged path first copies them into
    blocks, and computes the same; a runtime whose KV grows keeps it in blocks from the start
    (:class:`PagedAttention`, or a KVCache).

    Parameters
    ----------
    q : [num_tokens, num_qo_heads, head_dim].
    k, v : [num_kv_tokens, num_kv_heads, head_dim], [num_kv_tokens, num_kv_heads, head_dim_v].
    q_indptr, kv_indptr : integers [num_seqs + 1] on the host, where each sequence's queries and keys begin; default
        one sequence.
    path : ``"auto"`` takes the paged path when the longest sequence has more than ``paged_threshold`` keys.
    block_size : of the paged path.
    out, lse, stream : as :meth:`PagedAttention.run`.
    device : default where the arrays live.
    options : variants and names of :class:`PagedAttention`: causal, window, soft_cap, alibi_slopes, sinks,
        softmax_scale, kernel ...

    Raises
    ------
    InvalidArgument, LayoutMismatch, WrongType, UnsupportedVariant
        As :class:`PagedAttention`.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(getattr(array, "shape", ())) != 3:
            raise LayoutMismatch(
                f"{name} must be [num_tokens, num_heads, head_dim], got {getattr(array, 'shape', type(array))}"
            )
    if path not in ("auto", "contiguous", "paged"):
        raise InvalidArgument(f"path must be 'auto', 'contiguous' or 'paged', got {path!r}")
    if k.shape[:2] != v.shape[:2]:
        raise LayoutMismatch(f"k and v must have the same tokens and heads, got {k.shape} and {v.shape}")
    backend = home_of(q=q, k=k, v=v) if device is None else backend_of(device)
    queries = _indptr("q_indptr", q_indptr, len(q))
    keys = _indptr("kv_indptr", kv_indptr, len(k))
    if len(queries) != len(keys):
        raise LayoutMismatch(f"q_indptr has {len(queries)} entries, kv_indptr {len(keys)}")
    lens = np.diff(keys)
    longest = int(lens.max(initial=0))
    paged = path == "paged" or (path == "auto" and longest > paged_threshold)
    attention = PagedAttention(
        num_qo_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=k.shape[2], head_dim_v=v.shape[2],
        block_size=block_size if paged else 0, max_sequences=max(len(lens), 1),
        max_q_len=max(int(np.diff(queries).max(initial=1)), 1), max_tokens=max(len(q), 1),
        max_seq_len=longest, device=backend or "cpu", **options,
    )  # fmt: skip
    place = np.asarray if backend is None else backend.asarray
    if paged:
        tables, slots, num_blocks = _fresh_blocks(keys, block_size)
        zeros = np.zeros if backend is None else backend.zeros
        k_pool, v_pool = (zeros((num_blocks, block_size, *x.shape[1:]), x.dtype) for x in (k, v))
        write_kv(k, v, k_pool, v_pool, place(slots), device=backend or "cpu", stream=stream)
        attention.plan(place(tables), place(lens), place(queries), stream=stream)
        result = attention.run(q, k_pool, v_pool, out=out, lse=lse, stream=stream)
    else:
        attention.plan(None, place(lens), place(queries), kv_indptr=place(keys), stream=stream)
        result = attention.run(q, k, v, out=out, lse=lse, stream=stream)
    if backend is not None:
        backend.synchronize()  # the workspaces and pools end with this call
    return result


def _fresh_blocks(keys: NDArray[np.int32], block_size: int) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Make block tables in which every sequence owns its blocks in order.

    Returns the tables, the slot of each token, and the number of blocks.
    """
    lens = np.diff(keys)
    blocks = -(-lens // block_size)
    first = np.concatenate([[0], np.cumsum(blocks)])
    tables = np.full((len(lens), max(int(blocks.max(initial=0)), 1)), -1, np.int32)
    slots = np.empty(int(keys[-1]), np.int64)
    for seq, count in enumerate(blocks):
        tables[seq, :count] = first[seq] + np.arange(count)
        slots[keys[seq] : keys[seq + 1]] = first[seq] * block_size + np.arange(lens[seq])
    return tables, slots, max(int(first[-1]), 1)


def _indptr(name: str, indptr: Any, count: int) -> NDArray[np.int32]:
    """Offsets as int32 on the host; one sequence where none are given."""
    offsets = np.array([0, count]) if indptr is None else np.asarray(indptr)
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 1:
        raise LayoutMismatch(f"{name} must be integers [num_seqs + 1], got {offsets.dtype} {offsets.shape}")
    if offsets[0] != 0 or offsets[-1] != count or (np.diff(offsets.astype(np.int64)) < 0).any():
        raise InvalidArgument(f"{name} must rise from 0 to {count}, got {offsets.tolist()[:8]}")
    return offsets.astype(np.int32)
