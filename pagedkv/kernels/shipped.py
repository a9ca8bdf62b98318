"""The typical variants: compiled for every architecture before a release ships.

The wrappers themselves say which variants a call needs: every function below calls them with small arrays on a
:class:`~pagedkv.kernels.recorder.Recorder`. To add a kernel: for attention nothing, once it is in ``select.KERNELS``;
otherwise call its wrapper in a function here and put that into ``CALLS``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from pagedkv.kernels.bench_read import PageRead
from pagedkv.kernels.block_ops import copy_blocks, fill_blocks
from pagedkv.kernels.config import AttentionConfig, ScaleMode
from pagedkv.kernels.dtypes import ITEMSIZES, QUANTISED
from pagedkv.kernels.gather_kv import gather_kv, scatter_kv
from pagedkv.kernels.layer_kv import LayerKv
from pagedkv.kernels.merge import merge_state, merge_states
from pagedkv.kernels.precompile import checked_pair
from pagedkv.kernels.query_positions import place_queries
from pagedkv.kernels.recorder import Recorder
from pagedkv.kernels.rope import Rope, rope_frequencies, rope_inverse_frequencies
from pagedkv.kernels.select import KERNELS, make_plan
from pagedkv.kernels.variant import Variant
from pagedkv.kernels.write_kv import write_kv

_HOLDERS = {"float32": "f4", "float16": "f2", "bfloat16": "u2", "float8_e4m3": "u1", "float8_e5m2": "u1", "int8": "i1"}
PREFILL_TOKENS = 512
FLAGSHIP = AttentionConfig(128, 128, 4, "bfloat16", "bfloat16")
LATENTS = AttentionConfig(576, 512, 16, "bfloat16", "bfloat16", v_in_k=True)


def attention_configs() -> Iterator[AttentionConfig]:
    """Common shapes in both half precisions, then one change each of the most common config."""
    yield FLAGSHIP
    for dtype in ("bfloat16", "float16"):
        for dim in (64, 128):
            for group in (1, 4, 8):
                yield replace(FLAGSHIP, head_dim=dim, head_dim_v=dim, group_size=group, q_dtype=dtype, kv_dtype=dtype)
    for dim in (80, 96, 192, 256):
        yield replace(FLAGSHIP, head_dim=dim, head_dim_v=dim)
    yield replace(LATENTS, v_in_k=False)
    for heads in (16, 32, 64, 128):
        for kv_dtype in ("bfloat16", "float8_e4m3"):
            mode: ScaleMode = "none" if kv_dtype == "bfloat16" else "tensor"
            yield replace(LATENTS, group_size=heads, kv_dtype=kv_dtype, scale_mode=mode)
    yield replace(FLAGSHIP, q_dtype="float32", kv_dtype="float32")
    for group in (2, 3, 5, 7, 16):
        yield replace(FLAGSHIP, group_size=group)
    for size in (0, 1, 8, 32, 64, 128):
        yield replace(FLAGSHIP, block_size=size)
    yield replace(FLAGSHIP, window=True)
    yield replace(FLAGSHIP, soft_cap=True)
    yield replace(FLAGSHIP, window=True, soft_cap=True)
    yield replace(FLAGSHIP, alibi=True)
    yield replace(FLAGSHIP, sinks=True)
    yield replace(FLAGSHIP, mask=True)
    yield replace(FLAGSHIP, causal=False)
    yield replace(FLAGSHIP, causal=False, window=True, positions=True)
    yield replace(FLAGSHIP, causal=False, alibi=True, positions=True)
    yield replace(FLAGSHIP, debug=True)
    yield replace(FLAGSHIP, kv_dtype="float8_e4m3", scale_mode="tensor")
    yield replace(FLAGSHIP, kv_dtype="float8_e4m3", scale_mode="head")
    yield replace(FLAGSHIP, kv_dtype="float8_e5m2", scale_mode="tensor")
    for half in ("bfloat16", "float16"):
        yield replace(FLAGSHIP, q_dtype=half, kv_dtype="int8", scale_mode="token_head")
        yield replace(FLAGSHIP, q_dtype=half, kv_dtype="float8_e4m3", scale_mode="token_head")


def _attention(recorder: Recorder) -> None:
    for kernel in KERNELS:
        for config in attention_configs():
            if kernel.unsupported(config, recorder.capability) is not None:
                continue
            schedules = kernel.schedules if config == FLAGSHIP else kernel.schedules[:1]
            for max_q_len in (1, PREFILL_TOKENS):
                if max_q_len > 1 and kernel.max_rows and max_q_len * config.group_size > kernel.max_rows:
                    continue
                for schedule in schedules:
                    plan = make_plan(
                        recorder,
                        config,
                        kernel=kernel.name,
                        schedule=schedule,
                        max_q_len=max_q_len,
                        max_tokens=max_q_len,
                        max_seq_len=1,
                        num_kv_heads=1,
                        max_sequences=1,
                    )
                    recorder.prepare(plan.variants())


def _write_kv(recorder: Recorder) -> None:
    slots, positions = np.zeros(1, np.int64), np.zeros(1, np.int32)
    for source, stored, scales in _stores():
        for dim in (64, 128, 256):
            cache = _cache(recorder, dim, stored, scales)
            rows = _rows(1, dim, source)
            write_kv(cache, slots, rows, rows.copy())
            if (dim, source) != (128, "bfloat16"):
                continue
            frequencies = rope_frequencies(rope_inverse_frequencies(dim))
            table = np.zeros((1, dim // 2), np.float32)
            for pairing in ("split", "interleaved"):
                for rope in (
                    Rope(positions, dim, pairing, frequencies=frequencies),
                    Rope(positions, dim, pairing, cos=table, sin=table),
                ):
                    write_kv(cache, slots, rows, rows.copy(), q=rows.copy(), rope=rope)
    mla = LayerKv(recorder, _pool(576, "bfloat16"))
    write_kv(mla, slots, _rows(1, 576, "bfloat16"))


def _gather_kv(recorder: Recorder) -> None:
    tables, indptr = np.zeros((1, 1), np.int32), np.array([0, 1], np.int32)
    for wide, stored, scales in _stores():
        for dim in (64, 128):
            cache = _cache(recorder, dim, stored, scales)
            if wide == stored or stored in QUANTISED:
                gather_kv(cache, tables, indptr, _rows(1, dim, wide), _rows(1, dim, wide))
            if scales == "none":
                scatter_kv(cache, tables, indptr, _rows(1, dim, stored), _rows(1, dim, stored))


def _blocks(recorder: Recorder) -> None:
    for block_bytes in (4096, 8, 1):
        arena = np.zeros((2, block_bytes), np.uint8)
        for index in (np.int32, np.int64):
            copy_blocks(recorder, arena, np.array([[0, 1]], index))
            fill_blocks(recorder, arena, np.array([0], index))


def _merges(recorder: Recorder) -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        for dim in (64, 128, 256):
            o, lse = _rows(1, dim, dtype), np.zeros((1, 1), np.float32)
            merge_state(recorder, o, lse, o.copy(), lse.copy(), o.copy(), lse.copy())
            partial = np.zeros((1, 2, 1, dim), np.float32)
            merge_states(recorder, partial, np.zeros((1, 2, 1), np.float32), o.copy())


def _query_positions(recorder: Recorder) -> None:
    lens = np.zeros(1, np.int32)
    place_queries(recorder, lens, None, None, lens.copy(), np.zeros((1, 2), np.int32))


def _bench_read(recorder: Recorder) -> None:
    ways = (PageRead(4096), PageRead(65536, heads=8, row_bytes=256), PageRead(4096, paged=False))
    recorder.prepare(how.variant() for how in ways)


CALLS: tuple[Callable[[Recorder], None], ...] = (
    _attention, _query_positions, _write_kv, _gather_kv, _blocks, _merges, _bench_read,
)  # fmt: skip


def shipped(capability: tuple[int, int] = (9, 0)) -> tuple[Variant, ...]:
    """The shipped variants of all kernels for a compute capability.

    The first of each kernel is typical.

    Raises
    ------
    WrongType, InvalidArgument
        `capability` is no pair of numbers.
    """
    return _shipped(checked_pair(capability, "capability", "(9, 0)"))


@functools.cache
def _shipped(capability: tuple[int, int]) -> tuple[Variant, ...]:
    recorder = Recorder(capability)
    for call in CALLS:
        call(recorder)
    return tuple(recorder.variants)


def _stores() -> Iterator[tuple[str, str, ScaleMode]]:
    """Dtype of the rows, dtype of the cache, what scales belong to."""
    for dtype in ("bfloat16", "float16", "float32"):
        yield dtype, dtype, "none"
    for quantised in ("float8_e4m3", "float8_e5m2", "int8"):
        for scales in get_args(ScaleMode):
            if scales != "none":
                yield "bfloat16", quantised, scales
    yield "float16", "float8_e4m3", "token_head"


def _cache(recorder: Recorder, dim: int, dtype: str, scales: ScaleMode) -> LayerKv:
    shape = {"none": (0,), "tensor": (1,), "head": (1,), "token_head": (1, 16, 1)}[scales]
    scale: Any = None if scales == "none" else np.zeros(shape, np.float32)
    k, v = _pool(dim, dtype), _pool(dim, dtype)
    return LayerKv(recorder, k, v, dtype=dtype, scale_mode=scales, k_scale=scale, v_scale=scale)


def _pool(dim: int, dtype: str) -> Any:
    return np.zeros((1, 16, 1, dim), _HOLDERS[dtype])


def _rows(num_tokens: int, dim: int, dtype: str) -> Any:
    rows = np.zeros((num_tokens, 1, dim), _HOLDERS[dtype])
    assert rows.itemsize == ITEMSIZES[dtype]
    return rows
