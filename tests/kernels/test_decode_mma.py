"""decode_mma against float64.

Shapes, types, variants, layouts and schedules; and what its plans promise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import UnsupportedVariant
from pagedkv.kernels import decode_mma
from pagedkv.kernels.attention import AttentionPlan
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import AttentionConfig, Schedule
from pagedkv.kernels.select import select
from tests.kernels.cases import Case, Problem, assert_close, assert_rows_close, contiguous, far_away, problem, run
from tests.ptxsim.backend import PtxsimBackend
from tests.slices import one_in

RAGGED = (0, 1, 15, 16, 17, 70, 255)
VARIANTS = [
    Case((17, 170), window=20),
    Case((17, 70), soft_cap=5.0),
    Case((17, 70), alibi=True),
    Case((0, 70), sinks=True),
    Case((17, 70, 1), (3, 5, 2), causal=False, window=7),
    Case((17, 70, 1), (3, 5, 2), window=20, soft_cap=5.0, alibi=True, sinks=True, mask=True),
    Case((2, 3), (5, 3)),
]


def attend(
    backend: Backend, given: Problem, schedule: Schedule = "even", max_q_len: int = 1, plan: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    tiling = decode_mma.tiling(given.case.config, max_q_len)
    return run(backend, given, tiling, schedule, plan)


def check(backend: Backend, case: Case, schedule: Schedule = "even", max_q_len: int = 1) -> None:
    given = problem(case)
    assert_close(given, *attend(backend, given, schedule, max_q_len))


@pytest.mark.parametrize("schedule", ["whole", "partitioned", "even"])
def test_a_ragged_batch_is_right_with_every_schedule(backend: Backend, schedule: Schedule) -> None:
    check(backend, Case(RAGGED), schedule)


@pytest.mark.parametrize("schedule", ["whole", "partitioned", "even"])
def test_a_long_sequence_beside_a_short_one(backend: Backend, schedule: Schedule) -> None:
    check(backend, Case((1000, 33), num_kv_heads=1), schedule)


@pytest.mark.parametrize("scale_mode", one_in(3, ["tensor", "token_head", "head"]))
def test_e4m3_on_a_gpu_that_has_no_instruction_for_it(backend: Backend, scale_mode: str) -> None:
    """Before sm_89 the compiler converts it by some twenty others."""
    if not isinstance(backend, PtxsimBackend):
        pytest.skip("the interpreter stands for every device")
    quantised: dict[str, Any] = {"q_dtype": "bfloat16", "kv_dtype": "float8_e4m3", "scale_mode": scale_mode}
    check(PtxsimBackend((8, 0)), Case((150, 33), num_kv_heads=1, **quantised))


@pytest.mark.parametrize("head_dim", one_in(3, [128, 16, 96, 80, 256]))
def test_head_dims(backend: Backend, head_dim: int) -> None:
    check(backend, Case((17, 150), head_dim=head_dim, num_kv_heads=1))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 128), (192, 128)])
def test_a_head_dim_of_v_of_its_own(backend: Backend, head_dim: int, head_dim_v: int) -> None:
    check(backend, Case((17, 70), head_dim=head_dim, head_dim_v=head_dim_v, num_kv_heads=1))


@pytest.mark.parametrize("group_size", one_in(2, [1, 2, 7, 3, 16, 8]))
def test_group_sizes(backend: Backend, group_size: int) -> None:
    check(backend, Case((17, 70), group_size=group_size, q_dtype="bfloat16", kv_dtype="bfloat16"))


@pytest.mark.parametrize("block_size", one_in(4, [0, 1, 8, 24, 37, 32, 128, 64]))
def test_block_sizes(backend: Backend, block_size: int) -> None:
    check(backend, Case((17, 170), block_size=block_size, num_kv_heads=1))


@pytest.mark.parametrize("block_size", [8, 16])
def test_heads_before_tokens(backend: Backend, block_size: int) -> None:
    check(backend, Case((17, 70), layout="HND", block_size=block_size, q_dtype="bfloat16", kv_dtype="bfloat16"))


@pytest.mark.parametrize(
    ("kv_dtype", "scale_mode", "q_dtype"),
    [
        ("float8_e4m3", "tensor", "float16"),
        ("float8_e4m3", "head", "bfloat16"),
        ("float8_e4m3", "token_head", "float16"),
        ("float8_e5m2", "none", "bfloat16"),
        ("float8_e5m2", "head", "float16"),
        ("int8", "tensor", "bfloat16"),
        ("int8", "token_head", "bfloat16"),
        ("int8", "head", "float16"),
    ],
)
def test_quantised_kv(backend: Backend, kv_dtype: str, scale_mode: Any, q_dtype: str) -> None:
    check(backend, Case((17, 70), kv_dtype=kv_dtype, scale_mode=scale_mode, q_dtype=q_dtype))


TOKENS = {"kv_dtype": "float8_e4m3", "scale_mode": "token_head", "q_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "case",
    [
        Case((70, 200), v_size=2.0**-30, **TOKENS),  # a share times its scale is far below f16's range
        Case((70, 200), v_size=2.0**30, **TOKENS),
        Case((70, 200), v_spread=30, softmax_scale=0.01, **TOKENS),
        Case((200, 300), v_spread=40, softmax_scale=30.0, **TOKENS),  # maxima rise and scales fall
        Case((70, 200), v_size=2.0**-12, v_spread=8, group_size=16, kv_dtype="int8", scale_mode="token_head"),
        Case((70,), q_size=2.0**60, softmax_scale=2.0**-63, **TOKENS),  # bf16 reaches farther than f16
        Case((70,), q_size=2.0**-60, softmax_scale=2.0**57, **TOKENS),
    ],
    ids=str,
)
def test_sizes_beyond_those_of_f16(backend: Backend, case: Case) -> None:
    given = problem(replace(case, num_kv_heads=1))
    assert_rows_close(given, *attend(backend, given), bound=1e-2)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "float8_e5m2", "int8"])
def test_every_stored_byte_is_the_number_that_it_stands_for(backend: Backend, kv_dtype: str) -> None:
    # One key: its share is 1, and the output is V to the bit.
    case = Case((1,), head_dim=256, group_size=1, num_kv_heads=1, kv_dtype=kv_dtype, scale_mode="tensor", block_size=16)
    given = problem(case)
    stored = given.v.view(given.v.whole)
    every = np.arange(256, dtype=np.uint8).view(stored.dtype)
    number = np.where(np.isfinite(every.astype(np.float32)), every.astype(np.float32), 0)
    stored[given.batch.block_tables[0, 0], 0, 0] = number.astype(stored.dtype)
    given.v_scale[:] = 1
    o, _ = attend(backend, given)
    assert np.array_equal(o[0, 0], number)


@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 16), (16, 8), (48, 0), (128, 1)])
def test_quantised_kv_of_other_shapes(backend: Backend, head_dim: int, block_size: int) -> None:
    case = Case((17, 70), head_dim=head_dim, block_size=block_size, kv_dtype="int8", scale_mode="token_head")
    check(backend, case)


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_variants(backend: Backend, case: Case) -> None:
    check(backend, case, max_q_len=5 if case.q_lens else 1)


@pytest.mark.parametrize("schedule", ["partitioned", "even"])
def test_a_window_with_every_schedule_that_splits(backend: Backend, schedule: Schedule) -> None:
    check(backend, Case((600, 530), (2, 1), window=70, num_kv_heads=1), schedule)


@pytest.mark.parametrize(("group_size", "max_q_len"), [(1, 8), (2, 8), (4, 8)])
def test_trees_of_drafts_over_one_or_several_row_tiles(backend: Backend, group_size: int, max_q_len: int) -> None:
    check(backend, Case((90, 70, 8), (8, 5, 1), group_size=group_size, num_kv_heads=1, mask=True), max_q_len=max_q_len)


def test_more_queries_than_the_tiling_was_made_for(backend: Backend) -> None:
    check(backend, Case((90, 30), (30, 7), num_kv_heads=1), max_q_len=1)


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("block", [-1, 1000])
def test_a_debug_launch_stops_at_a_block_that_is_not_there(backend: Backend, block_size: int, block: int) -> None:
    if backend.name != "ptxsim":
        pytest.skip("a trap would end the process's CUDA context")
    given = problem(Case((40,), block_size=block_size, num_kv_heads=1))
    config = replace(given.case.config, debug=True)
    plan = AttentionPlan(backend, config, decode_mma.tiling(config), "whole", num_kv_heads=1, max_sequences=1)
    assert_close(given, *attend(backend, given, plan=plan))
    given.batch.block_tables[0, 2] = block
    with pytest.raises(Exception, match="trap"):
        attend(backend, given, plan=plan)


@pytest.mark.parametrize("num_sms", one_in(2, [1, 2, 7]))
def test_any_number_of_multiprocessors_gives_the_same(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, num_sms: int
) -> None:
    monkeypatch.setattr(backend, "num_sms", num_sms)
    check(backend, Case((400, 130, 1, 65), num_kv_heads=1))


@pytest.mark.slow
def test_more_parts_than_lanes_read_at_once(backend: Backend) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "num_sms", 40)  # slices of four tiles: 68 parts, and lanes read 64 at once
        check(backend, Case((68 * 256 - 130,), head_dim=16, group_size=1, num_kv_heads=1))


def test_the_same_inputs_give_the_same_bits(backend: Backend) -> None:
    given = problem(Case((400, 130), num_kv_heads=1))
    for first, second in zip(attend(backend, given), attend(backend, given), strict=True):
        assert np.array_equal(first, second)


def test_a_plan_takes_other_lengths_after_update_and_smaller_batches(backend: Backend) -> None:
    problems = [problem(Case(lens, num_kv_heads=1)) for lens in ((300, 5, 77), (1, 450, 0), (200,), (300, 5, 77))]
    config = problems[0].case.config
    plan = AttentionPlan(backend, config, decode_mma.tiling(config), "even", num_kv_heads=1, max_sequences=3)
    for given in problems:
        assert_close(given, *attend(backend, given, plan=plan))
        assert not backend.to_host(plan.division.arrays["arrivals"]).any()


@pytest.mark.parametrize("block_size", [8, 16])
def test_paged_equals_contiguous(backend: Backend, block_size: int) -> None:
    paged = problem(Case((70, 200, 0), block_size=block_size, q_dtype="bfloat16", kv_dtype="bfloat16"))
    results = attend(backend, paged), attend(backend, contiguous(paged))
    for one, other in zip(*results, strict=True):
        finite = np.isfinite(one)
        assert np.array_equal(finite, np.isfinite(other))
        assert np.abs(one[finite] - other[finite]).max() <= 1e-3


@pytest.mark.parametrize("block_size", [8, 16])
def test_blocks_past_2_to_the_31_elements_are_reached(backend: Backend, block_size: int) -> None:
    given = problem(Case((40,), block_size=block_size, num_kv_heads=1, kv_dtype="int8", scale_mode="tensor"))
    assert_close(given, *attend(backend, far_away(backend, given)))


def test_negative_and_zero_softmax_scales(backend: Backend) -> None:
    for scale in (0.0, -0.2):
        check(backend, Case((17, 70), softmax_scale=scale))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q_dtype": "float32", "kv_dtype": "float32"}, "float32"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype 'bfloat16'"),
        ({"head_dim": 72}, "head_dim 72"),
        ({"head_dim_v": 512}, "head_dim_v 512"),
        ({"kv_alignment": 8}, "kv_alignment 8"),
    ],
)
def test_what_it_cannot_take_is_named(change: dict[str, Any], named: str) -> None:
    config = replace(AttentionConfig(64, 64, 4), **change)
    with pytest.raises(UnsupportedVariant, match=named):
        select(config, (9, 0), "decode_mma")
    assert select(config, (9, 0)).kernel != "decode_mma"


def test_older_devices_get_the_kernel_without_tensor_cores() -> None:
    config = AttentionConfig(64, 64, 4)
    assert select(config, (9, 0)).kernel == "decode_mma"
    assert select(config, (8, 0)).kernel == "decode_mma"
    assert select(config, (7, 5)).kernel == "decode_simt"
    with pytest.raises(UnsupportedVariant, match=r"7\.5"):
        select(config, (7, 5), "decode_mma")
    with pytest.raises(UnsupportedVariant, match="'decode_simt'"):
        select(config, (9, 0), "no_such_kernel")
