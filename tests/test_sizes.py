"""Sizes and whole numbers: what is read, and what is refused."""

from __future__ import annotations

import contextlib
import decimal
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import InvalidArgument, PagedKVError, WrongType
from pagedkv.spec.sizes import MAX_SIZE, UNITS, format_size, parse_size, whole_number


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8 GiB", 8 * 2**30),
        (" 1TiB ", 2**40),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("0.001kB", 1),
        ("0B", 0),
        ("7B", 7),
        (4096, 4096),
        (np.int64(4096), 4096),
        (0, 0),
        (MAX_SIZE, MAX_SIZE),
        (f"{MAX_SIZE}B", MAX_SIZE),
    ],
)
def test_a_size_is_a_number_and_a_unit_or_an_integer_of_bytes(size: str | int, num_bytes: int) -> None:
    assert parse_size(size) == num_bytes


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_is_a_power_of_1000_or_of_1024(unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    assert math.log(parse_size(f"1{unit}"), base) == pytest.approx("BKMGTP".index(unit[0].upper()))


@pytest.mark.parametrize(
    "size",
    [
        *("", "8", "GiB", "8Gb", "8gib", "8G", "-1GiB", "+1GiB", "1e3B", "1_000B", "0x10B", "nanB", "infGiB"),
        *("1..5GiB", ".5GiB", "8  GiB", "8GiB8GiB", "8GiB\n", "\u0663GiB", "8\0GiB", "9" * 5000 + "B"),
        *("0.3B", "1.0001KiB", f"{MAX_SIZE + 1}B", "8192PiB", -1, MAX_SIZE + 1, -(10**4000)),
    ],
)
def test_what_is_no_size_is_refused_and_the_message_stays_short(size: str | int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_size(size)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "size", [True, np.True_, 1.0, math.nan, None, b"8GiB", Fraction(8), [8], np.float64(8)]
)
def test_what_has_no_business_being_a_size_is_a_wrong_type(size: Any) -> None:
    with pytest.raises(WrongType):
        parse_size(size)


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_documented_error(text: str) -> None:
    with contextlib.suppress(PagedKVError):
        assert 0 <= parse_size(text) <= MAX_SIZE


@given(st.integers(0, 8191), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_of_a_unit_are_exact(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * UNITS[unit]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (8 * 2**30, "8.00 GiB"), (300 * 2**20, "300 MiB")],
)
def test_format_size_shows_three_digits(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_whole_number_accepts_numpy_integers_and_returns_a_plain_int() -> None:
    assert type(whole_number(np.uint8(3), "n", 1, 3)) is int


def test_whole_number_names_the_argument_and_its_range() -> None:
    with pytest.raises(InvalidArgument, match=r"num_layers must be in 1\.\.8, got 9"):
        whole_number(9, "num_layers", 1, 8)


def test_sizes_do_not_depend_on_the_callers_decimal_context() -> None:
    with decimal.localcontext() as context:
        context.prec = 2
        context.traps[decimal.Inexact] = True
        assert parse_size("8192.5MiB") == 8589934592 + 524288

