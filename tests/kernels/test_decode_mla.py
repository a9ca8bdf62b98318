"""decode_mla against float64: latents, of which V is a part."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import UnsupportedVariant
from pagedkv.kernels import decode_mla
from pagedkv.kernels.attention import AttentionPlan
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import AttentionConfig, Schedule
from pagedkv.kernels.dtypes import ITEMSIZES
from pagedkv.kernels.select import select
from pagedkv.kernels.warps import shared_limit, tile_bytes
from tests.kernels.cases import Case, Problem, assert_close, assert_rows_close, problem, run
from tests.ptxsim.backend import PtxsimBackend
from tests.slices import one_in

RAGGED = (0, 1, 31, 32, 33, 150)
LATENTS: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, "v_in_k": True}
PLAIN = Case((70,), group_size=16, **LATENTS)
BF16: dict[str, Any] = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
FP8: dict[str, Any] = {"kv_dtype": "float8_e4m3", "scale_mode": "tensor"}
CONFIG = AttentionConfig(576, 512, 16, "bfloat16", "bfloat16", v_in_k=True)


@pytest.fixture(autouse=True)
def _with_room_in_shared_memory(backend: Backend) -> None:
    reason = decode_mla.unsupported(replace(CONFIG, group_size=32), backend.capability)
    if reason is not None:
        pytest.skip(reason)


def attend(backend: Backend, given: Problem, schedule: Schedule = "even", plan: Any = None) -> Any:
    return run(backend, given, decode_mla.tiling(given.case.config, backend.capability), schedule, plan)


def check(backend: Backend, case: Case, schedule: Schedule = "even") -> None:
    given = problem(case)
    assert_close(given, *attend(backend, given, schedule))


@pytest.mark.parametrize("schedule", one_in(2, ["whole", "partitioned", "even"]))
def test_a_ragged_batch_is_right_with_every_schedule(backend: Backend, schedule: Schedule) -> None:
    check(backend, replace(PLAIN, seq_lens=RAGGED), schedule)


@pytest.mark.parametrize("num_sms", one_in(2, [2, 1]))
def test_any_number_of_multiprocessors_gives_the_same(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, num_sms: int
) -> None:
    monkeypatch.setattr(backend, "num_sms", num_sms)
    check(backend, replace(PLAIN, seq_lens=(300, 1, 65)))


@pytest.mark.parametrize("group_size", one_in(2, [1, 7, 17, 32, 128, 64]))
def test_numbers_of_heads(backend: Backend, group_size: int) -> None:
    check(backend, replace(PLAIN, seq_lens=(50,), group_size=group_size, q_dtype="bfloat16", kv_dtype="bfloat16"))


@pytest.mark.parametrize("block_size", one_in(2, [1, 8, 24, 64]))
def test_block_sizes(backend: Backend, block_size: int) -> None:
    check(backend, replace(PLAIN, block_size=block_size))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(320, 256), (512, 512)])
def test_other_latents(backend: Backend, head_dim: int, head_dim_v: int) -> None:
    check(backend, replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v))


@pytest.mark.parametrize("group_size", [16, 40])
@pytest.mark.parametrize(
    ("kv_dtype", "scale_mode", "q_dtype"),
    [("float8_e4m3", "tensor", "bfloat16"), ("float8_e5m2", "none", "float16"), ("int8", "head", "bfloat16")],
)
def test_quantised_latents(backend: Backend, kv_dtype: str, scale_mode: Any, q_dtype: str, group_size: int) -> None:
    case = replace(PLAIN, seq_lens=(70, 33), group_size=group_size, kv_dtype=kv_dtype)
    check(backend, replace(case, scale_mode=scale_mode, q_dtype=q_dtype))


def test_queries_beyond_f16(backend: Backend) -> None:
    case = replace(PLAIN, kv_dtype="float8_e4m3", scale_mode="tensor", q_dtype="bfloat16")
    given = problem(replace(case, q_size=2.0**60, softmax_scale=2.0**-64))
    assert_rows_close(given, *attend(backend, given), bound=1e-2)


@pytest.mark.parametrize(
    "case",
    [
        replace(PLAIN, seq_lens=(150,), window=20),
        replace(PLAIN, seq_lens=(70, 1), q_lens=(5, 1), causal=False),
        replace(PLAIN, seq_lens=(70, 9), q_lens=(3, 2), soft_cap=5.0, sinks=True, mask=True, group_size=8),
    ],
    ids=str,
)
def test_variants(backend: Backend, case: Case) -> None:
    check(backend, case)


def test_the_same_inputs_give_the_same_bits(backend: Backend) -> None:
    given = problem(replace(PLAIN, seq_lens=(300, 65)))
    for first, second in zip(attend(backend, given), attend(backend, given), strict=True):
        assert np.array_equal(first, second)


def test_a_plan_takes_other_lengths_after_update(backend: Backend) -> None:
    problems = [problem(replace(PLAIN, seq_lens=lens)) for lens in ((200, 5, 77), (1, 250, 0), (200, 5, 77))]
    config = problems[0].case.config
    tiling = decode_mla.tiling(config, backend.capability)
    plan = AttentionPlan(backend, config, tiling, "even", num_kv_heads=1, max_sequences=3)
    for given in problems:
        assert_close(given, *attend(backend, given, plan=plan))


@pytest.mark.parametrize(
    ("capability", "change"),
    [
        ((8, 0), {"group_size": 32}),
        ((8, 0), {"group_size": 128}),
        ((8, 9), FP8),
        ((12, 0), FP8),
        ((12, 0), {**FP8, "group_size": 64}),
        ((8, 9), {"head_dim": 320, "head_dim_v": 256}),
        ((8, 6), {"head_dim": 512, "group_size": 32}),
        ((8, 6), {**FP8, "group_size": 17}),
    ],
    ids=str,
)
def test_devices_with_less_shared_memory(
    backend: Backend, capability: tuple[int, int], change: dict[str, Any]
) -> None:
    if not isinstance(backend, PtxsimBackend):
        pytest.skip("the interpreter stands for every device")
    check(PtxsimBackend(capability, num_sms=1), replace(PLAIN, seq_lens=(100, 37), **{**BF16, **change}))


@pytest.mark.parametrize(
    ("capability", "kv_dtype", "group_size", "rows", "ctas", "stages"),
    [
        ((9, 0), "bfloat16", 1, 16, 2, 2), ((9, 0), "bfloat16", 16, 16, 2, 2), ((9, 0), "bfloat16", 17, 32, 1, 4),
        ((9, 0), "float8_e4m3", 16, 16, 2, 4), ((10, 0), "float8_e4m3", 128, 32, 1, 6),
        ((8, 0), "bfloat16", 16, 16, 1, 3), ((8, 0), "bfloat16", 128, 32, 1, 2), ((8, 0), "float8_e4m3", 16, 16, 2, 2),
        ((8, 0), "float8_e4m3", 32, 32, 1, 5), ((8, 7), "bfloat16", 32, 32, 1, 2),
        ((8, 6), "float8_e4m3", 16, 16, 1, 3), ((8, 9), "float8_e4m3", 17, 32, 1, 2),
        ((12, 0), "float8_e4m3", 128, 32, 1, 2),
    ],
)  # fmt: skip
def test_rows_and_ctas_by_the_number_of_heads_and_as_many_tiles_as_fit_on_the_device(
    capability: tuple[int, int], kv_dtype: str, group_size: int, rows: int, ctas: int, stages: int
) -> None:
    config = replace(CONFIG, group_size=group_size, kv_dtype=kv_dtype)
    assert decode_mla.unsupported(config, capability) is None
    tiling = select(config, capability, "decode_mla")
    macros = dict(tiling.macros)
    assert (tiling.row_tile, tiling.ctas_per_sm, macros["MIN_CTAS"]) == (rows, ctas, ctas)
    assert macros["STAGES"] == stages
    assert ctas * (tiling.shared_bytes + 2 * 1024) <= shared_limit(capability) + 1024
    most = tile_bytes(576 * ITEMSIZES[kv_dtype], tiling.tile_tokens) + tiling.shared_bytes
    assert ctas * (most + 2 * 1024) > shared_limit(capability) + 1024 or stages == decode_mla.MAX_STAGES


def test_every_cta_leaves_room_for_what_it_has_beside_its_tiles() -> None:
    """Without that, two CTAs of two tiles each would seem to fit."""
    tiling = select(replace(CONFIG, head_dim=448, head_dim_v=256), (8, 0), "decode_mla")
    assert (tiling.row_tile, tiling.ctas_per_sm, dict(tiling.macros)["STAGES"]) == (16, 1, 4)


def test_many_heads_go_in_tiles_of_16_rows_where_32_do_not_fit() -> None:
    config = replace(CONFIG, head_dim=512, group_size=32)
    tiling = select(config, (8, 9), "decode_mla")
    assert (tiling.row_tile, tiling.ctas_per_sm, dict(tiling.macros)["STAGES"]) == (16, 1, 2)


@pytest.mark.parametrize(
    ("change", "capability", "named"),
    [
        ({}, (7, 5), r"compute capability 7\.5: needs 8\.0 or later"),
        ({"v_in_k": False}, (9, 0), "v_in_k"),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, (9, 0), "float32"),
        ({"kv_dtype": "float16"}, (9, 0), "kv_dtype 'float16'"),
        ({"head_dim": 544}, (9, 0), "head_dim 544"),
        ({"head_dim_v": 128}, (9, 0), "head_dim_v 128"),
        ({"block_size": 0}, (9, 0), "block_size 0"),
        ({"kv_dtype": "int8", "scale_mode": "token_head"}, (9, 0), "token_head"),
        ({"kv_alignment": 8}, (9, 0), "kv_alignment 8"),
    ],
)
def test_what_it_cannot_take_is_named(change: dict[str, Any], capability: tuple[int, int], named: str) -> None:
    config = replace(CONFIG, **change)
    with pytest.raises(UnsupportedVariant, match=named):
        select(config, capability, "decode_mla")


@pytest.mark.parametrize("group_size", [16, 128])
@pytest.mark.parametrize(("capability", "named"), [((8, 6), "8.6"), ((8, 9), "8.9"), ((12, 0), "12.0")])
def test_latents_of_which_two_tiles_do_not_fit_are_refused_with_the_bytes(
    capability: tuple[int, int], named: str, group_size: int
) -> None:
    said = (
        "decode_mla: head_dim 576 of bfloat16: 2 tiles of 32 latents and 16 rows take 103680 bytes of shared memory, "
        f"and compute capability {named} has 101376"
    )
    with pytest.raises(UnsupportedVariant, match=re.escape(said)):
        select(replace(CONFIG, group_size=group_size), capability, "decode_mla")


def test_latents_are_computed_by_it_where_it_can() -> None:
    assert select(CONFIG, (9, 0)).kernel == "decode_mla"
    assert select(replace(CONFIG, group_size=128), (8, 0)).kernel == "decode_mla"
    assert select(CONFIG, (12, 0)).kernel == "decode_simt"
    for capability in ((8, 6), (8, 9), (12, 0)):
        assert select(replace(CONFIG, **FP8), capability).kernel == "decode_mla"
        assert select(replace(CONFIG, head_dim=320, head_dim_v=256), capability).kernel == "decode_mla"
    assert select(replace(CONFIG, v_in_k=False), (9, 0)).kernel == "decode_simt"
