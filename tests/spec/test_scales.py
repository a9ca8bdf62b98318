"""Fixed scales: the numbers that they take, and those that samples measure."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType
from pagedkv.spec.dtypes import float32_to_bfloat16


def test_scales_are_kept_as_float32_and_are_values() -> None:
    scales = pk.Scales(0.1, [[0.1]])
    assert scales.k == scales.v == ((float(np.float32(0.1)),),)
    assert (
        scales == pk.Scales(np.float32(0.1), np.array(0.1)) == pickle.loads(pickle.dumps(scales)) == copy.copy(scales)
    )
    assert hash(scales) == hash(pk.Scales(0.1, 0.1))
    assert (scales.per, scales.shape) == ("tensor", (1, 1))
    assert repr(pk.Scales(np.ones((2, 3)), np.ones((2, 3)))) == "<Scales per head, [2, 3]>"


def test_a_layer_has_its_own_scales_or_those_of_all() -> None:
    by_layer = pk.Scales([1, 2], [3, 4])
    assert [side.tolist() for side in by_layer.of_layer(1)] == [[2], [4]]
    by_head = pk.Scales([[1, 2], [3, 4]], [[5, 6], [7, 8]])
    assert [side.tolist() for side in by_head.of_layer(0)] == [[1, 2], [5, 6]]
    assert by_head.of_layer(0)[0].dtype == np.float32
    for_all = pk.Scales(3, 4)
    assert [side.tolist() for side in for_all.of_layer(17)] == [[3], [4]]


@pytest.mark.parametrize(
    ("k", "v", "kind", "said"),
    [
        (0, 1, InvalidArgument, "of k must be positive"),
        (1, -1, InvalidArgument, "of v must be positive"),
        (1, np.nan, InvalidArgument, "nan"),
        (1e39, 1, InvalidArgument, "inf"),
        (1e-60, 1, InvalidArgument, "0.0"),
        ([], 1, InvalidArgument, "num_layers"),
        ([[[1]]], 1, InvalidArgument, "num_layers"),
        ([1, 2], 1, InvalidArgument, r"k are \[2, 1\] and of v \[1, 1\]"),
        ("1", 1, WrongType, "of k must be numbers"),
        (["1.0"], 1, WrongType, "of k must be numbers"),
        ([True], 1, WrongType, "of k must be numbers"),
        (1j, 1, WrongType, "of k must be numbers"),
        (np.array(["2026-01-01"], "M8[D]"), 1, WrongType, "of k must be numbers"),
        (10**400, 1, WrongType, "of k must be numbers"),
        ([10**400], 1, WrongType, "of k must be numbers"),
        (None, 1, (WrongType, InvalidArgument), "of k"),
        ([[1], [1, 2]], 1, WrongType, "of k"),
        (True, 1, WrongType, "of k must be numbers"),
    ],
)
def test_what_is_no_scale_is_refused(k: Any, v: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        pk.Scales(k, v)


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("float8_e4m3", 448), ("float8_e5m2", 57344)])
def test_the_largest_sample_becomes_the_largest_number(dtype: str, largest: int) -> None:
    draw = np.random.default_rng(0)
    k, v = draw.standard_normal((2, 5, 3, 4)), draw.standard_normal((2, 5, 3, 6)) * 9
    by_head = pk.Scales.measured(k, v, dtype)
    assert by_head.shape == (2, 3)
    np.testing.assert_allclose(by_head.v, np.abs(v).max(axis=(1, 3)) / largest, rtol=1e-6)
    half = k.astype(np.float16)
    by_layer = pk.Scales.measured(half, v, dtype, per="tensor")
    assert by_layer.shape == (2, 1)
    np.testing.assert_allclose(by_layer.k, np.abs(half.astype(float)).max(axis=(1, 2, 3))[:, None] / largest, rtol=1e-6)
    zeros = np.zeros((1, 1, 1, 1))
    assert pk.Scales.measured(zeros, zeros, dtype) == pk.Scales(1, 1)


@pytest.mark.parametrize(
    ("k", "options", "kind"),
    [
        (np.zeros((2, 0, 3, 4)), {}, LayoutMismatch),
        (np.zeros((2, 3, 4)), {}, LayoutMismatch),
        (np.zeros((2, 5, 3, 4), int), {}, LayoutMismatch),
        (np.full((2, 5, 3, 4), np.inf), {}, InvalidArgument),
        (np.ones((2, 5, 3, 4)), {"dtype": "float16"}, InvalidArgument),
        (np.ones((2, 5, 3, 4)), {"per": "token"}, InvalidArgument),
        (np.ones((2, 5, 3, 4)), {"per": np.array(["head", "head"])}, InvalidArgument),
        (np.full((2, 5, 3, 4), 1e300), {}, InvalidArgument),
        ([[1], [1, 2]], {}, LayoutMismatch),
        (np.zeros((2, 5, 3, 4), "V4"), {}, LayoutMismatch),
        (np.zeros((2, 5, 3, 4), [("a", "f4")]), {}, LayoutMismatch),
        (np.zeros((2, 5, 3, 4), "m8[s]"), {}, LayoutMismatch),
    ],
)
def test_samples_that_measure_nothing_are_refused(k: Any, options: dict[str, Any], kind: Any) -> None:
    with pytest.raises(kind):
        pk.Scales.measured(k, np.ones((2, 5, 3, 4)), **({"dtype": "int8"} | options))


def test_latents_have_scales_of_k_alone() -> None:
    assert pk.Scales([2, 3]) == pk.Scales([2, 3], [2, 3])
    samples = np.random.default_rng(0).standard_normal((2, 5, 1, 8))
    measured = pk.Scales.measured(samples, None, "int8")
    assert measured == pk.Scales.measured(samples, samples[..., :0], "int8") == pk.Scales(measured.k)
    for none in (np.array([]), samples[:1, :, :, :0]):
        with pytest.raises((InvalidArgument, LayoutMismatch)):
            pk.Scales.measured(samples, none, "int8")
    spec = pk.KVSpec.of([pk.Latent(6, 2)] * 2, dtype="int8", scales=measured)
    assert (spec.scales, spec.scale_mode) == (measured, "tensor")
    for alone in (pk.Scales(2), copy.deepcopy(pk.Scales(2)), pickle.loads(pickle.dumps(pk.Scales(2)))):
        with pytest.raises(InvalidArgument, match=r"of K alone, as for latents: give pagedkv\.Scales\(k, v\)"):
            pk.KVSpec(2, 1, 8, "int8", scales=alone)
    with pytest.raises(InvalidArgument, match=r"V is a part of K.* give pagedkv\.Scales\(k\)"):
        pk.KVSpec.of([pk.Latent(6, 2)] * 2, dtype="int8", scales=pk.Scales([1, 2], [1, 3]))


@pytest.mark.parametrize("layer", [pk.Attention(2, 8), pk.Latent(6, 2), pk.Rows(8, 8)])
def test_scales_of_layers_that_name_none_are_checked(layer: Any) -> None:
    for wrong, kind in ((5, WrongType), ({"k": 1}, WrongType), ("per_token", InvalidArgument)):
        with pytest.raises(kind, match=r"scales must be 'token_head' or a pagedkv\.Scales, got"):
            pk.KVSpec.of([layer], dtype="int8", scales=wrong)  # type: ignore[arg-type]
    if isinstance(layer, pk.Rows):
        with pytest.raises(InvalidArgument, match=r"scales are for .*, not for uint8"):
            pk.KVSpec.of([layer], scales=pk.Scales(1))
        return
    two, three = (pk.Scales(number, number) for number in (2, 3))
    assert pk.KVSpec.of([layer], dtype="int8", scales=two).scales == two
    own = dataclasses.replace(layer, scales=three)
    assert pk.KVSpec.of([own], dtype="int8", scales=two).scales == three


def test_bits_of_bfloat16_and_the_smallest_numbers_are_samples() -> None:
    ones = np.ones((1, 2, 1, 4), np.float32)
    assert pk.Scales.measured(float32_to_bfloat16(ones), ones, "int8") == pk.Scales.measured(ones, ones, "int8")
    smallest = pk.Scales.measured(ones * np.float32(1e-44), ones, "float8_e4m3")
    assert smallest.k[0][0] == np.finfo(np.float32).tiny


def test_the_arrays_of_a_layer_cannot_be_written() -> None:
    for array in pk.Scales([[1, 2]], [[3, 4]]).of_layer(0):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
