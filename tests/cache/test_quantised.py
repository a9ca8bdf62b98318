"""Caches of int8 and fp8, and rows of bytes: moved and found again bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv import cpu
from pagedkv.errors import LayoutMismatch, UnsupportedVariant
from pagedkv.reference import paged_attention
from pagedkv.spec.dtypes import stored_to_float32
from tests.cpu import by_numpy

from .conftest import BLOCK, Toy, prompt
from .test_tiers_end_to_end import Traffic

QUANTISED = ("int8", "float8_e4m3", "float8_e5m2")
DRAW = np.random.default_rng(0)
SCALES: dict[str, Any] = {  # of real values
    "token_head": "token_head", "tensor": pk.Scales([0.03, 0.04], [0.05, 0.02]),
    "head": pk.Scales(DRAW.uniform(0.02, 0.05, (2, 2)), DRAW.uniform(0.02, 0.05, (2, 2))),
}  # fmt: skip
ONES: dict[str, Any] = {"token_head": "token_head", "tensor": pk.Scales(1, 1)}  # whole numbers stay themselves


def spec_of(dtype: str, scales: Any, **changes: Any) -> pk.KVSpec:
    return pk.KVSpec(2, 2, 8, dtype, BLOCK, model="toy", scales=scales, **changes)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("scales", ONES)
@pytest.mark.parametrize("dtype", QUANTISED)
def test_whatever_moves_between_tiers_is_read_as_it_was_written(
    open_cache: Any, dtype: str, scales: str, layout: str
) -> None:
    spec = spec_of(dtype, ONES[scales], layout=layout)
    toy = Toy(open_cache(12, spec, host=12, disk=24))
    Traffic(toy, seed=5).play(120)
    stats = toy.cache.stats()
    assert toy.tokens_checked > 1000
    assert stats.hit_tokens["host"] + stats.hit_tokens["disk"] > 0


@pytest.mark.parametrize("scales", ONES)
@pytest.mark.parametrize("dtype", QUANTISED)
def test_after_a_restart_there_is_a_hit_and_it_is_exact(open_cache: Any, dtype: str, scales: str) -> None:
    spec = spec_of(dtype, ONES[scales])
    first = open_cache(16, spec, disk=32)
    Toy(first).use(prompt(1))
    first.close()
    toy = Toy(open_cache(16, spec, disk=32))
    assert toy.use(prompt(1)) == {"disk": 3 * BLOCK}


@pytest.mark.parametrize(
    "other",
    [
        spec_of("int8", pk.Scales(1, 2)), spec_of("int8", "token_head"), spec_of("float8_e4m3", pk.Scales(1, 1)),
        spec_of("uint8", None), spec_of("int8", pk.Scales([1, 1], [1, 1])),
    ],
)  # fmt: skip
def test_a_directory_of_other_scales_is_refused(open_cache: Any, other: pk.KVSpec) -> None:
    first = open_cache(16, spec_of("int8", pk.Scales(1, 1)), disk=32)
    Toy(first).use(prompt(1))
    first.close()
    with pytest.raises(LayoutMismatch):
        open_cache(16, other, disk=32)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("width", [None, 12])
def test_attention_reads_exactly_what_numpy_would_have_stored(
    open_cache: Any, dtype: str, scales: str, layout: str, width: int | None
) -> None:
    spec = spec_of(dtype, SCALES[scales], layout=layout, head_dim_v=width)
    cache, draw = open_cache(16, spec), np.random.default_rng(1)
    k, v = (draw.standard_normal((2, 11, 2, n)).astype(np.float32) for n in (spec.head_dim, spec.width_of_v))
    expected = [expect(spec, layer, k[layer], v[layer]) for layer in range(2)]
    with cache.sequence(range(11)) as seq:
        for first, stop in ((0, 7), (7, 10), (10, 11)):
            q = draw.standard_normal((2, stop - first, 4, spec.head_dim)).astype(np.float32)
            with cache.step([seq], q_lens=[stop - first]) as step:
                for layer in range(2):
                    step.write(layer, k[layer, first:stop], v[layer, first:stop])
                    wanted = paged_attention(
                        q[layer].astype(np.float64), *(side[None, :stop] for side in expected[layer]), np.array([[0]]),
                        np.array([stop]), np.array([0, stop - first]),
                    )  # fmt: skip
                    np.testing.assert_allclose(step.attend(layer, q[layer]), wanted, atol=3e-6)
                    np.testing.assert_allclose(step.attend(layer, q[layer].astype(np.float64)), wanted, atol=1e-12)
        for form in ("NHD", "HND"):
            for side, got in enumerate(seq.gather(layout=form)):
                assert got.dtype == np.float32
                got = got if form == "NHD" else got.swapaxes(1, 2)
                for layer in range(2):
                    np.testing.assert_array_equal(got[layer], expected[layer][side].astype(np.float32))
        middle = seq.gather(3, 9)
        assert np.array_equal(middle[0], seq.gather()[0][:, 3:9])


def expect(spec: pk.KVSpec, layer: int, k: NDArray[Any], v: NDArray[Any]) -> list[NDArray[np.float64]]:
    """K and V of a sequence after NumPy quantised them, in float64."""
    found = []
    for side, values in enumerate((k, v)):
        stored = np.zeros((1, *values.shape), spec.np_dtype)
        if isinstance(spec.scales, pk.Scales):
            scale, mode = spec.scales.of_layer(layer)[side], "head"
        else:
            scale, mode = np.zeros(stored.shape[:3], np.float32), "token_head"
        by_numpy.write(values, stored, np.arange(len(values)), scale, mode)
        factors = np.broadcast_to(scale if mode == "token_head" else scale[None, None], stored.shape[:3])
        found.append(stored_to_float32(stored, spec.dtype).astype(np.float64)[0] * factors[0][..., None])
    return found


def test_scales_that_are_computed_lie_in_the_blocks_and_fixed_ones_do_not(open_cache: Any) -> None:
    cache = open_cache(16, spec_of("int8", "token_head"))
    values = np.random.default_rng(0).standard_normal((2, 5, 2, 8)).astype(np.float32)
    with cache.sequence(range(5)) as seq:
        seq.scatter(values, 2 * values)
        blocks = seq.blocks
        for layer in range(2):
            for factor, scale in zip((1, 2), cache.layer_scales(layer), strict=True):
                assert np.shares_memory(scale, cache.device_arena)
                of_tokens = scale[blocks].reshape(-1, 2)[:5]
                np.testing.assert_allclose(of_tokens, factor * np.abs(values[layer]).max(axis=2) / 127, rtol=1e-6)
    fixed = open_cache(16, spec_of("int8", SCALES["tensor"]))
    assert [scale.tolist() for scale in fixed.layer_scales(1)] == [[np.float32(0.04)], [np.float32(0.02)]]
    assert open_cache(16).layer_scales(0) is None
    assert cache.spec.block_bytes == fixed.spec.block_bytes + 2 * 2 * BLOCK * 2 * 4


def test_what_was_gathered_can_be_scattered_again_with_the_same_numbers(open_cache: Any) -> None:
    for dtype in QUANTISED:
        cache = open_cache(16, spec_of(dtype, "token_head"))
        values = np.random.default_rng(0).standard_normal((2, 2, 9, 2, 8)).astype(np.float32)
        with cache.sequence(prompt(1, 9)) as seq:
            seq.scatter(*values)
            first = seq.gather()
        with cache.sequence(prompt(2, 9)) as seq:
            seq.scatter(*first)
            for again, before in zip(seq.gather(), first, strict=True):
                np.testing.assert_allclose(again, before, rtol=3e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float32"])
def test_values_of_any_float_are_quantised(open_cache: Any, dtype: str) -> None:
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    cache = open_cache(16, spec_of("int8", "token_head"))
    values = np.random.default_rng(0).standard_normal((2, 5, 2, 8)).astype(kind)
    with cache.sequence(range(5)) as seq:
        seq.scatter(values, values)
        wide = values.astype(np.float32)
        assert np.abs(seq.gather()[0] - wide).max() <= np.abs(wide).max() / 254 * 1.001


def test_what_saturates_is_no_overflow_and_nan_is_seen(open_cache: Any) -> None:
    cache = open_cache(16, spec_of("float8_e4m3", pk.Scales(1, 1)))
    values = np.full((2, 3, 2, 8), 1e9, np.float32)
    values[0, 1] = np.nan
    with cache.sequence(range(3)) as seq:
        seq.scatter(values, values)
        k, _ = seq.gather()
        assert np.isnan(k[0, 1]).all()
        assert (k[1] == 448).all()
    assert cache.stats().overflowing_writes == 0


@pytest.mark.parametrize("wrong", [np.int8, np.uint8, np.int32, np.complex64])
def test_numbers_that_are_no_floats_are_refused_before_anything_is_written(open_cache: Any, wrong: Any) -> None:
    cache = open_cache(16, spec_of("int8", "token_head"))
    before = bytes(cache.device_arena)
    with cache.sequence(range(3)) as seq:
        with pytest.raises(LayoutMismatch, match=r"float16.*bfloat16.*is needed"):
            seq.scatter(np.zeros((2, 3, 2, 8), wrong), np.zeros((2, 3, 2, 8), np.float32))
        assert seq.num_computed == 0
    assert bytes(cache.device_arena) == before


def test_outputs_that_do_not_fit_are_refused(open_cache: Any) -> None:
    cache = open_cache(16, spec_of("int8", "token_head", head_dim_v=4))
    with cache.sequence(range(5)) as seq:
        seq.scatter(np.ones((2, 5, 2, 8), np.float32), np.ones((2, 5, 2, 4), np.float32))
        good = [np.zeros((2, 5, 2, width), np.float32) for width in (8, 4)]
        fixed = good[1].copy()
        fixed.flags.writeable = False
        inside = cache.device_arena.reshape(-1)[: good[0].nbytes].view(np.float32).reshape(good[0].shape)
        for out in (
            (good[0], good[0]), (good[0].astype(np.int8), good[1]), (good[0], fixed), (inside, good[1]),
            (good[0], good[1].tolist()),
        ):  # fmt: skip
            with pytest.raises(LayoutMismatch):
                seq.gather(out=out)
        k, v = seq.gather(out=(good[0], good[1]))
        assert k is good[0]
        np.testing.assert_allclose(v, 1, rtol=1e-6)


def test_a_block_with_scales_is_not_handed_out_as_one_array(open_cache: Any) -> None:
    cache = open_cache(16, spec_of("int8", "token_head"), max_sequences=1)
    toy = Toy(cache)
    with cache.sequence(prompt(1)) as seq:
        toy.run(seq)
        for ask in (seq.export_blocks, lambda: cache.pages(0)):
            with pytest.raises(UnsupportedVariant, match="scales"):
                ask()
    fixed = open_cache(16, spec_of("int8", pk.Scales(1, 1)))
    toy = Toy(fixed)
    with fixed.sequence(prompt(1)) as seq:
        toy.run(seq)
        views = seq.export_blocks()
        assert [view.dtype for view in views] == ["int8"] * 3
        first = views[0].numpy()
        np.testing.assert_array_equal(first[:, 0], stored(toy, seq, 0))
        assert fixed.pages(0).k.dtype == "int8"


def stored(toy: Toy, seq: pk.Sequence, side: int) -> NDArray[np.float32]:
    """K or V of a sequence's first block, [num_layers, block_size, heads, dim]."""
    return np.stack([toy.kv(seq.tokens, layer)[side][:BLOCK] for layer in range(toy.spec.num_layers)])


ROWS = pk.KVSpec.of([pk.Rows(10, 7)] * 3, block_size=BLOCK, model="toy")


def random_rows(spec: pk.KVSpec, num_tokens: int, seed: int = 0) -> list[NDArray[np.uint8]]:
    draw = np.random.default_rng(seed)
    shapes = [(spec.num_layers, num_tokens, 1, width) for width in (spec.head_dim, spec.width_of_v)]
    return [draw.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("widths", [(10, 7), (34, 34), (16, 0), (1, 300)])
def test_rows_of_bytes_come_back_from_every_tier_as_they_were(
    open_cache: Any, widths: tuple[int, int], layout: str
) -> None:
    spec = pk.KVSpec.of([pk.Rows(*widths)] * 3, block_size=BLOCK, model="toy", layout=layout)
    chats = {start: random_rows(spec, 3 * BLOCK + 1, start) for start in range(8)}
    for life in range(2):
        cache = open_cache(8, spec, host=8, disk=40)
        hits = 0
        for start, rows in [*chats.items(), *chats.items()]:
            with cache.sequence(prompt(start)) as seq:
                done = seq.num_computed
                hits += done
                for got, wanted in zip(seq.gather(), rows, strict=True):
                    np.testing.assert_array_equal(got, wanted[:, :done])
                with cache.step([seq]) as step:
                    for layer in range(3):
                        step.write(layer, rows[0][layer, done:], rows[1][layer, done:])
                for got, wanted in zip(seq.gather(layout="HND"), rows, strict=True):
                    np.testing.assert_array_equal(got.swapaxes(1, 2), wanted)
        assert hits >= (8 + 8 * life) * 3 * BLOCK
        cache.close()


def test_nobody_computes_with_rows_of_bytes(open_cache: Any) -> None:
    cache = open_cache(8, ROWS)
    k, v = random_rows(ROWS, 5)
    with cache.sequence(range(5)) as seq, cache.step([seq]) as step:
        for layer in range(3):
            step.write(layer, k[layer], v[layer])
        with pytest.raises(UnsupportedVariant, match="rows of bytes"):
            step.attend(0, np.zeros((5, 1, 10), np.float32))
    assert cache.layer(0)[0].dtype == np.uint8
    assert cache.layer_scales(0) is None


@pytest.mark.parametrize("wrong", [np.float32, np.int8, np.int64])
def test_rows_of_another_dtype_are_refused(open_cache: Any, wrong: Any) -> None:
    cache = open_cache(8, ROWS)
    k, v = random_rows(ROWS, 5)
    with cache.sequence(range(5)) as seq, pytest.raises(LayoutMismatch, match="uint8"):
        seq.scatter(k.astype(wrong), v)
    with cache.sequence(range(5)) as seq, pytest.raises(LayoutMismatch):
        seq.scatter(k[..., :9], v)
    assert cache.stats().blocks["device"]["live"] == 0


def test_a_spec_can_be_changed_by_replace_and_copied(open_cache: Any) -> None:
    wider = dataclasses.replace(ROWS, head_dim_v=9)
    assert wider.width_of_v == 9
    assert dataclasses.replace(spec_of("int8", None), block_size=8).scales == "token_head"
    with pytest.raises(pk.InvalidArgument, match="scales are for"):
        dataclasses.replace(spec_of("int8", None), dtype="float16")


def test_exported_fp8_is_the_fp8_that_was_stored(open_cache: Any) -> None:
    pytest.importorskip("ml_dtypes")
    cache = open_cache(16, spec_of("float8_e4m3", pk.Scales(1, 1)))
    values = np.zeros((2, BLOCK, 2, 8), np.float32)
    values[:, 0, 0, :4] = [448, 256, 240, -288]
    with cache.sequence(range(BLOCK)) as seq:
        seq.scatter(values, values)
        (view,) = seq.export_blocks()
        page = cache.pages(0)
        for found in (view.numpy()[0, 0, 0, 0, :4], page.k.numpy()[page.tables(seq.blocks)[0], 0, 0, :4]):
            assert found.astype(np.float32).tolist() == [448, 256, 240, -288]
        assert view.dtype == page.v.dtype == "float8_e4m3fn"


def test_the_fixed_scales_of_a_cache_cannot_be_changed(open_cache: Any) -> None:
    cache = open_cache(16, spec_of("int8", pk.Scales(0.5, 0.5)))
    for scale in cache.layer_scales(0):
        with pytest.raises(ValueError, match="read-only"):
            scale[0] = 0.25
    for wrong in (2, -1):
        with pytest.raises(pk.InvalidArgument):
            cache.layer_scales(wrong)
        with pytest.raises(pk.InvalidArgument):
            open_cache(16).layer_scales(wrong)


def test_a_row_of_infinity_is_nan_without_a_warning(open_cache: Any) -> None:
    cache = open_cache(16, spec_of("int8", "token_head"))
    values = np.ones((2, 3, 2, 8), np.float32)
    values[0, 1, 0, 3] = np.inf
    with cache.sequence(range(3)) as seq, np.errstate(all="raise"):
        seq.scatter(values, values)
        k, _ = seq.gather()
        assert np.isnan(k[0, 1, 0]).all()
        assert np.isfinite(k[0, 0]).all()


@pytest.mark.parametrize("scale", [[0.01], 0.01, True, "1", memoryview(b"1234")])
def test_scales_that_are_no_arrays_are_refused_by_the_kernels(scale: Any) -> None:
    k, lens, tables = np.zeros((1, 16, 1, 4), np.int8), np.ones(1, np.int32), np.zeros((1, 1), np.int32)
    with pytest.raises(pk.WrongType, match="k_scale"):
        cpu.attend(np.zeros((1, 1, 4), np.float32), k, k, lens, block_tables=tables, k_scale=scale, v_scale=scale)
