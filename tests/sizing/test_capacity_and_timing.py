"""Batch sizes and times: whole sequences in whole blocks, and bytes over rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import InvalidArgument, WrongType
from pagedkv.core import BlockPool
from pagedkv.lab.sizing import (
    batch_size,
    blocks_needed,
    decode_seconds,
    memory_savings,
    paged_batch_size,
    paged_cost,
    prefill_seconds,
    request_seconds,
    tokens_per_second,
    transfer_seconds,
    users_on_gpus,
    utilisation,
)


@given(
    memory=st.integers(0, 10**5),
    weights=st.integers(0, 10**4),
    token_bytes=st.integers(1, 50),
    num_tokens=st.integers(1, 100),
    block_size=st.integers(1, 32),
)
def test_a_paged_batch_is_what_a_pool_of_that_memory_opens(
    memory: int, weights: int, token_bytes: int, num_tokens: int, block_size: int
) -> None:
    num_blocks = (memory - weights) // (token_bytes * block_size)
    if not 0 < num_blocks < 2000:
        return
    pool, opened = BlockPool(num_blocks), 0
    while pool.num_free >= blocks_needed(num_tokens, block_size):
        pool.alloc(blocks_needed(num_tokens, block_size))
        opened += 1
    assert paged_batch_size(memory, weights, token_bytes, num_tokens, block_size) == opened


@given(memory=st.integers(0, 10**6), weights=st.integers(0, 10**5), size=st.integers(1, 10**4))
def test_one_sequence_more_than_the_batch_does_not_fit(memory: int, weights: int, size: int) -> None:
    if weights <= memory:
        fits = batch_size(memory, weights, size)
        assert weights + fits * size <= memory < weights + (fits + 1) * size


@given(
    count=st.integers(1, 50), tokens=st.integers(1, 300), more=st.integers(0, 300), block_size=st.integers(1, 32),
)  # fmt: skip
def test_savings_are_those_of_the_utilisations(count: int, tokens: int, more: int, block_size: int) -> None:
    savings = memory_savings(count, tokens, tokens + more, block_size, token_bytes=3)
    assert savings.used_bytes == 3 * count * tokens
    assert savings.paged_utilisation == pytest.approx(utilisation([tokens] * count, block_size))
    assert savings.contiguous_utilisation == pytest.approx(tokens / (tokens + more))
    assert savings.saved_bytes == savings.contiguous_bytes - savings.paged_bytes
    assert savings.saved_fraction == pytest.approx(1 - savings.contiguous_utilisation / savings.paged_utilisation)


def test_a_share_of_all_gpus_holds_whole_users() -> None:
    assert users_on_gpus(2, 100, 0.5, 30) == 3
    assert users_on_gpus(2, 100, 0.0, 30) == 0


def test_times_are_bytes_over_rates() -> None:
    assert transfer_seconds(0, 1e9) == 0
    assert transfer_seconds(2 * 10**9, 1e9, latency_s=0.5) == 2.5
    assert decode_seconds(10**9, 3 * 10**9, 2e9) == 2
    assert prefill_seconds(8 * 10**9, 1000, 1e12) == 16
    assert request_seconds(1, 0.5, 4) == 3
    assert tokens_per_second(10, 0.5, busy=0.5) == 10


def test_nothing_computed_costs_nothing() -> None:
    cost = paged_cost([0, 0], 16, 2048, 1e-4, 1e-5)
    assert (cost.blocks, cost.total_s, cost.overhead) == ((0, 0), 0.0, 0.0)
    assert cost.more_sequences == math.inf


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: batch_size(10, 11, 1), InvalidArgument),
        (lambda: batch_size(10, 0, 0), InvalidArgument),
        (lambda: batch_size(10.0, 0, 1), WrongType),  # type: ignore[arg-type]
        (lambda: paged_batch_size(10, 0, 0, 1), InvalidArgument),
        (lambda: paged_batch_size(10, 0, 1, 0), InvalidArgument),
        (lambda: users_on_gpus(0, 1, 0.5, 1), InvalidArgument),
        (lambda: users_on_gpus(1, 1, 1.5, 1), InvalidArgument),
        (lambda: users_on_gpus(1, 1, float("nan"), 1), InvalidArgument),
        (lambda: memory_savings(1, 5, 4), InvalidArgument),
        (lambda: memory_savings(0, 5, 5), InvalidArgument),
        (lambda: transfer_seconds(1, 0), InvalidArgument),
        (lambda: transfer_seconds(1, 1, -1), InvalidArgument),
        (lambda: transfer_seconds(1, 10**400), InvalidArgument),
        (lambda: transfer_seconds(1, True), WrongType),
        (lambda: decode_seconds(-1, 0, 1), InvalidArgument),
        (lambda: prefill_seconds(1, -1, 1), InvalidArgument),
        (lambda: request_seconds("1", 1, 1), WrongType),  # type: ignore[arg-type]
        (lambda: tokens_per_second(1, 1, 2), InvalidArgument),
        (lambda: paged_cost([5], 16, 4, 1, 1), InvalidArgument),
        (lambda: paged_cost([5], 0, 8, 1, 1), InvalidArgument),
    ],
)
def test_what_cannot_be_counted_is_refused(call: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert len(str(caught.value)) < 200
