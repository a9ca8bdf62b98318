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

import pagedkv as pk
from pagedkv.errors import InvalidArgument, PagedKVError, WrongType
from pagedkv.spec.sizes import (
    MAX_SIZE,
    UNITS,
    Blocks,
    Bytes,
    check_size,
    format_size,
    num_bytes_of,
    number_of_seconds,
    parse_size,
    whole_number,
)


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


@pytest.mark.parametrize("size", [True, np.True_, 1.0, math.nan, None, b"8GiB", Fraction(8), [8], np.float64(8)])
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


def test_a_whole_number_of_another_unit_is_a_wrong_type() -> None:
    assert whole_number(Blocks(3), "n", 0, 9, unit=Blocks) == whole_number(Bytes(3), "n", 0, 9, unit=Bytes) == 3
    for value, unit in ((Blocks(3), None), (Bytes(3), None), (Bytes(3), Blocks), (Blocks(3), Bytes)):
        with pytest.raises(WrongType, match=f"^n is not in {value.unit}: write a plain int"):
            whole_number(value, "n", 0, 9, unit=unit)


def test_neither_unit_is_made_of_the_other() -> None:
    assert (Blocks(Blocks(3)), Bytes(Bytes(3))) == (3, 3)
    with pytest.raises(WrongType, match="a number of blocks is not in bytes"):
        Blocks(Bytes(3))
    with pytest.raises(WrongType, match="a number of bytes is not in blocks"):
        Bytes(Blocks(3))
    with pytest.raises(WrongType, match="a size in bytes is not in blocks"):
        parse_size(Blocks(3))


def test_a_tier_is_no_number() -> None:
    for call, name, advice in (
        (lambda: whole_number(pk.Tier.HOST, "n", 0, 9), "n", "a plain int"),
        (lambda: whole_number(pk.Tier.HOST, "n", 0, 9, unit=Blocks), "n", "a plain int"),
        (lambda: Blocks(pk.Tier.HOST), "a number of blocks", "a plain int"),
        (lambda: Bytes(pk.Tier.HOST), "a number of bytes", "a plain int"),
        (lambda: parse_size(pk.Tier.HOST), "a size in bytes", "a plain int"),
        (lambda: number_of_seconds(pk.Tier.HOST, "t"), "t", "a number of seconds"),
    ):
        with pytest.raises(WrongType, match=rf"^{name} is not a tier: write {advice}, not Tier\.HOST$"):
            call()


def test_a_tier_is_no_size() -> None:
    for call in (check_size, num_bytes_of):
        with pytest.raises(WrongType, match=r"^n must be a size: a string such as '8GiB', .*Bytes, not Tier\.HOST$"):
            call(pk.Tier.HOST, "n")


def test_seconds_have_no_unit() -> None:
    for value in (Blocks(1), Bytes(1)):
        with pytest.raises(WrongType, match=f"^t is not in {value.unit}: write a number of seconds, not "):
            number_of_seconds(value, "t")


def test_a_number_of_blocks_as_text_is_told_how_to_write_it() -> None:
    for text in ("5000 blocks", "5000blocks", " 5000 Blocks ", "05000 block"):
        with pytest.raises(InvalidArgument, match=r", or pagedkv\.Blocks\(5000\) for a number of blocks$"):
            check_size(text, "n")
        with pytest.raises(InvalidArgument, match=r"as in '8GiB'$"):
            check_size(text, "n", blocks=False)


SPEC = pk.KVSpec(1, 1, 8, "float32", block_size=16, model="toy")


@pytest.mark.parametrize("value", [Blocks(1), Bytes(1), pk.Tier.HOST])
def test_public_numbers_refuse_a_unit_and_a_tier(value: Any) -> None:
    with pk.KVCache(SPEC, device_memory=Blocks(8)) as cache:
        scheduler = pk.Scheduler(cache)
        for call, name in (
            (lambda: pk.KVSpec(value, 1, 8, "float32", block_size=16, model="toy"), "num_layers"),
            (lambda: pk.KVCache(SPEC, device_memory=Blocks(8), deadline_s=value), "deadline_s"),
            (lambda: pk.KVCache(SPEC, device_memory=Blocks(8), max_sequences=value), "max_sequences"),
            (lambda: cache.load([1, 2], deadline_s=value), "deadline_s"),
            (lambda: cache.observe_prefill(2, value), "seconds"),
            (lambda: cache.close(write_s=value), "write_s"),
            (lambda: pk.Hazard(stake=value), "stake"),
            (lambda: pk.Hazard(window=value), "window"),
            (lambda: pk.SchedulerOptions(loading_share=value), "loading_share"),
            (lambda: pk.SchedulerOptions(max_running=value), "max_running"),
            (lambda: scheduler.submit([1, 2], max_new_tokens=2, deadline_s=value), "deadline_s"),
            (lambda: scheduler.set_weight("a", value), "weight"),
            (lambda: scheduler.wait(value), "timeout_s"),
        ):
            with pytest.raises(WrongType, match=f"^{name} is not "):
                call()


def test_likely_prefetches_refuse_a_unit_and_a_tier_for_seconds() -> None:
    with pk.KVCache(SPEC, device_memory=Blocks(8), host_memory=Blocks(8), policy="hazard") as cache:
        for value in (Blocks(3), pk.Tier.HOST):
            with pytest.raises(WrongType, match=r"^within_s is not .*write a number of seconds, not "):
                cache.prefetch_likely(value, 4)
        with pytest.raises(WrongType, match=r"^max_blocks is not a tier"):
            cache.prefetch_likely(3, pk.Tier.HOST)
