"""`write_kv` in every layout, on any number of threads, without the GIL."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedkv import cpu
from pagedkv.cpu import _write
from pagedkv.errors import LayoutMismatch, WrongType
from tests.cpu import by_numpy
from tests.cpu.batches import DTYPES
from tests.cpu.by_numpy import SOURCES
from tests.cpu.gil import lets_others_run
from tests.cpu.test_threads import run

MODES = {"tensor": lambda shape: (1,), "head": lambda shape: shape[2:3], "token_head": lambda shape: shape[:3]}
LAYOUTS = ("NHD", "HND", "every second", "backwards", "odd addresses")


def laid_out(shape: tuple[int, ...], dtype: Any, layout: str) -> NDArray[Any]:
    """An array of zeros whose strides are unusual."""
    if layout == "HND":
        return np.zeros((*shape[:-3], shape[-2], shape[-3], shape[-1]), dtype).swapaxes(-3, -2)
    if layout == "every second":
        return np.zeros(tuple(2 * n for n in shape), dtype)[tuple(slice(0, None, 2) for _ in shape)]
    if layout == "backwards":
        return np.zeros(shape, dtype)[tuple(slice(None, None, -1) for _ in shape)]
    if layout == "odd addresses":
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.zeros(count + 1, np.uint8)[1:].view(dtype).reshape(shape)
    return np.zeros(shape, dtype)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_layout_and_mode_is_written_as_numpy_would(data: st.DataObject) -> None:
    def draw(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    shape, dim_v = (draw(0, 1, 5), draw(1, 3, 16), draw(1, 2, 3), draw(0, 1, 7, 64, 300)), draw(0, 1, 16, 257)
    dtype, tokens = draw(*DTYPES), draw(0, 1, 9)
    mode = draw(*MODES) if dtype not in SOURCES else "none"
    slots = rng.integers(-1, shape[0] * shape[1], tokens).astype(draw(np.int64, np.int32, ">i8"))
    given_, found, expected, scales = [], [], [], []
    for dim in (shape[3], dim_v):
        values = laid_out((tokens, shape[2], dim), SOURCES[draw(*SOURCES)], draw(*LAYOUTS))
        values[...] = rng.standard_normal(values.shape) * draw(1, 1e-6, 1e4)
        given_.append(values.astype(">f4") if draw(False, False, True) else values)
        found.append(laid_out((*shape[:3], dim), DTYPES[dtype], draw(*LAYOUTS)))
        expected.append(found[-1].copy())
        scale = np.full(MODES[mode](shape), draw(0.5, 0, np.inf), np.float32) if mode != "none" else None
        scales.append((scale, None if scale is None else scale.copy()))
    cpu.write_kv(*given_, *found, slots, scale_mode=mode, k_scale=scales[0][0], v_scale=scales[1][0])
    for values, cache, right, (scale, right_scale) in zip(given_, found, expected, scales, strict=True):
        by_numpy.write(values, right, slots, right_scale, mode)
        by_numpy.same_bits(cache, right)
        assert scale is None or np.array_equal(scale, right_scale, equal_nan=True)


def large(dtype: str = "float16") -> tuple[list[NDArray[Any]], list[NDArray[Any]], NDArray[np.int64]]:
    """Enough for several threads, and several tokens for one slot."""
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((700, 4, 64)).astype(np.float32) for _ in range(2)]
    return rows, [np.zeros((30, 16, 4, 64), DTYPES[dtype]) for _ in range(2)], rng.integers(-1, 480, 700)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_do_not_depend_on_the_threads_and_the_later_token_stays(threads: None, dtype: str) -> None:
    mode = "none" if dtype in SOURCES else "token_head"
    rows, right, slots = large(dtype)
    right_scales = [np.zeros((30, 16, 4), np.float32) if mode != "none" else None for _ in range(2)]
    for values, cache, scale in zip(rows, right, right_scales, strict=True):
        by_numpy.write(values, cache, slots, scale, mode)
    for number in (1, 2, 3):
        _, caches, _ = large(dtype)
        scales = [None if scale is None else np.zeros_like(scale) for scale in right_scales]
        cpu.set_num_threads(number)
        cpu.write_kv(*rows, *caches, slots, scale_mode=mode, k_scale=scales[0], v_scale=scales[1])
        for found, expected in zip((*caches, *scales), (*right, *right_scales), strict=True):
            assert found is None or expected is None or found.tobytes() == expected.tobytes()


def test_a_thread_that_gets_ahead_does_not_put_an_earlier_token_over_a_later_one(threads: None) -> None:
    rows, caches, _ = large("float32")
    slots = np.full(700, -1)
    slots[1:350:2], slots[350::2] = np.arange(175), np.arange(175)  # odd tokens first, then even ones in their slots
    cpu.set_num_threads(2)
    for _ in range(20):
        cpu.write_kv(*rows, *caches, slots)
        for values, cache in zip(rows, caches, strict=True):
            assert np.array_equal(cache.reshape(480, 4, 64)[:175], values[350::2])


def test_rows_that_lie_in_the_cache_itself_are_read_before_anything_is_written() -> None:
    cache = np.arange(24 * 2 * 8, dtype=np.float32).reshape(3, 8, 2, 8)
    other, rows = np.zeros_like(cache), cache.reshape(24, 2, 8)[:4]
    before = rows.copy()
    cpu.write_kv(rows, rows, cache, other, np.array([1, 2, 3, 0]))
    np.testing.assert_array_equal(cache.reshape(24, 2, 8)[[1, 2, 3, 0]], before)
    np.testing.assert_array_equal(other.reshape(24, 2, 8)[[1, 2, 3, 0]], before)


def test_others_run_while_a_call_writes() -> None:
    rows = [np.ones((400, 160, 64), np.float32) for _ in range(2)]
    caches = [np.zeros((30, 16, 160, 64), np.float16) for _ in range(2)]
    given = (*rows, *caches, np.arange(400), None, None, "float32", "float32", "float16", False, 1)
    assert lets_others_run(lambda: _write.write(*given))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no list of this process's threads")
@pytest.mark.parametrize("order", [1, -1])
def test_writing_and_merging_use_the_threads_of_attention(order: int) -> None:
    script = f"""
        import os
        import numpy as np
        from pagedkv import cpu
        from pagedkv.cpu.merge import merge_states
        cpu.set_num_threads(4)
        rows, caches = np.zeros((700, 4, 64), np.float32), np.zeros((60, 16, 4, 64), np.float32)
        tables = np.arange(60, dtype=np.int32)[None]
        before = len(os.listdir("/proc/self/task"))
        for work in [
            lambda: cpu.attend(rows[:400], caches, caches, np.array([900], np.int32), block_tables=tables,
                               q_indptr=np.array([0, 400], np.int32)),
            lambda: cpu.write_kv(rows, rows, caches, caches, np.arange(700)),
            lambda: merge_states(rows.reshape(2, 350, 4, 64), np.zeros((2, 350, 4), np.float32), rows[:350].copy()),
        ][::{order}]:
            work()
            print(len(os.listdir("/proc/self/task")) - before)
    """
    assert run(script).split() == ["3", "3", "3"]


def test_a_v_cache_of_other_axes_and_rows_that_are_no_arrays_are_refused() -> None:
    rows, caches, slots = large()
    with pytest.raises(LayoutMismatch, match="num_blocks, block_size"):
        cpu.write_kv(rows[0], rows[1][:, :, 0], caches[0], caches[1][..., 0], slots)
    with pytest.raises(WrongType, match="float32, float16, bfloat16, float64"):
        cpu.write_kv(rows[0], rows[1].astype(np.int64), *caches, slots)
    assert not any(cache.any() for cache in caches)
