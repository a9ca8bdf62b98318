"""Token and FLOP weights: by hand on tiny cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagedkv.lab.replay import load_trace
from pagedkv.lab.replay.weights import LLAMA_3_8B, ModelShape, flop_weighted_hit_rate, hit_tokens, token_hit_rate

ONE = ModelShape("one", 1, 1, 1, 1, 1, 1)  # 4 weights for attention, 3 for the MLP


def test_the_default_model_multiplies_with_6_98_billion_weights() -> None:
    assert LLAMA_3_8B.matmul_weights == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


def test_prefill_cost_is_the_sum_over_positions() -> None:
    assert ONE.matmul_weights == 7
    by_hand = [sum(2 * 7 + 4 * (p + 1) for p in range(n)) for n in range(6)]
    assert ONE.prefill_flops(np.arange(6, dtype=np.int64)).tolist() == by_hand


def test_a_partial_last_block_counts_its_own_tokens_only(write_jsonl: Callable[..., Path]) -> None:
    line = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [3, 4]}'
    trace = load_trace(write_jsonl(lines=[line, line]))
    assert hit_tokens(trace, np.array([1, 2], np.int32)).tolist() == [512, 600]
    assert token_hit_rate(trace, np.array([0, 2], np.int32)) == 0.5
    assert flop_weighted_hit_rate(trace, np.array([0, 2], np.int32)) == 0.5
    cost = [sum(2 * 7 + 4 * (p + 1) for p in range(n)) for n in (512, 600)]
    found = flop_weighted_hit_rate(trace, np.array([0, 1], np.int32), ONE)
    assert found == pytest.approx(cost[0] / (2 * cost[1]), rel=1e-12)
