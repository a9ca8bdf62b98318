"""Gather and scatter: contiguous KV out of the pages and back, in every dtype and layout."""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk
import pagedkv.spec.kv_spec
from pagedkv.spec.dtypes import bfloat16_to_float32

from .conftest import BLOCK, SPEC, Toy, prompt

SHAPE = (SPEC.num_layers, 9, SPEC.num_kv_heads, SPEC.head_dim)


@pytest.fixture(params=["ml_dtypes", "bits"])
def bfloat16(request, monkeypatch):
    """bfloat16 as ml_dtypes has it, and as bits where that is not installed."""
    if request.param == "ml_dtypes":
        pytest.importorskip("ml_dtypes")
    else:
        real = pagedkv.spec.kv_spec.numpy_dtype
        monkeypatch.setattr(
            pagedkv.spec.kv_spec, "numpy_dtype", lambda name: np.dtype(np.uint16) if name == "bfloat16" else real(name)
        )
    return request.param


def spec_of(dtype="float32", **changes):
    return pk.KVSpec(2, 2, 4, dtype, BLOCK, model="toy", **changes)


def all_kv(toy, tokens):
    """K and V of all layers, [num_layers, num_tokens, num_kv_heads, head_dim]."""
    layers = [toy.kv(tokens, layer) for layer in range(toy.spec.num_layers)]
    return np.stack([k for k, _ in layers]), np.stack([v for _, v in layers])


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 9])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_was_scattered_is_gathered(open_cache, bfloat16, dtype, layout, length):
    toy = Toy(open_cache(spec=spec_of(dtype, layout=layout)))
    with toy.cache.sequence(prompt(1, length)) as seq:
        seq.scatter(*all_kv(toy, seq.tokens))
        k, v = seq.gather()
        assert k.shape == v.shape == (2, length, 2, 4)
        assert k.dtype == v.dtype == toy.spec.np_dtype
        assert k.flags.c_contiguous
        toy.check(seq)
    with toy.cache.sequence(prompt(1, length)) as seq:
        toy.check(seq)
        toy.run(seq)
        toy.check(seq)


def test_bfloat16_without_ml_dtypes_is_uint16_and_decodes(open_cache, bfloat16):
    toy = Toy(open_cache(spec=spec_of("bfloat16")))
    with toy.cache.sequence(prompt(1, 5)) as seq:
        toy.run(seq)
        k, _ = seq.gather()
        if bfloat16 == "bits":
            assert k.dtype == np.uint16
            assert np.array_equal(toy.cache.decode(k)[0], toy.kv(seq.tokens, 0)[0])
        else:
            assert k.dtype.name == "bfloat16"
            assert toy.cache.decode is None


VALUES = [
    1.0,
    -0.0,
    1e300,
    -1e300,
    3.4e38,
    1e39,
    np.inf,
    1e-45,
    1 + 2**-8,
    1 + 3 * 2**-8,
    1 + 2**-8 + 2**-20,
    65504.0,
    65520.0,
]


@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_rounded_to_nearest_even_and_overflow_to_infinity_without_a_warning(
    open_cache, bfloat16, dtype, given
):
    with np.errstate(all="ignore"):
        values = np.array(VALUES).astype(given)
        wide = values.astype(np.float32)
    toy = Toy(open_cache(spec=pk.KVSpec(1, 1, len(VALUES), dtype, 4)))
    with toy.cache.sequence([1]) as seq:
        seq.scatter(values.reshape(1, 1, 1, -1), values.reshape(1, 1, 1, -1))
        got = toy.floats(seq.gather()[0]).ravel()
    if dtype == "bfloat16":
        bits = wide.view(np.uint32).astype(np.uint64)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        wanted = bfloat16_to_float32(bits)
    else:
        with np.errstate(all="ignore"):
            wanted = values.astype(dtype).astype(np.float32)
    assert got.tolist() == wanted.tolist()
    assert np.signbit(got[1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nan_stays_nan(open_cache, bfloat16, dtype):
    toy = Toy(open_cache(spec=pk.KVSpec(1, 1, 2, dtype, 4)))
    with toy.cache.sequence([1]) as seq:
        for given in (np.float32, np.float64):
            nan = np.full((1, 1, 1, 2), np.nan, given)
            seq.truncate(0)
            seq.append(1)
            seq.scatter(nan, nan)
            assert np.isnan(toy.floats(seq.gather()[0])).all()


def test_gathering_into_arrays_of_the_caller(open_cache):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 9)) as seq:
        toy.run(seq)
        out = np.empty(SHAPE, np.float32), np.zeros((SHAPE[0], SHAPE[1] * 2, *SHAPE[2:]), np.float32)[:, ::2]
        got = seq.gather(out=out)
        assert got[0] is out[0]
        assert got[1] is out[1]
        for given, wanted in zip(out, all_kv(toy, seq.tokens), strict=True):
            assert np.array_equal(given, wanted)


def read_only():
    array = np.zeros(SHAPE, np.float32)
    array.flags.writeable = False
    return array


def good():
    return np.zeros(SHAPE, np.float32)


WRONG_OUT = {
    "shape": lambda: (good(), good()[:, :8]), "shape of k": lambda: (good()[..., :3], good()),
    "dtype": lambda: (good(), good().astype(np.float64)), "read-only": lambda: (good(), read_only()),
    "read-only k": lambda: (read_only(), good()), "one": lambda: (good(),), "three": lambda: (good(), good(), good()),
    "a number": lambda: 5, "numbers": lambda: (1, 2), "one array": good, "lists": lambda: ([1], [2]),
    "text": lambda: "kv",
    "flat": lambda: (good().ravel(), good().ravel()), "byte order": lambda: (good(), good().astype(">f4")),
}  # fmt: skip


@pytest.mark.parametrize("make", WRONG_OUT.values(), ids=WRONG_OUT)
def test_an_out_that_does_not_fit_is_refused_and_not_written(open_cache, make):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 9)) as seq:
        toy.run(seq)
        out = make()
        with pytest.raises((pk.LayoutMismatch, pk.WrongType)):
            seq.gather(out=out)
        for array in out if isinstance(out, tuple) else ():
            assert not isinstance(array, np.ndarray) or not array.any()


def test_gathering_nothing(open_cache):
    with open_cache().sequence([1, 2, 3]) as seq:
        k, v = seq.gather()
        assert k.shape == v.shape == (2, 0, 2, 4)


def test_gathered_arrays_are_copies(open_cache):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 9)) as seq:
        toy.run(seq)
        for array in seq.gather():
            array[:] = -1
        toy.check(seq)


def test_only_what_is_computed_is_gathered(open_cache):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 9)) as seq:
        toy.run(seq, q_lens=[6])
        seq.append([1, 2])
        assert seq.gather()[0].shape[1] == 6
        toy.check(seq)


def test_scattering_commits_for_others_to_hit(open_cache):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1)) as seq:
        seq.scatter(*all_kv(toy, seq.tokens))
        assert seq.num_computed == seq.num_tokens
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}


def test_scattering_after_a_hit_takes_the_rest_only(open_cache):
    toy = Toy(open_cache())
    toy.use(prompt(1))
    with toy.cache.sequence(prompt(1)) as seq:
        k, v = all_kv(toy, seq.tokens)
        with pytest.raises(pk.LayoutMismatch):
            seq.scatter(k, v)
        toy.check(seq)
        seq.scatter(k[:, seq.num_computed :], v[:, seq.num_computed :])
        toy.check(seq)


RANGES = [(0, 9), (0, 4), (2, 3), (3, 9), (8, 9), (5, 5), (9, 9)]


@pytest.mark.parametrize("stored", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_range_is_that_part_of_all_tokens_in_either_layout(open_cache, bfloat16, dtype, stored):
    toy = Toy(open_cache(spec=spec_of(dtype, layout=stored)))
    with toy.cache.sequence(prompt(1, 9)) as seq:
        toy.run(seq)
        for start, stop in RANGES:
            whole, part, turned = seq.gather(), seq.gather(start, stop), seq.gather(start, stop, layout="HND")
            for all_of_it, some, heads_first in zip(whole, part, turned, strict=True):
                assert some.shape == (2, stop - start, 2, 4)
                assert some.tobytes() == all_of_it[:, start:stop].tobytes()
                assert heads_first.shape == (2, 2, stop - start, 4)
                assert heads_first.flags.c_contiguous
                assert heads_first.tobytes() == np.ascontiguousarray(some.swapaxes(1, 2)).tobytes()


def test_a_range_goes_into_a_part_of_the_past_of_an_exported_model(open_cache):
    """A layer's past_key_values are [1, num_kv_heads, past, head_dim]."""
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 9)) as seq:
        toy.run(seq)
        past = np.zeros((2, 2, 2, 12, 4), np.float32)
        for start, stop in ((0, 5), (5, 9)):
            seq.gather(start, stop, out=tuple(side[:, :, start:stop] for side in past), layout="HND")
        for side, wanted in zip(past, all_kv(toy, seq.tokens), strict=True):
            assert np.array_equal(side[:, :, :9], wanted.swapaxes(1, 2))
            assert not side[:, :, 9:].any()
        (k, _) = seq.gather(layout="HND")
        assert k[1][None].shape == (1, 2, 9, 4)
        assert k[1][None].flags.c_contiguous


@pytest.mark.parametrize("wrong", [(-1, 4), (0, 10), (5, 4), (10, 10), (1.5, 4), ("0", 4), (True, 4), (0, None, 1)])
def test_what_is_no_range_of_computed_tokens_is_refused(open_cache, wrong):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 12)) as seq:
        toy.run(seq, q_lens=[9])
        with pytest.raises((pk.InvalidArgument, pk.WrongType, TypeError)):
            seq.gather(*wrong)
    for name in ("nhd", "NDH", "", 5, None):
        with toy.cache.sequence(prompt(1, 12)) as seq, pytest.raises((pk.InvalidArgument, pk.WrongType)):
            seq.gather(layout=name)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stored", ["NHD", "HND"])
def test_a_range_is_scattered_and_what_is_cached_already_stays_as_it_is(open_cache, stored, layout):
    toy = Toy(open_cache(spec=spec_of(layout=stored)))
    toy.use(prompt(1, 9))
    tokens = [*prompt(1, 9), *prompt(2, 6)]
    k, v = all_kv(toy, tokens)
    k[:, : 2 * BLOCK], v[:, : 2 * BLOCK] = -1, -1  # never read: these tokens are cached
    turned = (lambda x: x.swapaxes(1, 2).copy()) if layout == "HND" else (lambda x: x)
    with toy.cache.sequence(tokens) as seq:
        assert seq.num_computed == 2 * BLOCK
        seq.scatter(turned(k[:, :11]), turned(v[:, :11]), 0, 11, layout=layout)
        assert seq.num_computed == 11
        toy.check(seq)
        seq.scatter(turned(k[:, 8:13]).tolist(), list(turned(v[:, 8:13])), 8, 13, layout=layout)
        assert seq.num_computed == 13
        seq.scatter(turned(k[:, 13:]), turned(v[:, 13:]), layout=layout)
        assert seq.num_computed == 15
        toy.check(seq)
        seq.scatter(turned(k), turned(v), 0, layout=layout)  # all of it is there: nothing to do
        toy.check(seq)


def test_scattering_behind_a_gap_is_refused_and_says_where_to_begin(open_cache):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 9)) as seq:
        k, v = all_kv(toy, seq.tokens)
        seq.scatter(k[:, :3], v[:, :3], stop=3)
        with pytest.raises(pk.InvalidArgument, match="leaves a gap: 3 tokens are computed"):
            seq.scatter(k[:, 4:], v[:, 4:], 4)
        for wrong in ((0, 10), (-1, 3), (5, 4), (1.5, 3), ("0", 3)):
            with pytest.raises((pk.InvalidArgument, pk.WrongType)):
                seq.scatter(k, v, *wrong)
        for layout in ("nhd", 3):
            with pytest.raises((pk.InvalidArgument, pk.WrongType)):
                seq.scatter(k, v, layout=layout)
        assert seq.num_computed == 3
        toy.check(seq)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("num_tokens", [2, 4, 8])
def test_a_range_with_another_number_of_tokens_commits_nothing(open_cache, num_tokens, layout):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 9)) as seq:
        k, v = all_kv(toy, seq.tokens)
        seq.scatter(k[:, :2], v[:, :2], stop=2)
        wrong = [x[:, :num_tokens].swapaxes(1, 2) if layout == "HND" else x[:, :num_tokens] for x in (k, v)]
        with pytest.raises(pk.LayoutMismatch):
            seq.scatter(*wrong, 0, 7, layout=layout)
        assert seq.num_computed == 2
        toy.check(seq)


KV = np.ones(SHAPE, np.float32)
WRONG_KV = {
    "a layer too few": KV[:1], "a layer too many": np.ones((3, *SHAPE[1:]), np.float32), "a token too few": KV[:, :8],
    "heads": KV[:, :, :1], "flat": KV.ravel(), "integers": KV.astype(np.int64), "objects": KV.astype(object),
    "none": None,
    "a number": 5, "text": "kv", "a dictionary": {"k": KV[0], "v": KV[1]}, "complex": KV.astype(complex),
    "0-d": np.float32(1),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_KV.values(), ids=WRONG_KV)
def test_scattering_what_does_not_fit_commits_nothing(open_cache, wrong):
    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 9)) as seq:
        for pair in ((wrong, KV), (KV, wrong)):
            with pytest.raises((pk.LayoutMismatch, pk.WrongType)):
                seq.scatter(*pair)
        assert seq.num_computed == 0
        toy.run(seq)
        toy.check(seq)


def test_scattering_without_room_commits_nothing(open_cache):
    toy = Toy(open_cache(2))
    with toy.cache.sequence(prompt(1, 9)) as seq:
        with pytest.raises(pk.OutOfBlocks):
            seq.scatter(*all_kv(toy, seq.tokens))
        assert (seq.num_computed, len(seq.blocks)) == (0, 0)


def test_lists_and_dlpack_are_read_too(open_cache):
    class Foreign:
        """What another library hands over."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    toy = Toy(open_cache())
    with toy.cache.sequence(prompt(1, 5)) as seq:
        k, v = all_kv(toy, seq.tokens)
        seq.scatter(k.tolist(), [Foreign(layer) for layer in v])
        toy.check(seq)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layer_views_are_the_arena(open_cache, layout):
    toy = Toy(open_cache(8, spec_of(layout=layout)))
    with toy.cache.sequence(prompt(1, 9)) as seq:
        toy.run(seq)
        for layer in range(2):
            views, wanted = toy.cache.layer(layer), toy.kv(seq.tokens, layer)
            for view, values in zip(views, wanted, strict=True):
                assert view.shape == (8, BLOCK, 2, 4)
                assert np.shares_memory(view, toy.cache.device_arena)
                assert np.array_equal(view[seq.blocks].reshape(-1, 2, 4)[:9], values)
