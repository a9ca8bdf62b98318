"""Attention problems for the kernels, and their results in float64.

The paged KV is random, and NaN wherever no sequence owns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pagedkv.kernels import decode_simt
from pagedkv.kernels.attention import AttentionPlan, Batch, Options
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import AttentionConfig, ScaleMode, Schedule, Tiling
from pagedkv.reference import pack_mask, paged_attention
from tests.kernels.pools import huge

DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
# Largest error against float64 for standard normal data, relative to the largest output (benchmarks.md section 4).
BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}


@dataclass(frozen=True)
class Case:
    """One problem. ``seq_lens`` are keys; ``q_lens`` queries per sequence (None: one each)."""

    seq_lens: tuple[int, ...] = (33,)
    q_lens: tuple[int, ...] | None = None
    head_dim: int = 64
    head_dim_v: int | None = None
    group_size: int = 4
    num_kv_heads: int = 2
    block_size: int = 16  # 0: contiguous KV
    q_dtype: str = "float16"
    kv_dtype: str = "float16"
    layout: str = "NHD"
    scale_mode: ScaleMode = "none"
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    mask: bool = False
    seed: int = 0
    softmax_scale: float | None = None
    q_size: float = 1.0  # of queries
    v_size: float = 1.0  # of V's scales, which there must be
    v_in_k: bool = False  # V is the first head_dim_v numbers of K, with its scales
    v_spread: float = 0.0  # every scale of V is up to so many powers of two larger or smaller

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(
            self.head_dim,
            self.head_dim_v or self.head_dim,
            self.group_size,
            self.q_dtype,
            self.kv_dtype,
            self.block_size,
            self.causal,
            self.window > 0,
            self.soft_cap > 0,
            self.alibi,
            self.sinks,
            self.mask,
            self.scale_mode,
            v_in_k=self.v_in_k,
        )

    def __str__(self) -> str:
        plain = Case()
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return "-".join(f"{name}={value}" for name, value in shown.items() if value != getattr(plain, name)) or "plain"


@dataclass
class Strided:
    """A view into an array that goes to the device whole.

    It is a layer of a block-major pool, with that pool's strides.
    """

    whole: NDArray[Any]
    view: Callable[[Any], Any]

    def on(self, backend: Backend) -> Any:
        return self.view(backend.asarray(self.whole))


@dataclass
class OnDevice:
    """KV that is on the device already; takes the place of Strided."""

    array: Any

    def on(self, backend: Backend) -> Any:
        return self.array


@dataclass
class Problem:
    """The arrays of a case on the host, and the expected results in float64."""

    case: Case
    q: NDArray[Any]
    k: Strided | OnDevice
    v: Strided | OnDevice
    k_scale: NDArray[np.float32] | None
    v_scale: NDArray[np.float32] | None
    batch: Batch
    options: Options
    o: NDArray[np.float64]
    lse: NDArray[np.float64]


def problem(case: Case) -> Problem:
    """Random data for a case; the same for the same case."""
    rng = np.random.default_rng(case.seed)
    lens = np.array(case.seq_lens, np.int32)
    q_lens = np.ones(len(lens), np.int32) if case.q_lens is None else np.array(case.q_lens, np.int32)
    indptr = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    heads, dim, dim_v = case.num_kv_heads, case.head_dim, case.head_dim_v or case.head_dim
    q = case.q_size * rng.standard_normal((int(indptr[-1]), heads * case.group_size, dim))
    q = q.astype(DTYPES[case.q_dtype])

    size = case.block_size or max(1, int(lens.max(initial=0)))
    blocks = -(-lens // size)
    num_blocks = int(blocks.sum()) + 3
    order = rng.permutation(num_blocks)[: int(blocks.sum())].astype(np.int32)
    tables = np.full((len(lens), int(blocks.max(initial=0)) + 1), -1, np.int32)
    owned = np.zeros((num_blocks, size), bool)
    for seq, (first, count) in enumerate(zip(np.cumsum(blocks) - blocks, blocks, strict=True)):
        tables[seq, :count] = order[first : first + count]
        unseen = max(0, int(lens[seq] - q_lens[seq]) + 1 - case.window) if case.window else 0
        for token in range(unseen, lens[seq]):
            owned[tables[seq, token // size], token % size] = True
        tables[seq, : unseen // size] = -1  # given back when the window had passed

    k, k_scale = _pool(case, rng, owned, heads, dim)
    if case.v_in_k:
        v, v_scale = Strided(k.whole, lambda whole: k.view(whole)[..., :dim_v]), k_scale
    else:
        v, v_scale = _pool(case, rng, owned, heads, dim_v)
    if case.v_size != 1 or case.v_spread:
        spread = np.exp2(rng.uniform(-case.v_spread, case.v_spread, v_scale.shape))
        v_scale = (v_scale * case.v_size * spread).astype(np.float32)
    real_k, real_v = (_decoded(kv.view(kv.whole), scale, owned) for kv, scale in ((k, k_scale), (v, v_scale)))
    mask = mask_indptr = None
    if case.mask:
        rows = [rng.random((int(n), int(length))) < 0.7 for n, length in zip(q_lens, lens, strict=True)]
        mask, mask_indptr = pack_mask(rows)
    options = Options(
        softmax_scale=1 / math.sqrt(dim) if case.softmax_scale is None else case.softmax_scale,
        window=case.window,
        soft_cap=case.soft_cap,
        alibi_slopes=np.exp2(-np.arange(1, q.shape[1] + 1) / 2).astype(np.float32) if case.alibi else None,
        sinks=rng.standard_normal(q.shape[1]).astype(np.float32) if case.sinks else None,
    )
    o, lse = paged_attention(
        q.astype(np.float64),
        real_k,
        real_v,
        tables,
        lens,
        indptr,
        softmax_scale=options.softmax_scale,
        causal=case.causal,
        window=case.window or None,
        soft_cap=case.soft_cap or None,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        mask=mask,
        mask_indptr=mask_indptr,
        return_lse=True,
    )
    batch = Batch(lens, tables, q_indptr=None if case.q_lens is None else indptr, mask=mask, mask_indptr=mask_indptr)
    given = Problem(case, q, k, v, k_scale, v_scale, batch, options, o, lse)
    return given if case.block_size else contiguous(given)


def contiguous(given: Problem) -> Problem:
    """The same problem with each sequence's KV in one piece."""
    tables, lens = given.batch.block_tables, given.batch.seq_lens
    kv_indptr = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    return replace(
        given,
        case=replace(given.case, block_size=0),
        k=Strided(_gathered(given.k.view(given.k.whole), tables, lens), lambda whole: whole),
        v=Strided(_gathered(given.v.view(given.v.whole), tables, lens), lambda whole: whole),
        k_scale=_gathered(given.k_scale, tables, lens),
        v_scale=_gathered(given.v_scale, tables, lens),
        batch=replace(given.batch, block_tables=None, kv_indptr=kv_indptr),
    )


def _pool(case: Case, rng: np.random.Generator, owned: NDArray[np.bool_], heads: int, dim: int) -> Any:
    """Return one of two layers of a block-major pool [num_blocks, layer, ...].

    Blocks that no sequence owns are NaN (int8: 127, with NaN scales).
    """
    num_blocks, size = owned.shape
    dtype = DTYPES[case.kv_dtype]
    values = rng.standard_normal((num_blocks, size, heads, dim))
    scale = None
    if case.scale_mode != "none":
        shape = {"tensor": (1,), "head": (heads,), "token_head": (num_blocks, size, heads)}[case.scale_mode]
        scale = (0.02 * (1 + rng.random(shape))).astype(np.float32)
        values = (
            values / (scale if case.scale_mode != "head" else scale[:, None])[..., None]
            if case.scale_mode == "token_head"
            else values / scale[..., None]
        )
        if case.kv_dtype == "int8":
            values = np.clip(np.rint(values), -127, 127)
    stored = values.astype(dtype)
    stored[~owned] = 127 if case.kv_dtype == "int8" else np.nan
    if scale is not None and case.scale_mode == "token_head":
        scale[~owned] = np.nan
    shape = (num_blocks, 2, size, heads, dim) if case.layout == "NHD" else (num_blocks, 2, heads, size, dim)
    pool = np.full(shape, stored[~owned].flat[0], dtype)
    kv = Strided(
        pool, (lambda whole: whole[:, 1]) if case.layout == "NHD" else lambda whole: whole[:, 1].swapaxes(1, 2)
    )
    kv.view(pool)[...] = stored
    return kv, scale


def _decoded(stored: NDArray[Any], scale: NDArray[np.float32] | None, owned: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The values that stored bits and scales stand for; NaN where no sequence owns them."""
    values = stored.astype(np.float64)
    if scale is not None:
        values = values * (
            scale[:, None] if scale.ndim == 1 and len(scale) > 1 else scale[..., None] if scale.ndim == 3 else scale
        )
    values[~owned] = np.nan
    return values


def _gathered(array: Any, tables: NDArray[np.int32], lens: NDArray[np.int32]) -> Any:
    """Gather what belongs to tokens, and return anything else as it is.

    [num_blocks, block_size, ...] becomes [num_kv_tokens, ...].
    """
    if array is None or array.ndim < 3:
        return array
    size = array.shape[1]
    tokens = [(seq, np.arange(length)) for seq, length in enumerate(lens)]
    return np.concatenate([array[tables[seq, at // size], at % size] for seq, at in tokens] or [array[0, :0]])


def far_away(backend: Backend, given: Problem) -> Problem:
    """The same problem with its blocks at the end of a pool past 2^31 elements.

    For int8, NHD, one KV head, and V's head dim that of K.
    """
    block = 2**20  # elements from one block to the next; most of them lie between blocks
    near, elements = given.k.whole.shape[0], given.case.block_size * given.case.head_dim
    num_blocks = 2**31 // block + near
    pool = huge(backend, (num_blocks, block), np.int8)
    views = []
    for begin, kv in ((0, given.k), (elements, given.v)):
        pool[-near:, begin : begin + elements] = backend.asarray(kv.view(kv.whole).reshape(near, elements))
        views.append(OnDevice(pool[:, begin : begin + elements].reshape(num_blocks, -1, 1, given.case.head_dim)))
    tables = given.batch.block_tables
    tables = np.where(tables < 0, -1, tables + num_blocks - near).astype(np.int32)
    return replace(given, batch=replace(given.batch, block_tables=tables), k=views[0], v=views[1])


def run(
    backend: Backend,
    given: Problem,
    tiling: Tiling | None = None,
    schedule: Schedule = "even",
    plan: AttentionPlan | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """o and lse of a kernel; both were NaN before."""
    case = given.case
    config = case.config
    q_lens = case.q_lens or (1,)
    if plan is None:
        plan = AttentionPlan(
            backend,
            config,
            tiling or decode_simt.tiling(config),
            schedule,
            num_kv_heads=case.num_kv_heads,
            max_sequences=len(case.seq_lens),
            max_q_len=max(q_lens),
            max_seq_len=max(case.seq_lens, default=0),
        )
    to = backend.asarray
    batch = Batch(*(None if array is None else to(array) for array in _fields(given.batch)))
    options = replace(
        given.options,
        alibi_slopes=None if given.options.alibi_slopes is None else to(given.options.alibi_slopes),
        sinks=None if given.options.sinks is None else to(given.options.sinks),
    )
    shape = (*given.q.shape[:2], config.head_dim_v)
    out = to(np.full(shape, np.nan, given.q.dtype))
    lse = to(np.full(shape[:2], np.nan, np.float32))
    plan.update(batch, case.window)
    scales = {
        name: None if array is None else to(array)
        for name, array in (("k_scale", given.k_scale), ("v_scale", given.v_scale))
    }
    plan.run(to(given.q), given.k.on(backend), given.v.on(backend), out, batch, options, lse=lse, **scales)
    return backend.to_host(out).astype(np.float64), backend.to_host(lse).astype(np.float64)


def _fields(batch: Batch) -> list[Any]:
    return [
        getattr(batch, name) for name in ("seq_lens", "block_tables", "kv_indptr", "q_indptr", "mask", "mask_indptr")
    ]


def assert_close(given: Problem, o: NDArray[np.float64], lse: NDArray[np.float64], bound: float | None = None) -> None:
    """The places of inf and NaN first, then the tolerance, with the first bad element."""
    assert np.array_equal(np.isneginf(lse), np.isneginf(given.lse)), "lse is -inf in other places"
    bad = ~np.isfinite(o)
    assert not bad.any(), f"o is {o[bad][0]} at {np.argwhere(bad)[0].tolist()}"
    bound = bound or max(BOUNDS[given.case.q_dtype], BOUNDS.get(given.case.kv_dtype, 0))
    if given.case.scale_mode == "token_head" and given.case.q_dtype == "bfloat16":
        bound = max(bound, 2 * 2**-8)  # the scale is rounded with its V or P to bfloat16, then the output is
    error = np.abs(o - given.o)
    scale = max(float(np.abs(given.o).max(initial=0)), 1.0)
    where = np.argwhere(error > bound * scale)
    assert not len(where), (
        f"o at {where[0].tolist()}: {o[tuple(where[0])]} for {given.o[tuple(where[0])]}, {len(where)} bad"
    )
    finite = np.isfinite(given.lse)
    assert np.allclose(lse[finite], given.lse[finite], rtol=0, atol=max(bound, 2e-3 if bound > 1e-4 else 1e-4))


def assert_rows_close(given: Problem, o: NDArray[np.float64], lse: NDArray[np.float64], bound: float) -> None:
    """Every row of o relative to its own largest element, and lse."""
    assert np.isfinite(o).all()
    error, size = np.abs(o - given.o).max(axis=-1), np.abs(given.o).max(axis=-1)
    bad = error > bound * size
    assert not bad.any(), f"row {np.argwhere(bad)[0].tolist()}: off by {error[bad][0]} of {size[bad][0]}"
    finite = np.isfinite(given.lse)
    assert np.allclose(lse[finite], given.lse[finite], rtol=bound, atol=bound)


def check(backend: Backend, case: Case, tiling: Tiling | None = None, schedule: Schedule = "even") -> None:
    """Run a case and compare it with float64."""
    given = problem(case)
    assert_close(given, *run(backend, given, tiling, schedule))
