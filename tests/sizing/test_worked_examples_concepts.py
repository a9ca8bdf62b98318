"""Every worked number of "PagedAttention: Deep Dive into Concepts".

Up to its million users.

Where the text's own arithmetic is wrong, the test's name says so; docs/sizing.md lists them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedkv.lab.sizing import (
    GPUS,
    Machines,
    Users,
    batch_size,
    block_bytes,
    blocks_needed,
    contiguous_utilisation,
    expected_utilisation,
    expected_waste,
    find_model,
    paged_batch_size,
    plan,
    prefix_sharing,
    request_seconds,
    sequence_bytes,
    shareable_blocks,
    table_bytes,
    token_bytes,
    tokens_per_second,
    transfer_seconds,
    tree_blocks_per_sequence,
    users_on_gpus,
    utilisation,
    waste_ratio,
    wasted_tokens,
)

GB = 10**9
LLAMA, GPT3 = find_model("llama-13b"), find_model("gpt3-175b")  # the "100B model" has the shape of GPT-3
SESSION = 2_415_919_104  # 512 tokens of it


def test_2048_tokens_of_llama_13b_have_1677721600_bytes() -> None:
    assert sequence_bytes(LLAMA.groups, 2048) == 2 * 40 * 2048 * 40 * 128 * 2 == 1_677_721_600
    assert round(1_677_721_600 / GB, 2) == 1.68  # "1.6 GB"
    assert 1_677_721_600 / 2**30 == 1.5625


def test_a_block_of_llama_13b_is_12_5_mib() -> None:
    assert block_bytes(LLAMA.groups, 16) == 40 * 2 * 16 * 40 * 128 * 2 == 13_107_200 == 12.5 * 2**20


def test_fifty_tokens_need_four_blocks() -> None:
    assert blocks_needed(50, 16) == 4
    assert [token // 16 for token in (0, 15, 16, 31, 32, 47, 48, 49)] == [0, 0, 1, 1, 2, 2, 3, 3]  # tables' indices
    assert table_bytes(50, 16) == 16


def test_the_waste_ratio_of_300_tokens_is_a_quarter_of_its_bound() -> None:
    """The text puts a whole block for what is wasted: 0.9 %. 300 tokens waste four."""
    assert round(16 / (2048 - 300), 3) == 0.009
    assert wasted_tokens(300, 16) == 4
    assert waste_ratio(300, 16, 2048) == 4 / 1748
    assert round(waste_ratio(300, 16, 2048), 4) == 0.0023
    assert max(waste_ratio(n, 16, 2048) for n in range(289, 305)) < 16 / (2048 - 300)


def test_128_times_less_waste_is_neither_exact_nor_expected_nor_a_bound() -> None:
    """The factor is ``n_max / B``.

    For 300 tokens it is 437 times, 233 on average, and 117 where a block wastes most.
    """
    assert 2048 / 16 == 128
    assert 1 / waste_ratio(300, 16, 2048) == 437
    assert round((2048 - 300) / expected_waste(16)) == 233
    assert round((2048 - 300) / 15) == 117


def test_ten_sequences_over_a_prefix_of_256_save_ninety_percent() -> None:
    assert shareable_blocks(256, 16) == 16
    saving = prefix_sharing(10, 256)
    assert (saving.alone, saving.shared, saving.blocks) == (160, 16, 144)
    assert saving.fraction == 0.9
    assert [blocks * 12.5 for blocks in (saving.alone, saving.shared, saving.blocks)] == [2000, 200, 1800]  # MiB


@pytest.mark.parametrize("count", [1, 2, 10, 100])
def test_shared_memory_is_one_prefix_and_not_1_9_of_them(count: int) -> None:
    """The text's ``p * M * (1 + (N - 1) / N)`` is 1.9 prefixes for N = 10.

    Its ``1 - 1 / N`` is right.
    """
    assert prefix_sharing(count, 256).shared == 16
    assert prefix_sharing(count, 256).fraction == pytest.approx(1 - 1 / count)


def test_a_sequence_s_share_of_the_tree() -> None:
    """Four answers below two users below one system prompt."""
    assert tree_blocks_per_sequence([(16, 4), (8, 2), (4, 1)]) == 16 / 4 + 8 / 2 + 4 / 1 == 12
    assert 4 * 12 == 16 + 2 * 8 + 4 * 4


def test_swapping_1_6_gb_takes_100_to_133_ms() -> None:
    assert transfer_seconds(1_600_000_000, 16e9) == 0.1
    assert round(transfer_seconds(1_600_000_000, 12e9), 3) == 0.133  # "130 ms"
    exact = sequence_bytes(LLAMA.groups, 2048)
    assert [round(transfer_seconds(exact, rate), 3) for rate in (16e9, 12e9)] == [0.105, 0.140]


def test_copy_on_write_of_a_block_takes_microseconds() -> None:
    read_and_written = 2 * block_bytes(LLAMA.groups)
    assert round(transfer_seconds(read_and_written, GPUS["h100"].read_bytes_per_s), 7) == 7.8e-6


def test_utilisation_at_300_tokens() -> None:
    assert round(contiguous_utilisation(300, 2048), 3) == 0.146
    assert round(expected_utilisation(300, 16 / 2), 3) == 0.974
    assert round(expected_utilisation(300, expected_waste(16)), 3) == 0.976
    assert round(utilisation(300, 16), 3) == 0.987  # 300 tokens themselves


def test_the_improvement_is_6_65_times_and_6_7_only_from_rounded_operands() -> None:
    assert round(0.974 / 0.146, 1) == 6.7
    assert round(expected_utilisation(300, 8) / contiguous_utilisation(300, 2048), 2) == 6.65


def test_fragmentation_at_300_tokens_is_2_7_percent() -> None:
    assert round(16 / 2 / 300, 3) == 0.027
    assert round(expected_waste(16) / 300, 3) == 0.025


def test_a_batch_is_a_whole_number_of_sequences() -> None:
    """Contiguous: 33.75 is not 34 but 33, and 32 with the 1.68 GB of the text's own formula."""
    assert (80 - 26) / 1.6 == 33.75
    assert batch_size(80 * GB, 26 * GB, 1_600_000_000) == 33
    assert batch_size(80 * GB, 26 * GB, sequence_bytes(LLAMA.groups, 2048)) == 32


def test_paged_218_sequences_are_216_with_blocks_counted_and_213_without_rounded_gigabytes() -> None:
    assert batch_size(80 * GB, 26 * GB, int(0.24e9 * 1.03)) == 218
    assert batch_size(80 * GB, 26 * GB, int(sequence_bytes(LLAMA.groups, 300) * 1.03)) == 213
    assert blocks_needed(300, 16) == 19
    assert paged_batch_size(80 * GB, 26 * GB, token_bytes(LLAMA.groups), 300, 16) == 216


def test_the_throughput_gain_is_6_4_as_rounded_and_6_75_as_counted() -> None:
    assert round(218 / 34, 1) == 6.4
    assert 216 / 32 == 6.75


def test_the_weights_of_llama_13b_have_26_gb() -> None:
    assert round(LLAMA.weight_bytes(16) / GB) == 26


def test_a_batch_over_the_time_of_a_token_is_tokens_per_second_and_not_requests() -> None:
    assert tokens_per_second(218, 0.05) == pytest.approx(4360)
    assert tokens_per_second(218, 0.05) / 200 == pytest.approx(21.8)  # requests/s at 200 output tokens each
    assert tokens_per_second(100, 0.05, busy=0.9) / tokens_per_second(100, 0.05, busy=0.6) == pytest.approx(1.5)


def test_a_request_takes_its_first_token_and_then_the_others() -> None:
    assert request_seconds(0.25, 0.02, 100) == 2.25


def test_a_full_sequence_of_the_100b_model_is_9_66_gb_and_not_90() -> None:
    assert sequence_bytes(GPT3.groups, 2048) == 2 * 96 * 2048 * 12288 * 2 == 9_663_676_416
    assert sequence_bytes(GPT3.groups, 2048) == 9 * 2**30
    assert sequence_bytes(GPT3.groups, 2048) < 80 * GB  # it does fit into one GPU


def test_the_100b_model_has_the_shape_of_gpt_3_and_so_175_billion_weights() -> None:
    assert GPT3.num_layers == 96
    assert GPT3.groups[0].num_kv_heads * GPT3.groups[0].head_dim == 12_288
    assert 12 * 96 * 12_288**2 == 173_946_175_488  # arXiv:2001.08361: 12 * layers * width^2
    assert GPT3.weight_bytes(16) == 349_200_000_000


def test_an_average_sequence_of_it_is_2_42_gb_and_not_22_5() -> None:
    assert 90 * 512 / 2048 == 22.5
    assert sequence_bytes(GPT3.groups, 512) == SESSION == 2.25 * 2**30


def test_a_thousand_gpus_hold_23179_users_and_not_2489() -> None:
    assert users_on_gpus(1000, 80 * GB, 0.7, 22_500_000_000) == 2_488  # the text rounds up
    assert users_on_gpus(1000, 80 * GB, 0.7, SESSION) == 23_179
    assert users_on_gpus(1000, 80 * 2**30, 0.7, SESSION) == 24_888  # if its GB are GiB: ten times the text's


def test_a_gpu_holds_23_users_and_not_the_1000_of_the_picture() -> None:
    assert users_on_gpus(1, 80 * GB, 0.7, SESSION) == 23
    assert [batch_size(host * GB, 0, SESSION) for host in (512, 2000)] == [211, 827]  # and a server not 10,000
    assert batch_size(10_000 * GB, 0, SESSION) == 4_139


def test_evicting_a_full_sequence_takes_0_6_seconds_and_not_5_6() -> None:
    assert round(transfer_seconds(90 * GB, 16e9), 1) == 5.6
    assert transfer_seconds(10 * GB, 16e9) == 0.625  # "0.6 s", for a part that is larger than the whole
    assert round(transfer_seconds(9_663_676_416, 16e9), 3) == 0.604


def test_sixteen_lanes_of_pcie_4_have_31_5_gb_per_second_and_of_pcie_3_the_text_s_16() -> None:
    lane = 128 / 130 / 8  # bytes per transfer
    assert round(16 * 16 * lane, 1) == 31.5 == GPUS["a100-80gb"].link_bytes_per_s / 1e9
    assert round(16 * 32 * lane, 1) == 63.0 == GPUS["h100"].link_bytes_per_s / 1e9
    assert round(16 * 8 * lane, 1) == 15.8


def test_50_ms_of_pcie_move_a_third_of_an_average_session() -> None:
    assert 0.050 * 16e9 == 800_000_000
    assert 800_000_000 // token_bytes(GPT3.groups) == 169  # of its 512 tokens
    assert round(transfer_seconds(SESSION, 16e9), 3) == 0.151
    assert round(transfer_seconds(SESSION, 7e9), 3) == 0.345  # one NVMe drive, where the text has 200 ms


def test_hot_warm_and_cold_add_up() -> None:
    assert 5 + 50 == 55
    assert 5 + 50 + 200 == 255


def test_a_million_users_are_hot_warm_and_cold() -> None:
    assert 2_500 + 25_000 + 972_500 == 1_000_000
    assert round(0.0025 * 5 + 0.025 * 55 + 0.9725 * 255, 3) == 249.375  # ms, the mean that the text does not give


def million(**changes: int | float) -> Machines:
    """The text's machines: 1,000 H100.

    What a server has is its lower figures unless said otherwise.
    """
    numbers = {"num_gpus": 1000, "host_bytes": 2000 * GB, "disk_bytes": 10_000 * GB, "disk_bytes_per_s": 7e9} | changes
    return Machines(GPUS["h100"], **numbers)  # type: ignore[arg-type]


def test_the_active_percent_is_four_times_the_text_s_hot_users_and_fits_once_the_error_is_mended() -> None:
    """10,000 are active and 2,500 were to be hot.

    22,940 fit, in 62 replicas of 16 GPUs, which hold the weights too.
    """
    found = plan(GPT3, million(), Users(1_000_000, 512, active=0.01), kv_share=0.7)
    assert found.users.num_active == 10_000 > 2_500
    assert (found.tensor_parallel, found.num_replicas) == (16, 62)
    assert found.tiers[0].capacity == found.tiers[0].users == 22_940
    assert found.gpus_for_active == 28 * 16


def test_ten_terabytes_per_server_hold_half_of_a_million_such_sessions() -> None:
    """972,500 cold users of 2.42 GB are 2.35 PB; 125 servers of 10 TB have 1.25.

    With 22.5 GB they were 21.9 PB.
    """
    assert round(972_500 * SESSION / 1e15, 2) == 2.35
    assert round(972_500 * 22_500_000_000 / 1e15, 1) == 21.9
    found = plan(GPT3, million(), Users(1_000_000, 512), kv_share=0.7)
    hot, warm, cold, lost = (tier.users for tier in found.tiers)
    assert (hot, warm, cold, lost) == (22_940, 103_375, 517_375, 356_310)
    assert found.disk_bytes_for_all == 6_990 * SESSION == 16_887_274_536_960
    enough = plan(GPT3, million(disk_bytes=17_000 * GB), Users(1_000_000, 512), kv_share=0.7)
    assert [tier.users for tier in enough.tiers] == [22_940, 103_375, 873_685, 0]


def test_the_text_s_latencies_with_its_own_rates_and_the_mended_size() -> None:
    """16 GB/s of PCIe for each of 16 GPUs, and 7 GB/s of disk for each of two servers.

    A token takes the text's 5 ms.
    """
    machines = replace(million(disk_bytes=17_000 * GB), gpu=replace(GPUS["h100"], link_bytes_per_s=16e9))
    found = plan(GPT3, machines, Users(1_000_000, 512), kv_share=0.7, step_s=0.005)
    hot, warm, cold = (1000 * tier.first_token_s for tier in found.tiers[:3])
    assert hot == 5
    assert warm == pytest.approx(5 + 1000 * SESSION / 256e9) == pytest.approx(14.4, abs=0.1)
    assert cold == pytest.approx(warm + 1000 * SESSION / 14e9) == pytest.approx(187, abs=0.1)
    one_link = 5 + 1000 * transfer_seconds(SESSION, 16e9)
    assert round(one_link) == 156
    assert round(one_link + 1000 * transfer_seconds(SESSION, 7e9)) == 501


def test_seven_tenths_of_a_gpu_for_kv_leave_no_room_for_the_weights_of_eight() -> None:
    """349 GB on 8 GPUs are 43.7 GB each, more than half of each; the text has 30 % for them."""
    assert GPT3.weight_bytes() / 8 > 0.3 * 80 * GB
    assert GPT3.weight_bytes() / 16 < 0.3 * 80 * GB
