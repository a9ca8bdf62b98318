"""Every worked number of the chapter, the Chinese text and Aule's design.

The chapter is "Foundation Model Engineering", 12.2.

Where a text's own arithmetic is wrong, the test's name says so; docs/sizing.md lists them.
"""

from __future__ import annotations

import pytest

from pagedkv.core import BlockPool
from pagedkv.lab.sizing import (
    KVFormat,
    LayerGroup,
    batch_size,
    block_bytes,
    blocks_needed,
    contiguous_utilisation,
    expected_utilisation,
    expected_waste,
    find_model,
    fork_sharing,
    mean_waste,
    sequence_bytes,
    table_bytes,
    token_bytes,
    total_blocks,
    utilisation,
    wasted_tokens,
)

GB = 10**9
LLAMA = find_model("llama-13b")
AULE = (LayerGroup(1, 1, 64),)  # the one shape with its 256 bytes per token: one layer, one KV head of 64, fp16


# the chapter


def test_twenty_of_2048_reserved_tokens_leave_2028_unused() -> None:
    assert 2048 - 20 == 2028
    assert contiguous_utilisation(20, 2048) == 20 / 2048


def test_waste_under_four_percent_takes_180_tokens_on_average_and_354_at_worst() -> None:
    """The lengths that people send waste "typically less than 4 %".

    Not every length does.
    """
    assert 1 - expected_utilisation(180, expected_waste(16)) == pytest.approx(0.04)
    assert max(n for n in range(1, 4096) if 1 - utilisation(n, 16) >= 0.04) == 353
    assert round(1 - utilisation(50, 16), 2) == 0.22


def test_the_picture_s_requests_of_five_and_two_tokens_take_three_blocks_of_four() -> None:
    assert (blocks_needed(5, 4), blocks_needed(2, 4)) == (2, 1)
    assert 12 - total_blocks([5, 2], 4) == 9


def test_three_tokens_in_the_last_block_of_sixteen_waste_thirteen() -> None:
    assert wasted_tokens(16 + 3, 16) == 13


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_the_quiz_s_formula_is_exact_and_its_average_half_a_token_high(block_size: int) -> None:
    lengths = list(range(1, 4 * block_size + 1))
    assert all(wasted_tokens(n, block_size) == (block_size - n % block_size) % block_size for n in lengths)
    assert mean_waste(lengths, block_size) == (block_size - 1) / 2
    bytes_wasted = [token_bytes(LLAMA.groups) * wasted_tokens(n, block_size) for n in lengths]
    assert sum(bytes_wasted) == len(lengths) * token_bytes(LLAMA.groups) * (block_size - 1) // 2


# the Chinese text


def test_eight_requests_of_a_13b_model_are_13_4_gb() -> None:
    assert sequence_bytes(LLAMA.groups, 2048) == 2 * 40 * 40 * 128 * 2048 * 2 == 1_677_721_600
    assert round(8 * 1.6, 1) == 12.8  # as rounded
    assert 8 * 1_677_721_600 == 13_421_772_800 == 12.5 * 2**30


@pytest.mark.parametrize(("tokens", "wasted"), [(150, 0.927), (500, 0.756), (2000, 0.023)])
def test_contiguous_waste(tokens: int, wasted: float) -> None:
    assert round(1 - contiguous_utilisation(tokens, 2048), 3) == wasted


def test_contiguous_waste_is_57_percent_on_average() -> None:
    assert round(1 - contiguous_utilisation([150, 500, 2000], 2048), 2) == 0.57
    assert round((0.927 + 0.756 + 0.023) / 3, 2) == 0.57


@pytest.mark.parametrize(("tokens", "blocks", "tokens_lost", "wasted"), [(150, 10, 10, 0.0625), (2000, 125, 0, 0.0)])
def test_paged_waste(tokens: int, blocks: int, tokens_lost: int, wasted: float) -> None:
    assert blocks_needed(tokens, 16) == blocks
    assert wasted_tokens(tokens, 16) == tokens_lost
    assert 1 - utilisation(tokens, 16) == wasted


def test_500_tokens_waste_2_3_percent_of_what_is_allocated_and_2_4_of_what_is_used() -> None:
    """The text gives 2.4 %, by another denominator than in the lines around it."""
    assert (blocks_needed(500, 16), wasted_tokens(500, 16)) == (32, 12)
    assert round(1 - utilisation(500, 16), 3) == 0.023
    assert round(12 / 500, 3) == 0.024


def test_paged_waste_is_under_four_percent_of_the_three_together() -> None:
    assert round(1 - utilisation([150, 500, 2000], 16), 4) == 0.0082
    assert round((0.0625 + 12 / 512 + 0) / 3, 3) == 0.029  # each counted alike


@pytest.mark.parametrize(("tokens", "blocks"), [(15, 1), (16, 1), (17, 2), (48, 3), (32, 2), (10, 1)])
def test_a_sequence_takes_a_block_with_its_seventeenth_token(tokens: int, blocks: int) -> None:
    assert blocks_needed(tokens, 16) == blocks


def test_80_gb_hold_33_and_135_requests_beside_the_weights_and_not_35_and_150() -> None:
    """Its figures differ by 4.3 where its lengths differ by 4.

    They are 50 and 200 without weights, 33 and 135 with.
    """
    assert [batch_size(80 * GB, 0, size) for size in (1_600_000_000, 400_000_000)] == [50, 200]
    assert [batch_size(80 * GB, 26 * GB, size) for size in (1_600_000_000, 400_000_000)] == [33, 135]
    exact = [sequence_bytes(LLAMA.groups, tokens) for tokens in (2048, 512)]
    assert [batch_size(80 * GB, 26 * GB, size) for size in exact] == [32, 128]


def test_utilisation_from_40_to_96_percent_is_2_4_times() -> None:
    assert round(0.96 / 0.40, 1) == 2.4


def test_three_beams_of_three_full_blocks_and_one_each_take_six_blocks_and_not_twelve() -> None:
    assert 3 * 3 == 9  # copied in full when they part
    saving = fork_sharing(3, prompt_tokens=3 * 16, own_tokens=1)
    assert (saving.alone, saving.shared, saving.copies) == (12, 6, 0)
    assert saving.fraction == 0.5


def test_a_beam_whose_last_block_is_not_full_copies_it() -> None:
    """The picture adds a block per beam, which is so only where the third block is full."""
    saving = fork_sharing(3, prompt_tokens=3 * 16 - 1, own_tokens=1)
    assert (saving.alone, saving.shared, saving.copies) == (9, 5, 2)


@pytest.mark.parametrize(("block_size", "entries", "lost"), [(1, 4096, 0.0), (16, 256, 7.5), (128, 32, 63.5)])
def test_entries_of_a_table_and_what_blocks_of_that_size_lose(block_size: int, entries: int, lost: float) -> None:
    assert blocks_needed(4096, block_size) == entries
    assert table_bytes(4096, block_size) == 4 * entries
    assert expected_waste(block_size) == lost  # the text: 0, 8 and 64


def test_a_thousand_free_slots_do_not_hold_2048_tokens_in_pages_either() -> None:
    """With paging a request takes blocks as it grows.

    A request of up to 992 tokens starts at once.
    """
    assert blocks_needed(2048, 16) == 128
    assert 1000 // 16 == 62 < 128
    assert 62 * 16 == 992


# Aule's design


def test_aule_s_blocks_of_32_tokens() -> None:
    assert token_bytes(AULE) == 256
    assert block_bytes(AULE, 32) == 8 * 1024
    assert [sequence_bytes(AULE, tokens, 32) for tokens in (2048, 1024)] == [512 * 1024, 256 * 1024]
    assert [blocks_needed(tokens, 32) for tokens in (2048, 1024)] == [64, 32]
    assert total_blocks([2048, 1024], 32) * block_bytes(AULE, 32) == 768 * 1024


@pytest.mark.parametrize(("blocks", "tokens", "mib"), [(512, 16_384, 4), (8192, 262_144, 64)])
def test_aule_s_pools(blocks: int, tokens: int, mib: int) -> None:
    assert blocks * 32 == tokens
    assert blocks * block_bytes(AULE, 32) == mib * 2**20


def test_aule_s_sizes_are_of_one_head_and_fp16_while_its_shader_reads_eight_heads_of_fp32() -> None:
    tested = (LayerGroup(1, 8, 64),)
    assert block_bytes(tested, 32, KVFormat("float32")) == 128 * 1024
    assert 512 * block_bytes(tested, 32, KVFormat("float32")) == 64 * 2**20  # not 4 MB


def test_a_chunk_of_512_blocks_lasts_16384_tokens_and_not_ten_thousand() -> None:
    assert blocks_needed(16_384, 32) == 512 < blocks_needed(16_385, 32)


def test_a_table_of_1024_blocks_is_4_kib_and_far_below_a_percent() -> None:
    assert table_bytes(1024 * 32, 32) == 4096
    assert 4 / block_bytes(AULE, 32) < 0.0005


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (32, 1), (33, 2), (2048, 64)])
def test_rounding_up_as_aule_does(tokens: int, blocks: int) -> None:
    assert (tokens + 31) // 32 == blocks_needed(tokens, 32) == blocks


def test_aule_s_pool_examples_on_our_pool() -> None:
    """100 of 512 leave 412, and 1,500 from chunks of 512 grow the pool by two chunks.

    Aule's call grows it by one.
    """
    pool = BlockPool(512, max_blocks=2048, chunk=512)
    held = pool.alloc(100)
    assert pool.num_free == 412
    pool.free(held)
    assert pool.num_free == 512
    held = pool.alloc(1500)
    assert pool.capacity == 1536
    pool.free(held)
    for _ in range(1000):
        ids = pool.alloc(100)
        pool.free(ids[::2])
        pool.free(ids[1::2])
    assert pool.num_free == pool.capacity == 1536
    pool.check_integrity()
