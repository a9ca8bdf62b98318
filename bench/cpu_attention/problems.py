"""The problems of the CPU bench.

Shapes, contexts and dtypes, and the arrays that all systems compute on.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.spec.block_layout import plane_view
from pagedkv.spec.dtypes import float32_to_bfloat16
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.tiers.memory import anonymous_arena

BLOCK_SIZE = 16
ROTATED_BYTES = 288 << 20  # of K and V over all layers: more than any cache holds, so that they come from memory
SHAPES = {"8B": (32, 8, 128), "MHA": (32, 32, 128), "Smol": (9, 3, 64)}  # query heads, KV heads, head dim
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
SCALE_BYTES = {"int8": 4}  # of each token and head


@dataclass(frozen=True, slots=True)
class Problem:
    """One call per layer.

    Parameters
    ----------
    shape : a name of SHAPES.
    dtype : of K and V; queries have the same, but beside int8, whose scales lie in the blocks, they are float32.
    num_seqs, context : sequences, and keys of each, the new ones included.
    q_len : new tokens of each: 1 is decode.
    cached : every call reads the same layer, so that K and V come from the cache.
    """

    shape: str
    dtype: str
    num_seqs: int
    context: int
    q_len: int = 1
    cached: bool = False

    @property
    def name(self) -> str:
        """As in the tables."""
        work = "decode" if self.q_len == 1 else f"prefill {self.q_len} of"
        return f"{work} {self.num_seqs}x{self.context}{' in cache' * self.cached}"

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head dim."""
        return SHAPES[self.shape]

    @property
    def kv_bytes(self) -> int:
        """K and V that one call reads at least once."""
        _, kv_heads, dim = self.heads
        row = dim * ITEM_BYTES[self.dtype] + SCALE_BYTES.get(self.dtype, 0)
        return 2 * self.num_seqs * self.context * kv_heads * row

    @property
    def q_dtype(self) -> str:
        """Of the queries."""
        return "float32" if self.dtype == "int8" else self.dtype

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products, causal half only."""
        heads, _, dim = self.heads
        pairs = sum(self.context - self.q_len + 1 + i for i in range(self.q_len))
        return 4 * self.num_seqs * pairs * heads * dim

    @property
    def layers(self) -> int:
        """Layers that calls rotate over."""
        return max(1, math.ceil(ROTATED_BYTES / self.kv_bytes)) if self.q_len == 1 and not self.cached else 1

    def as_dict(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)


def problems(quick: bool) -> list[Problem]:
    """All of them, or a few."""
    if quick:
        return [
            Problem("8B", "float32", 1, 512),
            Problem("Smol", "bfloat16", 2, 300),
            Problem("Smol", "int8", 2, 300),
            Problem("8B", "float32", 1, 256, 256),
        ]
    decode = [
        Problem(shape, dtype, *batch)
        for shape, batches in (
            ("8B", ((1, 4096), (8, 4096), (32, 512), (1, 32768))),
            ("MHA", ((1, 4096),)),
            ("Smol", ((8, 4096), (1, 512))),
        )
        for batch in batches
        for dtype in ("float32", "bfloat16", "float16", "int8")
    ]  # fmt: skip
    prefill = [
        Problem("8B", dtype, 1, n, q)
        for dtype in ("float32", "bfloat16")
        for n, q in ((512, 512), (2048, 2048), (4608, 512))
    ]
    small = [
        Problem(shape, dtype, 1, n, cached=True)
        for shape, n in (("Smol", 128), ("8B", 256))  # the least that is asked for; arithmetic without memory
        for dtype in ("float32", "bfloat16", "float16", "int8")
    ]
    return decode + small + prefill


@dataclass(frozen=True, slots=True)
class Arrays:
    """A problem's arrays.

    K and V are paged, by layer: [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim].
    """

    q: NDArray[Any]
    layers: list[tuple[NDArray[Any], NDArray[Any]]]
    tables: NDArray[np.int32]
    lens: NDArray[np.int32]
    indptr: NDArray[np.int32]
    scales: list[tuple[NDArray[np.float32], NDArray[np.float32]]] | None = None

    def contiguous(self, layer: int, seq: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a sequence, copied out of the blocks: [context, num_kv_heads, head_dim]."""
        k, v = self.layers[layer]
        found = [x[self.tables[seq]].reshape(-1, *x.shape[2:])[: self.lens[seq]] for x in (k, v)]
        return found[0], found[1]


def arrays(problem: Problem) -> Arrays:
    """Shuffled blocks in huge pages; the same values in every process."""
    heads, kv_heads, dim = problem.heads
    rng = np.random.default_rng(0)
    each = -(-problem.context // BLOCK_SIZE)
    num_blocks = problem.num_seqs * each
    block = rng.standard_normal((2, BLOCK_SIZE, kv_heads, dim)).astype(np.float32)
    layers, scales = [], []
    if problem.dtype == "int8":
        spec, (stored, sizes) = KVSpec(1, kv_heads, dim, "int8", BLOCK_SIZE), _quantised(block)
        for _ in range(problem.layers):
            pool = anonymous_arena(num_blocks, spec.block_bytes, "bench")
            k, v, k_scale, v_scale = (plane_view(pool, spec, name)[:, 0] for name in ("k", "v", "k_scale", "v_scale"))
            k[:], v[:], k_scale[:], v_scale[:] = *stored, *sizes
            layers.append((k, v))
            scales.append((k_scale, v_scale))
    else:
        stored = float32_to_bfloat16(block) if problem.dtype == "bfloat16" else block.astype(problem.dtype)
        for _ in range(problem.layers):
            pool = (
                anonymous_arena(num_blocks, stored.nbytes, "bench")
                .view(stored.dtype)
                .reshape(num_blocks, *stored.shape)
            )
            pool[:] = stored
            layers.append((pool[:, 0], pool[:, 1]))
    q = rng.standard_normal((problem.num_seqs * problem.q_len, heads, dim)).astype(np.float32)
    queries = float32_to_bfloat16(q) if problem.dtype == "bfloat16" else q.astype(problem.q_dtype)
    tables = rng.permutation(num_blocks).astype(np.int32).reshape(problem.num_seqs, each)
    lens = np.full(problem.num_seqs, problem.context, np.int32)
    indptr = np.arange(problem.num_seqs + 1, dtype=np.int32) * problem.q_len
    return Arrays(queries, layers, tables, lens, indptr, scales or None)


def _quantised(block: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Numbers and the scale of each token and head."""
    scale = np.abs(block).max(axis=-1) / np.float32(127)
    return np.rint(block / scale[..., None]).astype(np.int8), scale
