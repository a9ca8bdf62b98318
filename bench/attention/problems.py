"""A shape's arrays: queries, several copies of KV in the arena, block tables.

And what float64 says to some rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.attention.arena import ALIGNMENT, FP8_SCALE, Arena
from bench.attention.device import Device
from bench.attention.shapes import ELEMENT_BYTES, Shape, indptr
from bench.attention.systems import Unsupported
from pagedkv.spec.dtypes import bfloat16_to_float32, float32_to_bfloat16

POOL_LAYERS = 32  # of a block-major pool; its layers are the copies that calls rotate through


@dataclass(frozen=True, slots=True)
class Places:
    """Where K and V of one copy lie in the arena, in elements.

    K of a token lies at ``k + block * block_stride + ...``.
    """

    k: int
    v: int
    block_stride: int
    token_stride: int
    head_stride: int


class Problem:
    """One shape on the device.

    Parameters
    ----------
    device, arena, shape
    copies : of KV, so that a call does not find in the cache what the call before it read.

    Attributes
    ----------
    q : bfloat16 bits, uint16 [num_tokens, num_qo_heads, head_dim].
    seq_lens, q_indptr : int32 [num_seqs], [num_seqs + 1].
    block_tables : int32 [num_seqs, max_blocks]; None where KV is contiguous.
    kv_indptr : int32 [num_seqs + 1], of contiguous KV.
    scale : float32 [1], of K and of V; None where they are bfloat16.
    """

    def __init__(self, device: Device, arena: Arena, shape: Shape, copies: int) -> None:
        self.device, self.arena, self.shape, self.copies = device, arena, shape, copies
        model = shape.model
        rng = np.random.default_rng(2)
        q = rng.standard_normal((shape.num_tokens, model.num_qo_heads, model.head_dim), dtype=np.float32)
        bits = float32_to_bfloat16(q)
        self._q = bits
        self.q = device.array(bits)
        self.host_tables = shape.block_tables() if shape.paged else None
        self.host_lens = np.array(shape.kv_lens, np.int32)
        self.host_q_indptr = indptr(shape.queries)
        self.host_kv_indptr = indptr(shape.kv_lens)
        self.block_tables = None if self.host_tables is None else device.array(self.host_tables)
        self.seq_lens = device.array(self.host_lens)
        self.q_indptr = device.array(self.host_q_indptr)
        self.kv_indptr = device.array(self.host_kv_indptr)
        self.scale = device.array(np.full(1, FP8_SCALE, np.float32)) if shape.kv_dtype == "float8_e4m3" else None
        arena.hold(shape.kv_dtype)

    @property
    def softmax_scale(self) -> float:
        """Of the scores."""
        return 1 / math.sqrt(self.shape.model.head_dim)

    def places(self, copy: int) -> Places:
        """Where a copy's K and V lie."""
        return places(self.shape, copy, self.copies)

    def kv(self, copy: int) -> tuple[Any, Any]:
        """K and V of a copy: [num_blocks, block_size, num_kv_heads, head_dim].

        Contiguous: without the second axis.
        """
        shape, model = self.shape, self.shape.model
        self.arena.hold(shape.kv_dtype)
        row = (model.num_kv_heads, model.head_dim)
        if shape.layout == "pool":
            pool = self.arena.elements(0, (shape.num_blocks, self.copies, 2, shape.block_size, *row))
            return pool[:, copy, 0], pool[:, copy, 1]
        at = self.places(copy)
        full = (shape.num_blocks, shape.block_size, *row) if shape.paged else (shape.num_blocks, *row)
        return self.arena.elements(at.k, full), self.arena.elements(at.v, full)

    @cached_property
    def rows(self) -> tuple[tuple[int, int, int], ...]:
        """(sequence, query, head) of the rows that are checked.

        Of the first, last and longest sequences.
        """
        shape = self.shape
        seqs = dict.fromkeys([0, shape.num_seqs - 1, int(np.argmax(shape.kv_lens)), shape.num_seqs // 2])
        rng = np.random.default_rng(3)
        heads = shape.model.num_qo_heads
        found = [
            (seq, query, int(rng.integers(heads)))
            for seq in seqs
            for query in dict.fromkeys([0, shape.queries[seq] // 2, shape.queries[seq] - 1])
        ]
        return tuple(dict.fromkeys([*found, (0, 0, 0), (shape.num_seqs - 1, shape.queries[-1] - 1, heads - 1)]))

    @cached_property
    def expected(self) -> NDArray[np.float64]:
        """float64 [len(rows), head_dim]: the outputs of ``rows`` for copy 0."""
        return self._expected(self.places(0), self.host_tables)

    @cached_property
    def expected_contiguous(self) -> NDArray[np.float64]:
        """The same for :meth:`contiguous`."""
        return self._expected(places(replace(self.shape, layout="contiguous"), 0, self.copies), None)

    def contiguous(self, copy: int) -> tuple[Any, Any]:
        """Contiguous K and V of as many tokens as the sequences have, in the same memory.

        [num_kv_tokens, num_kv_heads, head_dim].

        Raises
        ------
        Unsupported
            Sequences share a prefix: contiguous KV would be many times as large.
        """
        if self.shape.prefix:
            raise Unsupported("contiguous KV has no shared prefix")
        flat = replace(self.shape, layout="contiguous")
        at = places(flat, copy, self.copies)
        full = (flat.num_blocks, self.shape.model.num_kv_heads, self.shape.model.head_dim)
        self.arena.hold(self.shape.kv_dtype)
        return self.arena.elements(at.k, full), self.arena.elements(at.v, full)

    def error(self, result: NDArray[np.uint16], expected: NDArray[np.float64]) -> float:
        """Largest difference of the checked rows, relative to the largest value expected.

        NaN if there is a NaN.

        Parameters
        ----------
        result : bfloat16 bits [num_tokens, num_qo_heads, head_dim].
        """
        bits = np.stack([result[self.host_q_indptr[seq] + query, head] for seq, query, head in self.rows])
        return float(np.abs(bfloat16_to_float32(bits) - expected).max() / np.abs(expected).max())

    def _expected(self, at: Places, tables: NDArray[np.int32] | None) -> NDArray[np.float64]:
        shape, model = self.shape, self.shape.model
        rows = []
        for seq, query, head in self.rows:
            length = shape.kv_lens[seq] - shape.queries[seq] + query + 1  # keys it sees
            tokens = np.arange(length, dtype=np.int64)
            if tables is None:
                first = (self.host_kv_indptr[seq] + tokens) * at.token_stride
            else:
                blocks = tables[seq].astype(np.int64)[tokens // shape.block_size]
                first = blocks * at.block_stride + tokens % shape.block_size * at.token_stride
            first += head // model.group_size * at.head_stride
            dims = np.arange(model.head_dim, dtype=np.int64)
            k = self.arena.values(at.k + first[:, None] + dims, shape.kv_dtype).astype(np.float64)
            v = self.arena.values(at.v + first[:, None] + dims, shape.kv_dtype).astype(np.float64)
            q = bfloat16_to_float32(self._q[self.host_q_indptr[seq] + query, head]).astype(np.float64)
            scores = k @ q * self.softmax_scale
            shares = np.exp(scores - scores.max())
            rows.append(shares @ v / shares.sum())
        return np.stack(rows)


def places(shape: Shape, copy: int, copies: int) -> Places:
    """Where a copy's K and V lie in the arena."""
    row = shape.token_elements
    block = shape.block_tokens * row
    if shape.layout == "pool":
        base = copy * 2 * block
        return Places(base, base + block, copies * 2 * block, row, shape.model.head_dim)
    side = side_stride(shape)
    return Places(2 * copy * side, (2 * copy + 1) * side, block, row, shape.model.head_dim)


def side_stride(shape: Shape) -> int:
    """Elements from a copy's K to its V, and from there to the next copy's K."""
    step = ALIGNMENT // ELEMENT_BYTES[shape.kv_dtype]
    return -(-shape.side_elements // step) * step


def arena_bytes(shape: Shape, copies: int) -> int:
    """Memory that so many copies take."""
    if shape.layout == "pool":
        return copies * shape.pool_bytes
    return 2 * copies * side_stride(shape) * ELEMENT_BYTES[shape.kv_dtype]


def choose_copies(shape: Shape, l2_bytes: int, room_bytes: int, most: int = 64) -> int:
    """Copies of KV that together are four times the cache, at least three.

    As many as there is room for.

    Raises
    ------
    MemoryError
        Not even one fits.
    """
    wanted = POOL_LAYERS if shape.layout == "pool" else min(most, max(3, math.ceil(4 * l2_bytes / shape.pool_bytes)))
    fitting = room_bytes // arena_bytes(shape, 1)
    if fitting < 1:
        needed, room = arena_bytes(shape, 1) / 2**30, room_bytes / 2**30
        raise MemoryError(f"one copy of KV needs {needed:.1f} GiB, there is room for {room:.1f}")
    return min(wanted, fitting)
