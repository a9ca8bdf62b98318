"""prefill_wgmma against float64 and against prefill_mma.

Both kernels use the same rows and work list.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import UnsupportedVariant
from pagedkv.kernels import prefill_mma, prefill_wgmma
from pagedkv.kernels.attention import AttentionPlan
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import AttentionConfig, Schedule
from pagedkv.kernels.select import choose
from tests.kernels.cases import Case, Problem, assert_close, problem, run
from tests.mutants.kernels import KernelMutant, assert_killed
from tests.ptxsim import registry
from tests.ptxsim.syntax import Instruction
from tests.slices import one_in

# Nothing, one key, one query at the end of a block, a chunk after a cached prefix, a whole prompt, one across tiles.
MIXED = Case((0, 1, 16, 70, 37, 150), (0, 1, 1, 21, 37, 66), num_kv_heads=1)


@pytest.fixture(autouse=True)
def _on_hopper(backend: Backend) -> None:
    if backend.capability != (9, 0):
        pytest.skip("prefill_wgmma needs compute capability 9.0")


def prefill(backend: Backend, given: Problem, schedule: Schedule = "listed") -> tuple[np.ndarray, np.ndarray]:
    return run(backend, given, prefill_wgmma.tiling(given.case.config), schedule)


def check(backend: Backend, case: Case, schedule: Schedule = "listed") -> None:
    given = problem(case)
    assert_close(given, *prefill(backend, given, schedule))


@pytest.mark.parametrize("dtype", one_in(2, ["float16", "bfloat16"]))
@pytest.mark.parametrize("head_dim", one_in(2, [128, 64]))
def test_a_mixed_batch_is_right(backend: Backend, head_dim: int, dtype: str) -> None:
    check(backend, replace(MIXED, head_dim=head_dim, q_dtype=dtype, kv_dtype=dtype))


@pytest.mark.parametrize(("group_size", "block_size"), one_in(4, map(pytest.param, (7, 1, 8, 1), (24, 64, 256, 8))))
def test_groups_and_block_sizes(backend: Backend, group_size: int, block_size: int) -> None:
    check(backend, Case((150, 7), (75, 7), group_size=group_size, block_size=block_size, num_kv_heads=1))


def test_a_long_sequence_passes_the_ring_many_times(backend: Backend) -> None:
    check(backend, Case((700,), (50,), head_dim=128, num_kv_heads=1))


def test_lengths_around_the_edges_of_tiles(backend: Backend) -> None:
    check(backend, Case((63, 64, 65, 127, 128, 129), (1, 64, 33, 63, 128, 129), group_size=1, num_kv_heads=1))


@pytest.mark.slow
def test_tiles_that_only_one_of_the_warpgroups_sees(backend: Backend) -> None:
    check(backend, Case((300, 266), (128, 128), group_size=1, num_kv_heads=1))


def test_heads_before_tokens(backend: Backend) -> None:
    check(backend, Case((70, 30), (20, 30), layout="HND"))


@pytest.mark.parametrize("scale", one_in(2, [-0.2, 0.0]))
def test_a_softmax_scale_that_is_not_positive(backend: Backend, scale: float) -> None:
    check(backend, Case((150,), (20,), num_kv_heads=1, softmax_scale=scale))


def test_queries_before_the_first_key_see_nothing(backend: Backend) -> None:
    check(backend, Case((3, 0), (9, 4), num_kv_heads=1))


def test_one_row_tile_per_cta_without_a_list(backend: Backend) -> None:
    check(backend, Case((150, 7), (75, 7), num_kv_heads=1), "whole")


@pytest.mark.slow
def test_chunks_give_what_one_call_gives(backend: Backend) -> None:
    length, ends = 200, (30, 128, 200)
    whole = problem(Case((length,), (length,), num_kv_heads=1))
    o, lse = prefill(backend, whole)
    for begin, end in pairwise((0, *ends)):
        chunk = replace(whole, case=replace(whole.case, seq_lens=(end,), q_lens=(end - begin,)), q=whole.q[begin:end])
        chunk.batch = replace(
            whole.batch, seq_lens=np.array([end], np.int32), q_indptr=np.array([0, end - begin], np.int32)
        )
        part, part_lse = prefill(backend, chunk)
        assert np.abs(part - o[begin:end]).max() <= 1e-3
        assert np.abs(part_lse - lse[begin:end]).max() <= 1e-3


@pytest.mark.slow
def test_the_same_plan_takes_other_lengths(backend: Backend) -> None:
    first, second = (
        problem(Case(lens, q_lens, num_kv_heads=1)) for lens, q_lens in (((150, 40), (50, 3)), ((20, 75), (4, 49)))
    )
    config = first.case.config
    plan = AttentionPlan(
        backend, config, prefill_wgmma.tiling(config), "listed", num_kv_heads=1, max_sequences=2, max_tokens=53
    )
    for given in (first, second, first):
        assert_close(given, *run(backend, given, plan=plan))


def test_the_same_inputs_give_the_same_bits(backend: Backend) -> None:
    given = problem(MIXED)
    for first, second in zip(prefill(backend, given), prefill(backend, given), strict=True):
        assert np.array_equal(first, second)


@pytest.mark.slow
def test_it_agrees_with_prefill_mma(backend: Backend) -> None:
    given = problem(Case((150, 90), (66, 20), num_kv_heads=1))
    others = run(backend, given, prefill_mma.tiling(given.case.config), "listed")
    for first, second in zip(prefill(backend, given), others, strict=True):
        assert np.abs(first - second).max() <= 1e-3


def test_the_next_queries_and_tiles_are_asked_for_before_an_output_is_written(backend: Backend) -> None:
    """One CTA has two segments of three key tiles; the trace says in which order it asks."""
    if backend.name != "ptxsim":
        pytest.skip("the interpreter's trace")
    given = problem(Case((300,), (60,), num_kv_heads=1))
    config = given.case.config
    plan = AttentionPlan(
        backend, config, prefill_wgmma.tiling(config), "listed", num_kv_heads=1, max_sequences=1, max_tokens=60
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.division, "grid", lambda *_: (1, 1, 1))
        trace = traced(patch)
        assert_close(given, *run(backend, given, plan=plan))
    written = [at for at, (kind, _, _) in enumerate(trace) if kind == "output"]
    first = next(at for at in written if lanes_of(trace[: at + 1], "output") == (240 - 128) * 8)
    assert lanes_of(trace, "output") == 240 * 8
    assert lanes_of(trace, "queries") == 2 * 128 * 8
    assert lanes_of(trace[:first], "queries") == 2 * 128 * 8, "the next queries are asked for too late"
    assert lanes_of(trace, "tiles") == 2 * 6 * 128 // 16
    assert lanes_of(trace[:first], "tiles") > 6 * 128 // 16, "the next tiles are asked for too late"


def test_one_cta_computes_segments_with_and_without_keys(backend: Backend) -> None:
    given = problem(Case((150, 0, 0, 0), (20, 30, 30, 30), num_kv_heads=1))
    config = given.case.config
    plan = AttentionPlan(
        backend, config, prefill_wgmma.tiling(config), "listed", num_kv_heads=1, max_sequences=4, max_tokens=110
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.division, "grid", lambda *_: (1, 1, 1))
        assert_close(given, *run(backend, given, plan=plan))


def test_the_warpgroups_take_turns_at_starting_products(backend: Backend) -> None:
    if backend.name != "ptxsim":
        pytest.skip("the interpreter's trace")
    given = problem(Case((300,), (32,), num_kv_heads=1, causal=False))
    with pytest.MonkeyPatch.context() as patch:
        trace = traced(patch)
        assert_close(given, *prefill(backend, given))
    started = [first // 128 for kind, _, first in trace if kind == "product"]
    keys, both = 64 // 16, 64 // 16 + 128 // 16  # products of K of the first tile; of K and of V before it
    assert started[: 2 * keys + 4 * both] == [0] * keys + [1] * keys + ([0] * both + [1] * both) * 2


def traced(patch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Fill a list with kind, number of lanes and first lane of some steps.

    Steps that ask for queries or tiles, start a product or write output.
    """
    found: list[tuple[str, int, int]] = []

    def noting(binder: registry.Binder) -> registry.Binder:
        def bind(ins: Instruction, machine: Any) -> registry.Step:
            step = binder(ins, machine)
            kind = ""
            if ins.opcode == "cp" and ins.has("shared::cluster"):
                kind = "tiles"
            elif ins.opcode == "cp" and ins.has("cg"):
                kind = "queries"
            elif ins.opcode == "st" and ins.has("v4") and not ins.has("shared"):
                kind = "output"
            elif ins.opcode == "wgmma" and ins.has("mma_async"):
                kind = "product"
            if not kind:
                return step

            def noted(active: Any) -> None:
                found.append((kind, active.count, int(active.index[0])))
                step(active)

            return noted

        return bind

    for name in ("cp", "st", "wgmma"):
        patch.setitem(registry._BINDERS, name, noting(registry._BINDERS[name]))
    return found


def lanes_of(trace: list[tuple[str, int, int]], kind: str) -> int:
    return sum(lanes for what, lanes, _ in trace if what == kind)


@pytest.mark.parametrize(
    ("change", "capability", "named"),
    [
        ({}, (8, 9), r"8\.9"),
        ({}, (10, 0), r"10\.0"),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, (9, 0), "q_dtype float32"),
        ({"kv_dtype": "bfloat16"}, (9, 0), "kv_dtype bfloat16"),
        ({"kv_dtype": "int8", "scale_mode": "head"}, (9, 0), "kv_dtype int8"),
        ({"scale_mode": "tensor"}, (9, 0), "scale_mode 'tensor'"),
        ({"head_dim": 96}, (9, 0), "head_dim 96"),
        ({"head_dim_v": 128}, (9, 0), "head_dim_v 128"),
        ({"window": True}, (9, 0), "window"),
        ({"soft_cap": True}, (9, 0), "soft_cap"),
        ({"alibi": True}, (9, 0), "alibi"),
        ({"sinks": True}, (9, 0), "sinks"),
        ({"mask": True}, (9, 0), "mask"),
        ({"block_size": 0}, (9, 0), "block_size 0"),
        ({"block_size": 20}, (9, 0), "block_size 20"),
        ({"kv_alignment": 8}, (9, 0), "kv_alignment 8"),
    ],
)
def test_what_it_cannot_take_is_named(change: dict[str, Any], capability: tuple[int, int], named: str) -> None:
    config = replace(AttentionConfig(64, 64, 4), **change)
    with pytest.raises(UnsupportedVariant, match=f"prefill_wgmma: .*{named}"):
        choose(config, capability, "prefill_wgmma")


def test_it_is_chosen_by_name_alone() -> None:
    config = AttentionConfig(128, 128, 4, "bfloat16", "bfloat16")
    assert choose(config, (9, 0), "prefill_wgmma", max_q_len=512).name == "prefill_wgmma"
    assert choose(config, (9, 0), max_q_len=512).name == "prefill_mma"


ragged = partial(check, case=Case((131,), (40,), num_kv_heads=1))
long = partial(check, case=Case((520,), (30,), num_kv_heads=1))
MUTANTS = (
    KernelMutant(
        "what lies behind the last key keeps its place in V",
        "prefill_wgmma",
        (("if (i == tiles - 1 && s.end % BOX_TOKENS) zero_behind(v, s.end - first_key - i * TILE_TOKENS);", ""),),
        ragged,
    ),
    KernelMutant(
        "wgmma reads V before it is told of the zeros",
        "prefill_wgmma",
        (("uint4{};\n  async_proxy_fence();", "uint4{};"),),
        ragged,
    ),
    KernelMutant(
        "wgmma reads the queries before it is told of them",
        "prefill_wgmma",
        (("  async_proxy_fence();\n  named_barrier(2 + group,", "  named_barrier(2 + group,"),),
        ragged,
    ),
    KernelMutant(
        "queries are written over an output on which other warps still work",
        "prefill_wgmma",
        (("  async_proxy_fence();\n  named_barrier(2 + group, kWarpgroup);", "  async_proxy_fence();"),),
        test_one_cta_computes_segments_with_and_without_keys,
    ),
    KernelMutant(
        "a buffer of V is free while its product is under way",
        "prefill_wgmma",
        ((
            "end_values();\n      ring.free(passed + 2 * i - 1);",
            "ring.free(passed + 2 * i - 1);\n      end_values();",
        ),),
        long,
    ),
    KernelMutant(
        "scores are read while their product is under way",
        "prefill_wgmma",
        (("wgmma_wait<1>();", "wgmma_wait<2>();"),),
        long,
    ),
    KernelMutant(
        "a warpgroup does not rescale its sums to a larger maximum",
        "prefill_wgmma",
        (("if (raised) rows.rescale(factor);", ""),),
        long,
    ),
    KernelMutant(
        "the next queries are asked for when the output is written",
        "prefill_wgmma",
        (
            ("    if (more) start_queries(p, next,", "    if (more && !threadIdx.x) start_queries(p, next,"),
            (
                "    s = next;\n",
                "    s = next;\n"
                "    u8* const place = dynamic_shared + (turn + 1) % 2 * kQueryBytes + group * QLayout::kBytes;\n"
                "    if (more && threadIdx.x) start_queries(p, s, group, place);\n",
            ),
        ),
        test_the_next_queries_and_tiles_are_asked_for_before_an_output_is_written,
    ),
    KernelMutant(
        "the warpgroups take no turns",
        "prefill_wgmma",
        (("take() const { named_barrier(4 + group, COMPUTE_THREADS); }", "take() const {}"),),
        test_the_warpgroups_take_turns_at_starting_products,
    ),
    KernelMutant(
        "a warpgroup that does not see a tile does not pass its turn on",
        "prefill_wgmma",
        (("++i) {\n    turns.take();\n    turns.pass();\n", "++i) {\n    turns.take();\n"),),
        partial(check, case=Case((520,), (30,), group_size=1, num_kv_heads=1)),
    ),
    KernelMutant(
        "there is no first turn",
        "prefill_wgmma",
        (("  if (group == 1) Turns{group}.pass();  // the first turn is the other's\n", ""),),
        ragged,
    ),
    KernelMutant(
        "a warpgroup that does not see a tile does not free it",
        "prefill_wgmma",
        (("    ring.wait(passed + 2 * i);\n    ring.free(passed + 2 * i);\n", ""),),
        partial(check, case=Case((520,), (30,), group_size=1, num_kv_heads=1)),
    ),
)  # fmt: skip


@pytest.mark.parametrize("mutant", one_in(8, MUTANTS), ids=str)
def test_the_tests_notice_that(mutant: KernelMutant) -> None:
    from tests.ptxsim.backend import PtxsimBackend

    assert_killed(mutant, PtxsimBackend)
