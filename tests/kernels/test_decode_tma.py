"""decode_tma against float64, and against decode_mma, whose mathematics it shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import UnsupportedVariant
from pagedkv.kernels import decode_mma, decode_tma
from pagedkv.kernels.attention import AttentionPlan
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import AttentionConfig, Schedule
from pagedkv.kernels.select import select
from tests.kernels.cases import Case, Problem, assert_close, problem, run
from tests.slices import one_in

RAGGED = (0, 1, 15, 16, 17, 70, 255)


@pytest.fixture(autouse=True)
def _on_hopper(backend: Backend) -> None:
    if backend.capability[0] not in (9, 10):
        pytest.skip("decode_tma needs compute capability 9.x or 10.x")


def attend(
    backend: Backend, given: Problem, schedule: Schedule = "even", max_q_len: int = 1, plan: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    tiling = decode_tma.tiling(given.case.config, max_q_len)
    return run(backend, given, tiling, schedule, plan)


def check(backend: Backend, case: Case, schedule: Schedule = "even", max_q_len: int = 1) -> None:
    given = problem(case)
    assert_close(given, *attend(backend, given, schedule, max_q_len))


@pytest.mark.parametrize("schedule", ["whole", "partitioned", "even"])
def test_a_ragged_batch_is_right_with_every_schedule(backend: Backend, schedule: Schedule) -> None:
    check(backend, Case(RAGGED, num_kv_heads=1), schedule)


@pytest.mark.parametrize("schedule", ["whole", "even"])
def test_a_long_sequence_passes_the_ring_many_times(backend: Backend, schedule: Schedule) -> None:
    check(backend, Case((1000, 33), num_kv_heads=1, head_dim=128), schedule)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), one_in(2, map(pytest.param, (256, 128, 192, 64), (256, 128, 128, 128)))
)
def test_head_dims(backend: Backend, head_dim: int, head_dim_v: int) -> None:
    check(backend, Case((17, 150), head_dim=head_dim, head_dim_v=head_dim_v, num_kv_heads=1))


@pytest.mark.parametrize("block_size", one_in(2, [8, 48, 24, 32, 64, 128, 192]))
def test_block_sizes(backend: Backend, block_size: int) -> None:
    check(backend, Case((17, 230), block_size=block_size))


@pytest.mark.parametrize("group_size", [1, 7, 16])
def test_group_sizes(backend: Backend, group_size: int) -> None:
    check(backend, Case((17, 70), group_size=group_size, q_dtype="bfloat16", kv_dtype="bfloat16"))


@pytest.mark.parametrize("block_size", [8, 64])
def test_heads_before_tokens(backend: Backend, block_size: int) -> None:
    check(backend, Case((17, 70), layout="HND", block_size=block_size, q_dtype="bfloat16", kv_dtype="bfloat16"))


@pytest.mark.parametrize(
    ("kv_dtype", "scale_mode", "q_dtype"),
    [("float8_e4m3", "tensor", "bfloat16"), ("float8_e5m2", "none", "float16"), ("int8", "head", "float16")],
)
def test_quantised_kv(backend: Backend, kv_dtype: str, scale_mode: Any, q_dtype: str) -> None:
    check(backend, Case((17, 70), head_dim=128, kv_dtype=kv_dtype, scale_mode=scale_mode, q_dtype=q_dtype))


@pytest.mark.parametrize(
    "case",
    [
        Case((17, 170), window=20),
        Case((70, 1), (5, 2), window=20, soft_cap=5.0, alibi=True, sinks=True, mask=True, num_kv_heads=1),
        Case((70, 1), (5, 2), causal=False, num_kv_heads=1),
    ],
    ids=str,
)
def test_variants(backend: Backend, case: Case) -> None:
    check(backend, case, max_q_len=5 if case.q_lens else 1)


@pytest.mark.parametrize("num_sms", one_in(2, [7, 1]))
def test_any_number_of_multiprocessors_gives_the_same(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, num_sms: int
) -> None:
    monkeypatch.setattr(backend, "num_sms", num_sms)
    check(backend, Case((400, 130, 1, 65), num_kv_heads=1))


def test_with_more_than_8_rows_it_gives_the_bits_of_decode_mma(backend: Backend) -> None:
    given = problem(Case((70, 200), group_size=9, num_kv_heads=1))
    other = run(backend, given, decode_mma.tiling(given.case.config), "whole")
    for first, second in zip(attend(backend, given, "whole"), other, strict=True):
        assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("changes", "ctas"),
    [
        ({}, 2),
        ({"group_size": 16}, 2),
        ({"group_size": 16, "kv_dtype": "float8_e4m3", "scale_mode": "tensor"}, 2),
        ({"group_size": 16, "head_dim": 192}, 1),  # two CTAs would have room for a tile each
        ({"head_dim": 256, "head_dim_v": 256}, 1),
        # two CTAs would have room for their tiles, and a thread too few registers
        ({"group_size": 16, "head_dim": 256, "kv_dtype": "float8_e4m3", "scale_mode": "tensor"}, 1),
    ],
    ids=str,
)
def test_two_ctas_share_a_multiprocessor_where_each_holds_two_tiles(changes: dict[str, Any], ctas: int) -> None:
    tiling = decode_tma.tiling(replace(AttentionConfig(128, 128, 4, "bfloat16", "bfloat16"), **changes))
    assert tiling.ctas_per_sm == ctas
    assert dict(tiling.macros)["STAGES"] >= 4
    assert ctas * (tiling.shared_bytes + 2 * decode_tma.RESERVED_BYTES) <= decode_tma.SM_BYTES


@pytest.mark.slow
def test_a_plan_takes_other_lengths_after_update(backend: Backend) -> None:
    problems = [problem(Case(lens, num_kv_heads=1)) for lens in ((300, 5, 77), (1, 450, 0), (300, 5, 77))]
    config = problems[0].case.config
    plan = AttentionPlan(backend, config, decode_tma.tiling(config), "even", num_kv_heads=1, max_sequences=3)
    for given in problems:
        assert_close(given, *attend(backend, given, plan=plan))


@pytest.mark.parametrize(
    ("change", "capability", "named"),
    [
        ({}, (8, 9), r"8\.9"),
        ({}, (12, 0), r"12\.0"),
        ({"block_size": 4}, (9, 0), "block_size 4"),
        ({"block_size": 20}, (9, 0), "block_size 20"),
        ({"block_size": 0}, (9, 0), "block_size 0"),
        ({"head_dim": 96}, (9, 0), "head_dim 96"),
        ({"kv_dtype": "int8", "scale_mode": "head"}, (9, 0), "head_dim 64 of int8"),
        ({"head_dim": 128, "head_dim_v": 128, "kv_dtype": "int8", "scale_mode": "token_head"}, (9, 0), "token_head"),
    ],
)
def test_what_it_cannot_take_is_named(change: dict[str, Any], capability: tuple[int, int], named: str) -> None:
    config = replace(AttentionConfig(64, 64, 4), **change)
    with pytest.raises(UnsupportedVariant, match=named):
        select(config, capability, "decode_tma")
