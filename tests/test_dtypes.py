"""bfloat16 by hand: against ml_dtypes, and against the definition."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.dtypes import bfloat16_to_float32, dtype_name, float32_to_bfloat16, numpy_dtype, stored_to_float32


def test_every_bfloat16_survives_the_round_trip_bit_by_bit_but_for_the_quiet_bit() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    back = float32_to_bfloat16(bfloat16_to_float32(bits))
    nan = np.isnan(bfloat16_to_float32(bits))
    assert np.array_equal(back[~nan], bits[~nan])
    assert np.array_equal(back[nan], bits[nan] | 0x0040)


def test_rounding_agrees_with_ml_dtypes_on_a_million_floats() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        theirs = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(float32_to_bfloat16(values), theirs)


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F808000, 0x3F80),  # a tie, to even below
        (0x3F818000, 0x3F82),  # a tie, to even above
        (0x3F808001, 0x3F81),
        (0x3F807FFF, 0x3F80),
        (0x7F7FFFFF, 0x7F80),  # the largest float32 becomes infinity
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a NaN whose payload lies in the lost half
        (0xFFFFFFFF, 0xFFFF),
        (0x80000000, 0x8000),
        (0x00000001, 0x0000),
    ],
)
def test_ties_go_to_even_and_nan_stays_nan(bits: int, rounded: int) -> None:
    value = np.array(bits, dtype=np.uint32).view(np.float32)
    assert float32_to_bfloat16(value) == rounded


def test_non_contiguous_input_and_out_are_fine() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    out = np.zeros((3, 4), dtype=np.uint16).T
    assert float32_to_bfloat16(values, out=out) is out
    assert np.array_equal(bfloat16_to_float32(out), values)


def test_ml_dtypes_arrays_are_read_as_their_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16)
    assert bfloat16_to_float32(values).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_a_silent_cast_before_rounding_is_refused(dtype: Any) -> None:
    with pytest.raises(WrongType):
        float32_to_bfloat16(np.zeros(3, dtype=dtype))
    with pytest.raises(WrongType):
        bfloat16_to_float32(np.zeros(3, dtype=dtype))


def test_an_out_of_another_shape_or_dtype_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        float32_to_bfloat16(np.zeros(3, np.float32), out=np.zeros(4, np.uint16))
    with pytest.raises(WrongType):
        float32_to_bfloat16(np.zeros(3, np.float32), out=np.zeros(3, np.int16))  # type: ignore[arg-type]


@pytest.mark.parametrize(("short", "name"), [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16")])
def test_a_short_name_is_refused_with_the_one_to_write(short: str, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"got '{short}': write '{name}'"):
        dtype_name(short)


def test_dtype_names_come_from_names_types_and_dtypes() -> None:
    assert dtype_name("bfloat16") == "bfloat16"
    assert dtype_name(np.float16) == dtype_name(np.dtype("float16")) == "float16"
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert dtype_name(ml_dtypes.bfloat16) == "bfloat16"


@pytest.mark.parametrize("dtype", ["float64", "f2", "", "FLOAT16", np.float64, np.int16, np.dtype(">f4"), object])
def test_dtypes_that_kv_cannot_have_are_refused(dtype: Any) -> None:
    with pytest.raises(InvalidArgument):
        dtype_name(dtype)


@pytest.mark.parametrize("dtype", [None, 2, 1.5, True, [("a", "f4", "x", "y")], object()])
def test_what_is_no_dtype_is_a_wrong_type(dtype: Any) -> None:
    with pytest.raises(WrongType):
        dtype_name(dtype)


def test_bfloat16_is_uint16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert numpy_dtype("bfloat16") == np.uint16
    assert numpy_dtype("float32") == np.float32


def test_bfloat16_is_ml_dtypes_where_there_is_one() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
def test_every_fp8_number_is_the_one_of_ml_dtypes_from_bits_and_from_its_own_dtype(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    own = getattr(ml_dtypes, "float8_e4m3fn" if name == "float8_e4m3" else name)
    bits = np.arange(256, dtype=np.uint8).reshape(16, 16).T
    with np.errstate(invalid="ignore"):
        wanted = np.ascontiguousarray(bits).view(own).astype(np.float32)
    for stored in (bits, np.ascontiguousarray(bits).view(own)):
        np.testing.assert_array_equal(stored_to_float32(stored, name), wanted)
        assert np.array_equal(np.signbit(stored_to_float32(stored, name)), np.signbit(wanted))
    assert dtype_name(own) == name
    assert numpy_dtype(name) == np.dtype(own)


def test_int8_numbers_are_themselves() -> None:
    whole = np.arange(-128, 128, dtype=np.int8)
    assert np.array_equal(stored_to_float32(whole, "int8"), np.arange(-128, 128, dtype=np.float32))
    assert dtype_name(np.int8) == "int8"
