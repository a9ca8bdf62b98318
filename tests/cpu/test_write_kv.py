"""K and V into slots: rounding, scales, skipped tokens, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv import cpu
from pagedkv.attention import write_kv
from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, UnsupportedVariant, WrongType
from tests.cpu.batches import DTYPES

SLOTS = np.array([5, -1, 0, 22])


def rows(dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((4, 2, dim)).astype(np.float32)


def caches(dtype: Any, dim: int = 8) -> list[np.ndarray]:
    return [np.full((3, 8, 2, dim), 9, dtype) for _ in range(2)]


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tokens_go_to_their_slots_and_skipped_ones_nowhere(source, dtype):
    k, v = rows(seed=1).astype(DTYPES.get(source, np.float64)), rows(seed=2).astype(DTYPES.get(source, np.float64))
    k_cache, v_cache = caches(DTYPES[dtype])
    write_kv(k, v, k_cache, v_cache, SLOTS)
    for values, cache in ((k, k_cache), (v, v_cache)):
        flat = cache.reshape(24, 2, 8)
        np.testing.assert_array_equal(flat[[5, 0, 22]], values[[0, 2, 3]].astype(np.float32).astype(DTYPES[dtype]))
        rest = np.delete(flat, [5, 0, 22], axis=0)
        assert (rest == 9).all()


def test_bfloat16_in_uint16_is_rounded_and_not_cut_to_whole_numbers():
    bits, own = caches(np.uint16), caches(DTYPES["bfloat16"])
    write_kv(rows(), rows(), *bits, SLOTS, kv_dtype="bfloat16")
    write_kv(rows(), rows(), *own, SLOTS)
    written, expected = (cache.reshape(24, -1)[[5, 0, 22]] for cache in (bits[0], own[0].view(np.uint16)))
    np.testing.assert_array_equal(written, expected)
    with pytest.raises(WrongType, match="uint16"):
        write_kv(rows(), rows(), *bits, SLOTS)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("mode", ["tensor", "head", "token_head"])
def test_quantised_values_are_near_what_was_written(dtype, mode):
    k_cache, v_cache = caches(DTYPES[dtype], 64)
    shape = {"tensor": (1,), "head": (2,), "token_head": (3, 8, 2)}[mode]
    scales = [np.full(shape, 4 / 127 if dtype == "int8" else 0.05, np.float32) for _ in range(2)]
    k, v = rows(64, 1), rows(64, 2)
    write_kv(k, v, k_cache, v_cache, SLOTS, scale_mode=mode, k_scale=scales[0], v_scale=scales[1])
    for values, cache, scale in ((k, k_cache, scales[0]), (v, v_cache, scales[1])):
        stored = cache.reshape(24, 2, 64)[[5, 0, 22]].astype(np.float32)
        by = scale.reshape(24, 2)[[5, 0, 22]][..., None] if mode == "token_head" else np.broadcast_to(scale, 2)[:, None]
        largest = np.abs(values).max()
        step = largest / 127 if dtype == "int8" else largest / 8
        assert np.abs(stored * by - values[[0, 2, 3]]).max() <= step
    if mode == "token_head":
        largest = {"int8": 127, "float8_e4m3": 448, "float8_e5m2": 57344}[dtype]
        np.testing.assert_allclose(scales[0].reshape(24, 2)[5], np.abs(k[0]).max(axis=1) / largest, rtol=1e-6)
        assert (scales[0].reshape(24, 2)[1] == scales[0][0, 1, 0]).all()


def test_what_does_not_fit_saturates_and_nan_is_marked():
    for dtype, largest, mark in (("int8", 127, 0), ("float8_e4m3", 448, np.nan), ("float8_e5m2", 57344, np.nan)):
        k_cache, v_cache = caches(DTYPES[dtype])
        values = np.zeros((1, 2, 8), np.float32)
        values[0, 0, :4] = [1e9, -np.inf, np.nan, np.inf]
        one = np.ones(1, np.float32)
        write_kv(values, values, k_cache, v_cache, np.array([3]), scale_mode="tensor", k_scale=one, v_scale=one)
        np.testing.assert_array_equal(k_cache[0, 3, 0, :4].astype(np.float64), [largest, -largest, mark, largest])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3", "float8_e5m2"])
def test_a_row_of_zeros_and_one_with_nan_keep_their_meaning_with_computed_scales(dtype):
    k_cache, v_cache = caches(DTYPES[dtype])
    scales = [np.full((3, 8, 2), 7, np.float32) for _ in range(2)]
    values = np.zeros((1, 2, 8), np.float32)
    values[0, 1, 5] = np.nan
    places = np.array([2])
    write_kv(values, values, k_cache, v_cache, places, scale_mode="token_head", k_scale=scales[0], v_scale=scales[1])
    assert (k_cache[0, 2, 0].astype(np.float32) == 0).all()
    assert scales[0][0, 2, 0] == 0
    assert np.isnan(scales[0][0, 2, 1])


ONE = np.ones(1, np.float32)
WRONG: dict[str, tuple[dict[str, Any], type[PagedKVError]]] = {
    "a slot beyond the cache": ({"slots": np.array([0, 1, 2, 24])}, InvalidArgument),
    "too few slots": ({"slots": np.array([0, 1, 2])}, LayoutMismatch),
    "slots that are no integers": ({"slots": np.zeros(4)}, LayoutMismatch),
    "slots of several lengths": ({"slots": [[0], [1, 2], 3]}, LayoutMismatch),
    "K as a list": ({"k": rows().tolist()}, WrongType),
    "K of one number": ({"k": np.array(1, np.float32)}, LayoutMismatch),
    "a cache as a list": ({"v_cache": caches(np.float32)[0].tolist()}, WrongType),
    "another head dim": ({"k": rows(6)}, LayoutMismatch),
    "V of fewer tokens": ({"v": rows()[:3]}, LayoutMismatch),
    "integers": ({"k": rows().astype(np.int32)}, WrongType),
    "a read-only cache": ({"k_cache": np.broadcast_to(np.float32(0), (3, 8, 2, 8))}, LayoutMismatch),
    "caches of two dtypes": ({"v_cache": caches(np.float16)[0]}, LayoutMismatch),
    "scales without a mode": ({"k_scale": ONE, "v_scale": ONE}, InvalidArgument),
    "a mode for floats": ({"scale_mode": "tensor", "k_scale": ONE, "v_scale": ONE}, UnsupportedVariant),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_and_nothing_is_written(wrong, kind):
    k_cache, v_cache = caches(np.float32)
    given: dict[str, Any] = {"k": rows(), "v": rows(), "k_cache": k_cache, "v_cache": v_cache, "slots": SLOTS} | wrong
    arrays = [given.pop(name) for name in ("k", "v", "k_cache", "v_cache", "slots")]
    with pytest.raises(kind):
        cpu.write_kv(*arrays, **given)
    assert (k_cache == 9).all()
    assert (v_cache == 9).all()


def test_a_scale_that_is_no_array_is_refused():
    with pytest.raises(LayoutMismatch, match="k_scale must be a NumPy array"):
        write_kv(rows(), rows(), *caches(np.int8), SLOTS, scale_mode="tensor", k_scale=[1.0], v_scale=[1.0])


def test_int8_without_scales_is_refused():
    with pytest.raises(UnsupportedVariant, match="scale_mode"):
        write_kv(rows(), rows(), *caches(np.int8), SLOTS)
