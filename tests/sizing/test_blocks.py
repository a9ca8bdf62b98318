"""Blocks and fragmentation: the formulas against filling blocks token by token."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import InvalidArgument, WrongType
from pagedkv.core import BlockPool, BlockTable
from pagedkv.lab.sizing import (
    blocks_needed,
    contiguous_utilisation,
    expected_utilisation,
    expected_waste,
    mean_waste,
    table_bytes,
    total_blocks,
    utilisation,
    waste_ratio,
    wasted_tokens,
)

Lengths = st.lists(st.integers(0, 400), min_size=1, max_size=30)
BlockSizes = st.integers(1, 64)


def fill(num_tokens: int, block_size: int) -> list[int]:
    """Tokens in each block of a sequence that grows token by token."""
    blocks: list[int] = []
    for _ in range(num_tokens):
        if not blocks or blocks[-1] == block_size:
            blocks.append(0)
        blocks[-1] += 1
    return blocks


@given(num_tokens=st.integers(0, 400), block_size=BlockSizes)
def test_blocks_and_waste_of_one_sequence(num_tokens: int, block_size: int) -> None:
    blocks = fill(num_tokens, block_size)
    assert blocks_needed(num_tokens, block_size) == len(blocks)
    assert wasted_tokens(num_tokens, block_size) == sum(block_size - used for used in blocks)
    assert table_bytes(num_tokens, block_size) == 4 * len(blocks)


@given(lengths=Lengths, block_size=BlockSizes)
def test_blocks_waste_and_utilisation_of_many(lengths: list[int], block_size: int) -> None:
    filled = [fill(length, block_size) for length in lengths]
    slots = block_size * sum(map(len, filled))
    assert total_blocks(lengths, block_size) == sum(map(len, filled))
    assert mean_waste(lengths, block_size) == pytest.approx((slots - sum(lengths)) / len(lengths))
    assert utilisation(lengths, block_size) == (sum(lengths) / slots if slots else 1.0)
    assert contiguous_utilisation(lengths, 400) == sum(lengths) / (400 * len(lengths))


@given(
    pairs=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9)), min_size=1, max_size=20).filter(
        lambda pairs: any(weight for _, weight in pairs)
    ),
    block_size=BlockSizes,
)
def test_a_distribution_s_waste_is_that_of_its_lengths_repeated(pairs: list[tuple[int, int]], block_size: int) -> None:
    lengths, weights = (list(column) for column in zip(*pairs, strict=True))
    repeated = [length for length, weight in pairs for _ in range(weight)]
    assert mean_waste(lengths, block_size, weights) == pytest.approx(mean_waste(repeated, block_size))


@given(start=st.integers(0, 1000), block_size=BlockSizes)
def test_the_expected_waste_is_exact_where_every_remainder_comes_equally_often(start: int, block_size: int) -> None:
    lengths = range(start, start + 3 * block_size)
    assert mean_waste(list(lengths), block_size) == pytest.approx(expected_waste(block_size))
    total = Fraction(sum(wasted_tokens(length, block_size) for length in lengths), len(lengths))
    assert total == Fraction(block_size - 1, 2)


@given(start=st.integers(1, 1000), block_size=BlockSizes)
def test_the_expected_utilisation_is_that_of_all_slots_together(start: int, block_size: int) -> None:
    lengths = list(range(start, start + 2 * block_size))
    mean = sum(lengths) / len(lengths)
    assert utilisation(lengths, block_size) == pytest.approx(expected_utilisation(mean, expected_waste(block_size)))


@given(num_tokens=st.integers(0, 399), block_size=BlockSizes)
def test_the_waste_ratio_compares_what_both_lose(num_tokens: int, block_size: int) -> None:
    lost = sum(block_size - used for used in fill(num_tokens, block_size))
    assert waste_ratio(num_tokens, block_size, 400) == lost / (400 - num_tokens)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), block_size=st.sampled_from([1, 4, 16]))
def test_the_core_s_block_tables_take_what_the_formula_says(lengths: list[int], block_size: int) -> None:
    pool = BlockPool(600)
    table = BlockTable(pool, block_size=block_size)
    rows = [table.open(np.arange(length, dtype=np.int32))[0] for length in lengths]
    table.step(rows)
    assert 600 - pool.num_free == total_blocks(lengths, block_size)
    assert [len(table.blocks(row)) for row in rows] == [blocks_needed(length, block_size) for length in lengths]


def test_nothing_allocated_is_nothing_wasted() -> None:
    assert utilisation(0) == utilisation([0, 0]) == 1.0
    assert expected_utilisation(0, 0) == 1.0
    assert contiguous_utilisation(0, 16) == 0.0


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: blocks_needed(-1), InvalidArgument),
        (lambda: blocks_needed(2**41), InvalidArgument),
        (lambda: blocks_needed(1.0), WrongType),  # type: ignore[arg-type]
        (lambda: blocks_needed(1, 0), InvalidArgument),
        (lambda: wasted_tokens(1, 257), InvalidArgument),
        (lambda: expected_waste(True), WrongType),
        (lambda: total_blocks([]), InvalidArgument),
        (lambda: total_blocks([-1]), InvalidArgument),
        (lambda: total_blocks([[1]]), WrongType),
        (lambda: total_blocks([1.5]), WrongType),
        (lambda: total_blocks([[1], [2, 3]]), WrongType),
        (lambda: utilisation("12"), WrongType),
        (lambda: mean_waste([1], 16, [1, 2]), InvalidArgument),
        (lambda: mean_waste([1], 16, [0]), InvalidArgument),
        (lambda: mean_waste([1], 16, [-1]), InvalidArgument),
        (lambda: mean_waste([1], 16, [float("nan")]), InvalidArgument),
        (lambda: mean_waste([1], 16, ["x"]), WrongType),
        (lambda: contiguous_utilisation([5], 4), InvalidArgument),
        (lambda: expected_utilisation(-1, 8), InvalidArgument),
        (lambda: expected_utilisation(float("inf"), 8), InvalidArgument),
        (lambda: expected_utilisation("1", 8), WrongType),  # type: ignore[arg-type]
        (lambda: waste_ratio(16, 16, 16), InvalidArgument),
    ],
)
def test_what_is_no_length_is_refused(call: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert len(str(caught.value)) < 200
