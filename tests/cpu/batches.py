"""Random batches over shuffled blocks, and the float64 reference's results for them.

Slots that no sequence owns hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pagedkv import cpu
from pagedkv.reference import paged_attention

DTYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8,
    "float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """One attention call."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    tables: NDArray[np.int32]
    lens: NDArray[np.int32]
    indptr: NDArray[np.int32]

    def attend(self, **options: Any) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The kernels' output and log-sum-exp."""
        lse = np.full(self.q.shape[:2], np.nan, np.float32)
        out = np.full((*self.q.shape[:2], self.v.shape[3]), np.nan, self.q.dtype)
        given = {"block_tables": self.tables, "q_indptr": self.indptr, "lse": lse, "out": out}
        return cpu.attend(self.q, self.k, self.v, self.lens, **(given | options)), lse

    def exact(self, **options: Any) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The reference's; scales are multiplied into K and V."""
        k, v = (x.astype(np.float64) for x in (self.k, self.v))
        k_scale, v_scale = options.pop("k_scale", None), options.pop("v_scale", None)
        if k_scale is not None:
            k, v = (x * (s[..., None] if s.size > 1 else s) for x, s in ((k, k_scale), (v, v_scale)))
        out = np.zeros((*self.q.shape[:2], self.v.shape[3]))
        found: tuple[NDArray[Any], NDArray[np.float32]] = paged_attention(
            self.q.astype(np.float64), k, v, self.tables, self.lens, self.indptr, return_lse=True, out=out, **options
        )
        return found


def batch(
    seq_lens: tuple[int, ...] = (5, 33, 1),
    q_lens: tuple[int, ...] | None = None,
    *,
    heads: int = 2,
    group: int = 2,
    dim: int = 32,
    dim_v: int | None = None,
    block_size: int = 16,
    dtype: str = "float32",
    q_dtype: str = "float32",
    layout: str = "NHD",
    seed: int = 0,
) -> Batch:
    """A batch of these lengths."""
    rng = np.random.default_rng(seed)
    q_lens = (1,) * len(seq_lens) if q_lens is None else q_lens
    lens = np.array(seq_lens, np.int32)
    blocks = -(-lens // block_size)
    order = rng.permutation(int(blocks.sum()) + 2).astype(np.int32)
    tables = np.full((len(lens), int(blocks.max(initial=0)) + 1), -1, np.int32)
    dims = (dim, dim if dim_v is None else dim_v)
    caches = []
    for width in dims:
        shape = (len(order), block_size, heads, width)
        values = rng.standard_normal(shape) if dtype != "int8" else rng.integers(-127, 128, shape)
        cache = values.astype(DTYPES[dtype])
        if layout == "HND":
            cache = np.ascontiguousarray(cache.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        caches.append(cache)
    owned = np.zeros((len(order), block_size), bool)
    for seq, (count, end) in enumerate(zip(blocks, np.cumsum(blocks))):
        tables[seq, :count] = order[end - count : end]
        for token in range(lens[seq]):
            owned[tables[seq, token // block_size], token % block_size] = True
    if dtype != "int8":
        for cache in caches:
            cache[~owned] = np.nan
    indptr = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    q = rng.standard_normal((int(indptr[-1]), heads * group, dim)).astype(DTYPES[q_dtype])
    return Batch(q, *caches, tables, lens, indptr)


def close(found: NDArray[Any], exact: NDArray[Any], tolerance: float) -> None:
    """Assert infinities and NaN in the same places, and everything else near.

    The tolerance is relative to the largest value of the whole.
    """
    found = found.astype(np.float64)
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(found), kind(exact))
    finite = np.isfinite(exact)
    off = np.abs(found[finite] - exact[finite])
    largest = max(1.0, float(np.abs(exact[finite]).max(initial=0)))
    assert off.max(initial=0) <= tolerance * largest, f"off by {off.max()} of {largest}"
