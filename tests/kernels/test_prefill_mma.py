"""prefill_mma and its work list against float64.

Shapes, types, variants, layouts of prefill, chunks and mixed batches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument, UnsupportedVariant
from pagedkv.kernels import prefill_mma
from pagedkv.kernels.attention import AttentionPlan, Batch
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.select import choose
from tests.kernels.cases import Case, Problem, assert_close, assert_rows_close, contiguous, far_away, problem, run
from tests.ptxsim.backend import PtxsimBackend
from tests.ptxsim.errors import PtxsimError
from tests.slices import one_in

# Nothing, one key, one query at the end of a block, a chunk after a cached prefix, a whole prompt, many tiles.
MIXED = Case((0, 1, 16, 70, 37, 129), (0, 1, 1, 21, 37, 66))
SMALL = Case((70, 5, 33), (21, 1, 33), group_size=2, num_kv_heads=1)


def prefill(backend: Backend, given: Problem, row_tile: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    return run(backend, given, prefill_mma.tiling(given.case.config, row_tile=row_tile), "listed")


def check(backend: Backend, case: Case, row_tile: int | None = None) -> None:
    given = problem(case)
    assert_close(given, *prefill(backend, given, row_tile))


@pytest.mark.parametrize("row_tile", one_in(4, [128, 64, 32, 16]))
def test_a_mixed_batch_is_right_with_every_row_tile(backend: Backend, row_tile: int) -> None:
    check(backend, MIXED, row_tile)


@pytest.mark.parametrize("head_dim", one_in(2, [128, 64]))
def test_bfloat16(backend: Backend, head_dim: int) -> None:
    check(backend, replace(SMALL, q_dtype="bfloat16", kv_dtype="bfloat16", head_dim=head_dim))


HEAD_DIMS, GROUP_SIZES = (64, 64, 80, 96, 128, 128, 256, 256), (8, 1, 2, 3, 7, 4, 8, 1)
BLOCK_SIZES = (64, 1, 16, 8, 1, 16, 8, 64)


@pytest.mark.parametrize(
    ("head_dim", "group_size", "block_size"),
    one_in(3, map(pytest.param, HEAD_DIMS, GROUP_SIZES, BLOCK_SIZES)),
)
def test_head_dims_groups_and_block_sizes(backend: Backend, head_dim: int, group_size: int, block_size: int) -> None:
    case = Case((90, 7), (40, 7), head_dim, group_size=group_size, block_size=block_size, num_kv_heads=1)
    check(backend, case)


@pytest.mark.parametrize("block_size", one_in(2, [3, 24, 256]))
def test_block_sizes_that_are_no_powers_of_two_and_the_largest(backend: Backend, block_size: int) -> None:
    check(backend, Case((70, 33), (20, 33), block_size=block_size, num_kv_heads=1))


def test_v_may_have_another_head_dim_than_k(backend: Backend) -> None:
    check(backend, Case((70,), (20,), 64, head_dim_v=128, num_kv_heads=1))
    check(backend, Case((70,), (20,), 96, head_dim_v=48, num_kv_heads=1))


def test_lengths_around_the_edges_of_tiles(backend: Backend) -> None:
    lens = (63, 64, 65, 127, 128, 129)
    check(backend, Case(lens, lens, group_size=1, num_kv_heads=1))
    check(backend, Case(lens, (1, 31, 32, 33, 63, 64), group_size=2, num_kv_heads=1))


@pytest.mark.parametrize(
    "variant",
    one_in(4, [
        {"causal": False},
        {"window": 20},
        {"window": 100},
        {"causal": False, "window": 20},
        {"soft_cap": 2.0},
        {"alibi": True},
        {"sinks": True},
        {"mask": True},
        {"window": 50, "soft_cap": 3.0, "alibi": True, "sinks": True, "mask": True},
    ]),
    ids=str,
)
def test_every_variant(backend: Backend, variant: dict[str, object]) -> None:
    check(backend, replace(SMALL, **variant))


def test_blocks_that_a_window_left_behind_are_not_looked_up(backend: Backend) -> None:
    given = problem(Case((150, 90), (20, 9), window=30, block_size=8))
    given.batch.block_tables[0, : (150 - 20 + 1 - 30) // 8] = -1
    given.batch.block_tables[1, : (90 - 9 + 1 - 30) // 8] = -1
    assert_close(given, *prefill(backend, given))


@pytest.mark.parametrize("layout", one_in(2, ["HND", "NHD"]))
@pytest.mark.parametrize("block_size", one_in(2, [16, 0]))
def test_layouts_and_contiguous_kv(backend: Backend, layout: str, block_size: int) -> None:
    check(backend, replace(MIXED, layout=layout, block_size=block_size))


@pytest.mark.parametrize(
    ("kv_dtype", "scale_mode", "q_dtype"),
    one_in(2, [
        pytest.param("float8_e4m3", "tensor", "bfloat16"),
        pytest.param("float8_e5m2", "head", "float16"),
        pytest.param("int8", "token_head", "bfloat16"),
        pytest.param("float8_e4m3", "token_head", "float16"),
        pytest.param("bfloat16", "none", "float16"),
    ]),
)
def test_kv_of_another_type_than_q(backend: Backend, kv_dtype: str, scale_mode: str, q_dtype: str) -> None:
    check(backend, replace(SMALL, kv_dtype=kv_dtype, q_dtype=q_dtype, scale_mode=scale_mode))


BYTES = {"kv_dtype": "float8_e4m3", "scale_mode": "tensor", "q_dtype": "bfloat16"}


@pytest.mark.parametrize("scale_mode", one_in(3, ["tensor", "token_head", "head"]))
def test_e4m3_on_a_gpu_that_has_no_instruction_for_it(backend: Backend, scale_mode: str) -> None:
    """Before sm_89 the compiler converts it by some twenty others."""
    if not isinstance(backend, PtxsimBackend):
        pytest.skip("the interpreter stands for every device")
    quantised: dict[str, Any] = {"q_dtype": "bfloat16", "kv_dtype": "float8_e4m3", "scale_mode": scale_mode}
    check(PtxsimBackend((8, 0)), Case((150, 33), (40, 5), num_kv_heads=1, **quantised))


@pytest.mark.parametrize("size", one_in(2, [2.0**60, 2.0**-60]))
def test_queries_that_f16_does_not_reach_beside_bytes(backend: Backend, size: float) -> None:
    case = Case((70,), (9,), num_kv_heads=1, q_size=size, softmax_scale=0.125 / size, **BYTES)
    given = problem(case)
    assert_rows_close(given, *prefill(backend, given), bound=1e-2)


def test_each_row_of_queries_has_a_divisor_of_its_own(backend: Backend) -> None:
    """A row of zeros and one that is not finite leave the others exact."""
    given = problem(Case((70,), (9,), num_kv_heads=1, **BYTES))
    given.q[3, 1], given.q[4, 2, 5] = 0, np.inf
    o, lse = prefill(backend, given)
    assert np.isnan(o[4, 2]).any()
    assert np.isfinite(o[3, 1]).all()
    o[3, 1], o[4, 2], lse[3, 1], lse[4, 2] = given.o[3, 1], given.o[4, 2], given.lse[3, 1], given.lse[4, 2]
    assert_close(given, o, lse)


@pytest.mark.parametrize("kv_dtype", one_in(2, ["float8_e4m3", "float8_e5m2", "int8"]))
def test_every_stored_byte_is_the_number_that_it_stands_for(backend: Backend, kv_dtype: str) -> None:
    """The first query sees one key: its share is 1, and the output is V to the bit."""
    given = problem(
        Case((1,), (1,), head_dim=256, group_size=1, num_kv_heads=1, kv_dtype=kv_dtype, scale_mode="tensor")
    )
    stored = given.v.view(given.v.whole)
    every = np.arange(256, dtype=np.uint8).view(stored.dtype)
    number = np.where(np.isfinite(every.astype(np.float32)), every.astype(np.float32), 0)
    stored[given.batch.block_tables[0, 0], 0, 0] = number.astype(stored.dtype)
    given.v_scale[:] = 1
    assert np.array_equal(prefill(backend, given)[0][0, 0], number.astype(np.float64))


@pytest.mark.slow
@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 16), (48, 80), (80, 48), (96, 128), (128, 128), (256, 176)])
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "float8_e5m2", "int8"])
def test_bytes_of_every_head_dim(
    backend: Backend, kv_dtype: str, q_dtype: str, head_dim: int, head_dim_v: int, shaped: bool
) -> None:
    case = Case(
        (200, 31), (40, 3), head_dim, head_dim_v, q_dtype=q_dtype, kv_dtype=kv_dtype,
        scale_mode="head" if shaped else "tensor", alibi=shaped, soft_cap=8.0 if shaped else 0.0,
    )  # fmt: skip
    for row_tile in (None, 16, 128):
        check(backend, case, row_tile if head_dim <= 128 or row_tile != 128 else None)


@pytest.mark.parametrize("scale", one_in(2, [-0.2, 0.0]))
def test_a_softmax_scale_that_is_not_positive(backend: Backend, scale: float) -> None:
    check(backend, replace(SMALL, softmax_scale=scale))


BLIND = Case((3, 0), (9, 4))


@pytest.mark.parametrize("case", [BLIND, replace(BLIND, **BYTES)], ids=str)
def test_queries_before_the_first_key_see_nothing(backend: Backend, case: Case) -> None:
    check(backend, case)


def test_chunks_give_what_one_call_gives(backend: Backend) -> None:
    length, ends = 100, (30, 64, 100)
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
        problem(Case(lens, q_lens, num_kv_heads=1)) for lens, q_lens in (((90, 40), (50, 3)), ((20, 75), (4, 49)))
    )
    config = first.case.config
    plan = AttentionPlan(
        backend, config, prefill_mma.tiling(config), "listed", num_kv_heads=1, max_sequences=2, max_tokens=53
    )
    for given in (first, second, first):
        assert_close(given, *run(backend, given, plan=plan))


def test_the_same_inputs_give_the_same_bits(backend: Backend) -> None:
    given = problem(MIXED)
    for first, second in zip(prefill(backend, given), prefill(backend, given)):
        assert np.array_equal(first, second)


@pytest.mark.slow
def test_paged_equals_contiguous(backend: Backend) -> None:
    paged = problem(replace(MIXED, q_dtype="bfloat16", kv_dtype="bfloat16"))
    for one, other in zip(prefill(backend, paged), prefill(backend, contiguous(paged))):
        finite = np.isfinite(one)
        assert np.array_equal(finite, np.isfinite(other))
        assert np.abs(one[finite] - other[finite]).max() <= 1e-3


@pytest.mark.slow
def test_blocks_past_2_to_the_31_elements_are_reached(backend: Backend) -> None:
    given = problem(Case((40,), (9,), num_kv_heads=1, block_size=8, kv_dtype="int8", scale_mode="tensor"))
    assert_close(given, *prefill(backend, far_away(backend, given)))


def test_a_block_id_outside_the_pool_traps_where_ids_are_checked(backend: Backend) -> None:
    if backend.name != "ptxsim":
        pytest.skip("a trap ends the GPU's context")
    given = problem(SMALL)
    config = replace(given.case.config, debug=True)
    plan = AttentionPlan(
        backend, config, prefill_mma.tiling(config), "listed", num_kv_heads=1, max_sequences=3, max_tokens=55
    )
    assert_close(given, *run(backend, given, plan=plan))
    given.batch.block_tables[0, 2] = len(given.k.whole)
    with pytest.raises(PtxsimError, match="trap"):
        run(backend, given, plan=plan)


@pytest.mark.parametrize("num_seqs", one_in(2, [1, 2, 7, 1024, 1025, 1500, 4200]))
def test_the_work_list_has_every_row_tile_once_longest_first(backend: Backend, num_seqs: int) -> None:
    rng = np.random.default_rng(num_seqs)
    lens = rng.integers(0, 900, num_seqs).astype(np.int32)
    q_lens = np.minimum(rng.integers(0, 40, num_seqs), lens)
    indptr = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    config = AttentionConfig(64, 64, 4)
    tiling = prefill_mma.tiling(config, row_tile=32)
    tokens = int(indptr[-1])
    plan = AttentionPlan(
        backend, config, tiling, "listed", num_kv_heads=1, max_sequences=num_seqs, max_tokens=tokens + 3
    )
    plan.update(Batch(backend.asarray(lens), q_indptr=backend.asarray(indptr)))
    count = int(backend.to_host(plan.division.arrays["num_items"])[0])
    found = backend.to_host(plan.division.arrays["work_list"])
    order = np.lexsort((np.arange(num_seqs), -lens))
    tiles = -(-q_lens * 4 // 32)
    expected = [(seq, tile) for seq in order for tile in range(tiles[seq] - 1, -1, -1)]
    assert len(found) >= (tokens + 3) * 4 // 32 + num_seqs
    assert found[:count, :2].tolist() == [list(map(int, item)) for item in expected]


def test_a_batch_larger_than_the_plan_is_refused(backend: Backend) -> None:
    given = problem(Case((20, 20), (20, 20), num_kv_heads=1))
    config = given.case.config
    plan = AttentionPlan(
        backend, config, prefill_mma.tiling(config), "listed", num_kv_heads=1, max_sequences=2, max_tokens=39
    )
    with pytest.raises(InvalidArgument, match="40 queries, but the plan was made for 2 with 39"):
        run(backend, given, plan=plan)


@pytest.mark.parametrize(
    ("change", "capability", "named"),
    [
        ({}, (7, 5), r"the device has 7\.5"),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, (9, 0), "q_dtype float32"),
        ({"kv_dtype": "float32"}, (9, 0), "kv_dtype float32"),
        ({"head_dim": 72}, (9, 0), "head_dim 72"),
        ({"head_dim_v": 512}, (9, 0), "head_dim_v 512"),
        ({"kv_alignment": 8}, (9, 0), "kv_alignment 8"),
    ],
)
def test_what_it_cannot_take_is_named(change: dict[str, Any], capability: tuple[int, int], named: str) -> None:
    config = replace(AttentionConfig(64, 64, 4), **change)
    with pytest.raises(UnsupportedVariant, match=f"prefill_mma: .*{named}"):
        choose(config, capability, "prefill_mma")


@pytest.mark.parametrize("soft_cap", [False, True])
@pytest.mark.parametrize("max_q_len", [1, 16, 4096])
def test_a_cta_has_the_shared_memory_of_every_device_beside_its_own(max_q_len: int, soft_cap: bool) -> None:
    kinds = [("bfloat16", "none")]
    kinds += [(kv, mode) for kv in ("int8", "float8_e4m3") for mode in ("tensor", "token_head")]
    for dim, (kv, mode) in product(range(16, 257, 16), kinds):
        config = AttentionConfig(dim, dim, 4, "bfloat16", kv, scale_mode=mode, soft_cap=soft_cap)  # type: ignore[arg-type]
        tiling = prefill_mma.tiling(config, max_q_len)
        own = 8 * tiling.row_tile + 1  # the rows' largest scores and sums when parts are merged (finish.cuh)
        assert tiling.shared_bytes + -(-own // 1024) * 1024 <= 99 << 10, config
