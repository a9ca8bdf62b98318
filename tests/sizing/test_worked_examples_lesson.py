"""Every worked number of the lesson on paged attention ("Module 2, Lesson 2").

Also those of its exercises 2 and 4.

Where the lesson's own arithmetic is wrong or loose, the test's name says so; docs/sizing.md lists them.
"""

from __future__ import annotations

import math

import pytest

from pagedkv.lab.sizing import (
    batch_size,
    block_bytes,
    blocks_needed,
    contiguous_utilisation,
    expected_utilisation,
    expected_waste,
    find_model,
    memory_savings,
    paged_batch_size,
    paged_cost,
    sequence_bytes,
    token_bytes,
    tokens_per_second,
    utilisation,
    wasted_tokens,
)

LENGTHS = (512, 1024, 256, 2000, 800, 1500, 300, 1800, 600, 1200, 450, 1600, 900, 1300, 700, 1700)  # exercise 4


def test_a_block_of_llama_2_7b_has_8388608_bytes() -> None:
    groups = find_model("llama-2-7b").groups
    assert block_bytes(groups, 16) == 32 * 2 * 16 * 32 * 128 * 2 == 8_388_608 == 8 * 2**20


@pytest.mark.parametrize(("tokens", "blocks", "unused"), [(10, 1, 6), (10 + 8, 2, 14), (10 + 8 + 30, 3, 0)])
def test_a_growing_sequence_takes_a_block_when_the_last_is_full(tokens: int, blocks: int, unused: int) -> None:
    assert blocks_needed(tokens, 16) == blocks
    assert wasted_tokens(tokens, 16) == unused


def test_fifty_tokens_take_four_blocks_and_waste_fourteen() -> None:
    assert blocks_needed(50, 16) == 4
    assert wasted_tokens(50, 16) == 14
    assert 50 % 16 / 16 == 1 - wasted_tokens(50, 16) / 16 == 0.125  # of the last block
    assert utilisation(50, 16) == 50 / 64 == 0.78125


def test_the_mean_waste_is_half_a_token_less_than_half_a_block() -> None:
    assert expected_waste(16) == 7.5
    assert sum(wasted_tokens(length, 16) for length in range(16, 32)) / 16 == 7.5


def test_a_thousand_tokens_are_used_to_99_2_percent() -> None:
    assert round(1 - 8 / 1000, 3) == 0.992
    assert round(expected_utilisation(1000, 16 / 2), 3) == 0.992
    assert utilisation(1000) == 1000 / 1008  # 1000 happens to waste exactly 8


def test_a_hundred_sequences_of_a_thousand_save_half_the_memory() -> None:
    savings = memory_savings(100, 1000, 2048, 16)
    assert savings.contiguous_bytes == 100 * 2048
    assert savings.paged_bytes == 100 * 1008
    assert round(savings.contiguous_utilisation, 3) == round(contiguous_utilisation(1000, 2048), 3) == 0.488
    assert round(savings.paged_utilisation, 3) == 0.992
    assert savings.saved_fraction == (2048 - 1008) / 2048
    assert round(savings.saved_fraction, 3) == 0.508


def test_twice_the_sequences_are_twice_the_tokens_per_second_at_the_same_step() -> None:
    assert tokens_per_second(100, 0.05) == 2 * tokens_per_second(50, 0.05)


def test_the_capacity_table_follows_from_no_formula() -> None:
    """80 GB with Llama-2-7B: the lesson says 32, 45 and "90+".

    Room for 4,096 tokens gives 30, for 2,048 61.
    """
    model = find_model("llama-2-7b")
    weights = model.weight_bytes()
    assert batch_size(80 * 10**9, weights, sequence_bytes(model.groups, 4096)) == 30
    assert batch_size(80 * 10**9, weights, sequence_bytes(model.groups, 2048)) == 61
    assert paged_batch_size(80 * 10**9, weights, token_bytes(model.groups), 1384, 16) == 91  # the mean that "90+" needs
    assert paged_batch_size(80 * 10**9, weights, token_bytes(model.groups), 1400, 16) == 90


@pytest.mark.parametrize(
    ("sequences", "mean", "longest", "contiguous", "paged", "saved", "used"),
    [
        (100, 256, 2048, 209_715_200, 26_214_400, 0.875, 0.125),
        (100, 1024, 2048, 209_715_200, 104_857_600, 0.5, 0.5),
        (100, 1800, 2048, 209_715_200, 185_139_200, 0.1171875, 0.87890625),
        (200, 800, 4096, 838_860_800, 163_840_000, 0.8046875, 0.1953125),
    ],
)
def test_the_savings_calculator_of_exercise_2(
    sequences: int, mean: int, longest: int, contiguous: int, paged: int, saved: float, used: float
) -> None:
    savings = memory_savings(sequences, mean, longest, block_size=16, token_bytes=1024)
    assert (savings.contiguous_bytes, savings.paged_bytes) == (contiguous, paged)
    assert savings.saved_bytes == contiguous - paged
    assert savings.saved_fraction == saved
    assert savings.contiguous_utilisation == used
    assert savings.paged_utilisation == mean / (math.ceil(mean / 16) * 16)


def test_the_performance_analysis_of_exercise_4() -> None:
    cost = paged_cost(LENGTHS, 16, 2048, compute_s_per_token=0.1e-3, gather_s_per_block=0.01e-3)
    assert cost.blocks == (32, 64, 16, 125, 50, 94, 19, 113, 38, 75, 29, 100, 57, 82, 44, 107)
    assert sum(cost.blocks) == 1045
    assert sum(LENGTHS) == 16_642
    assert cost.compute_s == pytest.approx(1.6642)
    assert cost.gather_s == pytest.approx(0.01045)
    assert cost.total_s == pytest.approx(1.67465)
    assert round(cost.overhead, 4) == 0.0063  # well below the 5 % that the lesson allows
    assert cost.utilisation == 16_642 / (1045 * 16)
    assert cost.contiguous_utilisation == 16_642 / (16 * 2048)
    assert round(cost.more_sequences, 2) == 1.96


def test_the_summary_s_formula_of_waste_is_wrong_for_full_blocks() -> None:
    """``B - n mod B`` says that 48 tokens waste a whole block; three full blocks waste nothing."""
    assert 16 - 48 % 16 == 16
    assert wasted_tokens(48, 16) == 0


def test_savings_of_a_mean_are_not_mean_savings() -> None:
    """By the lesson's formula, sequences of 1,024 tokens on average waste nothing.

    As a rule they waste 7.5 tokens each.
    """
    assert memory_savings(100, 1024, 2048).paged_utilisation == 1.0
    assert utilisation([1016 + (i % 16) for i in range(16)]) == pytest.approx(1023.5 / (1023.5 + 7.5))
