"""decode_mla_wgmma against float64: latents under many query heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pagedkv.errors import UnsupportedVariant
from pagedkv.kernels import decode_mla_wgmma
from pagedkv.kernels.attention import AttentionPlan
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import AttentionConfig, Schedule
from pagedkv.kernels.select import candidates, choose
from tests.kernels.cases import Case, assert_close, problem, run
from tests.mutants.kernels import KernelMutant, assert_killed

PLAIN = Case((70,), group_size=64, head_dim=576, head_dim_v=512, num_kv_heads=1, v_in_k=True)
SMALL = replace(PLAIN, head_dim=320, head_dim_v=256)
CONFIG = AttentionConfig(576, 512, 128, "bfloat16", "bfloat16", v_in_k=True)


@pytest.fixture(autouse=True)
def _on_hopper(backend: Backend) -> None:
    if backend.capability != (9, 0):
        pytest.skip("decode_mla_wgmma needs compute capability 9.0")


def check(backend: Backend, case: Case, schedule: Schedule = "even") -> None:
    given = problem(case)
    assert_close(given, *run(backend, given, decode_mla_wgmma.tiling(case.config), schedule))


@pytest.mark.parametrize("group_size", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_all_heads_of_a_model_are_right(backend: Backend, group_size: int) -> None:
    check(backend, replace(PLAIN, group_size=group_size, q_dtype="bfloat16", kv_dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["whole", "partitioned", "even"])
def test_a_ragged_batch_is_right_with_every_schedule(backend: Backend, schedule: Schedule) -> None:
    check(backend, replace(PLAIN, seq_lens=(0, 1, 63, 64, 65, 300)), schedule)


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [1, 2, 7])
def test_any_number_of_multiprocessors_gives_the_same(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, num_sms: int
) -> None:
    monkeypatch.setattr(backend, "num_sms", num_sms)
    check(backend, replace(SMALL, seq_lens=(400, 1, 130), group_size=128))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 24, 64, 128])
def test_block_sizes(backend: Backend, block_size: int) -> None:
    check(backend, replace(SMALL, block_size=block_size, seq_lens=(150,), group_size=33))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        replace(SMALL, seq_lens=(300,), window=70),
        replace(SMALL, seq_lens=(70, 1), q_lens=(5, 1), causal=False),
        replace(SMALL, seq_lens=(200, 9), q_lens=(3, 2), soft_cap=5.0, sinks=True, mask=True, alibi=True),
        replace(PLAIN, head_dim=512, layout="HND"),
    ],
    ids=str,
)
def test_variants(backend: Backend, case: Case) -> None:
    check(backend, case)


@pytest.mark.slow
def test_a_plan_takes_other_lengths_after_update(backend: Backend) -> None:
    problems = [problem(replace(SMALL, seq_lens=lens)) for lens in ((200, 5, 77), (1, 250, 0), (200, 5, 77))]
    config = problems[0].case.config
    plan = AttentionPlan(backend, config, decode_mla_wgmma.tiling(config), "even", num_kv_heads=1, max_sequences=3)
    for given in problems:
        assert_close(given, *run(backend, given, plan=plan))


@pytest.mark.parametrize(
    ("change", "capability", "named"),
    [
        ({}, (10, 0), r"10\.0: 9\.0 only"),
        ({"group_size": 32}, (9, 0), "32 query heads per KV head: more than 32"),
        ({"v_in_k": False}, (9, 0), "v_in_k"),
        ({"kv_dtype": "float8_e4m3", "scale_mode": "tensor"}, (9, 0), "kv_dtype 'float8_e4m3'"),
        ({"head_dim": 544}, (9, 0), "head_dim 544"),
        ({"block_size": 12}, (9, 0), "block_size 12"),
    ],
)
def test_what_it_cannot_take_is_named(change: dict[str, Any], capability: tuple[int, int], named: str) -> None:
    with pytest.raises(UnsupportedVariant, match=f"decode_mla_wgmma: .*{named}"):
        choose(replace(CONFIG, **change), capability, "decode_mla_wgmma")


def test_it_is_tried_beside_decode_mla_and_else_chosen_by_name_alone(backend: Backend) -> None:
    assert [kernel.name for kernel in candidates(backend, CONFIG, 1)] == ["decode_mla", "decode_mla_wgmma"]
    assert choose(CONFIG, (9, 0)).name == "decode_mla"


one_cta = partial(check, case=replace(SMALL, seq_lens=(150, 70)), schedule="whole")
MUTANTS = (
    KernelMutant(
        "keys outside the segment keep their place in a tile",
        "decode_mla_wgmma",
        (("if (key < s.begin || key >= s.end) *rein", "if (false) *rein"),),
        one_cta,
    ),
    KernelMutant(
        "wgmma reads a tile before it is told of the zeros",
        "decode_mla_wgmma",
        (("uint4{};\n  }\n  async_proxy_fence();", "uint4{};\n  }"),),
        one_cta,
    ),
    KernelMutant(
        "wgmma reads a query's heads before it is told of them",
        "decode_mla_wgmma",
        (("  cp_async_wait<0>();\n  async_proxy_fence();", "  cp_async_wait<0>();"),),
        one_cta,
    ),
    KernelMutant(
        "a warpgroup's maxima are its own keys' alone",
        "decode_mla_wgmma",
        (("shared.largest[group ^ 1][first", "shared.largest[group][first"),),
        one_cta,
    ),
    KernelMutant(
        "shares are read before all are written",
        "decode_mla_wgmma",
        (("o[part][n][i] *= factor[i / 2];\n    }\n    sync_computing();", "o[part][n][i] *= factor[i / 2];\n    }"),),
        one_cta,
    ),
    KernelMutant(
        "many heads' output is not rescaled",
        "decode_mla_wgmma",
        (("o[part][n][i] *= factor[i / 2];", "o[part][n][i] *= 1.f;"),),
        one_cta,
    ),
    KernelMutant(
        "a tile is free while its product is under way",
        "decode_mla_wgmma",
        (
            ("    rows.add_values(shared, tile, group);\n    __syncwarp();\n", ""),
            ("(lane_id() == 0) mbarrier_arrive(shared.empty + stage);\n",
             "(lane_id() == 0) mbarrier_arrive(shared.empty + stage);\n    rows.add_values(shared, tile, group);\n"),
        ),
        partial(check, case=replace(SMALL, seq_lens=(400,)), schedule="whole"),
    ),
    KernelMutant(
        "a sum lacks the other warpgroup's keys",
        "decode_mla_wgmma",
        (("shared.sums[0][row] + shared.sums[1][row]", "shared.sums[group][row]"),),
        one_cta,
    ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_the_tests_notice_that(mutant: KernelMutant) -> None:
    from tests.ptxsim.backend import PtxsimBackend

    assert_killed(mutant, PtxsimBackend)
