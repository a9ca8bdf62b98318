"""Every kind of number that `write_kv` converts, against NumPy bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv import cpu
from tests.cpu import by_numpy
from tests.cpu.batches import DTYPES
from tests.cpu.by_numpy import SOURCES

FLOATS = ("float32", "float16", "bfloat16")
QUANTISED = ("int8", "float8_e4m3", "float8_e5m2")
SMALLER = ("float16", "bfloat16", "float8_e4m3", "float8_e5m2")


def through(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Numbers as they come out of a cache of that dtype, scaled by 1 if it has scales."""
    rows = np.resize(values, (-(-len(values) // 8), 1, 8))
    caches = [np.zeros((len(rows), 1, 1, 8), DTYPES[dtype]) for _ in range(2)]
    one = np.ones(1, np.float32)
    scales: dict[str, Any] = {"scale_mode": "tensor", "k_scale": one, "v_scale": one} if dtype in QUANTISED else {}
    cpu.write_kv(rows, rows, *caches, np.arange(len(rows)), **scales)
    by_numpy.same_bits(*caches)
    return caches[0].reshape(-1)[: len(values)]


def any_bits(source: str, count: int = 4096) -> NDArray[Any]:
    """Numbers of any size, sign and kind."""
    dtype = np.dtype(SOURCES[source])
    whole = np.random.default_rng(3).integers(0, 2**64, count, np.uint64, endpoint=False)
    return (whole >> np.uint64(64 - 8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)


def numbers_of(dtype: str) -> NDArray[np.float64]:
    """All finite numbers of a type from 0 up, and the first that it has no room for."""
    bits = np.arange(2 ** (8 * np.dtype(DTYPES[dtype]).itemsize - 1)).astype(f"u{np.dtype(DTYPES[dtype]).itemsize}")
    with np.errstate(invalid="ignore"):
        values = bits.view(DTYPES[dtype]).astype(np.float64)
    values = np.sort(values[np.isfinite(values)])
    return np.append(values, 2 * values[-1] - values[-2])


def around_ties(dtype: str, near: Any) -> NDArray[Any]:
    """Return a type's numbers, the midpoints between them, and values just beside those.

    All are in the type `near`.
    """
    values = numbers_of(dtype)
    with np.errstate(over="ignore", under="ignore"):
        middles = ((values[1:] + values[:-1]) / 2).astype(near)
        beside = [np.nextafter(middles, near(end)) for end in (0, np.inf)]
        around = np.concatenate([values.astype(near), middles, *beside])
    return np.concatenate([around, -around])


@pytest.mark.parametrize("dtype", FLOATS + QUANTISED)
@pytest.mark.parametrize("source", SOURCES)
def test_numbers_of_any_bits_become_the_nearest(source: str, dtype: str) -> None:
    values = any_bits(source)
    expected = by_numpy.converted(values, DTYPES[dtype])
    by_numpy.same_bits(through(values, dtype), expected)


@pytest.mark.parametrize("dtype", SMALLER)
def test_every_tie_goes_to_even_and_its_neighbours_to_the_nearer_number(dtype: str) -> None:
    values = around_ties(dtype, np.float32)
    by_numpy.same_bits(through(values, dtype), by_numpy.converted(values, DTYPES[dtype]))


def test_halves_of_whole_numbers_go_to_even_in_int8() -> None:
    values = np.arange(-260, 261, dtype=np.float32) / 2
    np.testing.assert_array_equal(through(values, "int8"), np.clip(np.rint(values), -127, 127).astype(np.int8))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_every_number_of_16_bits_is_widened_exactly_and_rounded_once(source: str, dtype: str) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(SOURCES[source])
    by_numpy.same_bits(through(values, dtype), by_numpy.converted(values, DTYPES[dtype]))


def test_numbers_of_the_caches_own_dtype_keep_every_bit() -> None:
    for dtype in FLOATS:
        values = any_bits(dtype)
        bits = np.dtype(f"u{values.dtype.itemsize}")
        np.testing.assert_array_equal(through(values, dtype).view(bits), values.view(bits))


def test_float64_becomes_float16_in_one_rounding() -> None:
    """By way of float32, 1 + 2^-11 + 2^-40 would be a tie, and lost."""
    above = np.array([1 + 2**-11 + 2**-40, -1 - 2**-11 - 2**-40, 65520 * (1 - 2**-40), 2**-25 * (1 + 2**-40)])
    np.testing.assert_array_equal(through(above, "float16"), [1 + 2**-10, -1 - 2**-10, 65504, 2**-24])
    values = around_ties("float16", np.float64)
    by_numpy.same_bits(through(values, "float16"), by_numpy.converted(values, np.float16))


def test_nan_keeps_its_sign() -> None:
    values = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    for dtype in ("float16", "bfloat16", "float8_e4m3", "float8_e5m2"):
        found = through(values, dtype)
        assert np.isnan(found.astype(np.float32)).all()
        np.testing.assert_array_equal(np.signbit(found.astype(np.float32)), [False, True, False, True])
