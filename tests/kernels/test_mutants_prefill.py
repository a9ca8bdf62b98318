"""Mutants of prefill_mma and its plan: would the tests notice?

Each mistake names the test that must fail on it.
"""

from __future__ import annotations

from functools import partial

import pytest

from pagedkv.kernels.backend import Backend
from tests.kernels import test_prefill_mma as prefills
from tests.kernels.cases import Case
from tests.mutants.kernels import KernelMutant, assert_killed
from tests.slices import one_in

ragged = partial(prefills.check, case=Case((70, 33), (21, 33), group_size=2, num_kv_heads=1))
long = partial(prefills.check, case=Case((300,), (5,), group_size=2, num_kv_heads=1))
# Head dim 128: the queries stay in shared memory.
wide = partial(prefills.check, case=Case((150,), (7,), 128, group_size=2, num_kv_heads=1))

of_bytes = partial(prefills.check, case=Case((70,), (21,), group_size=2, num_kv_heads=1, **prefills.BYTES))

many_sequences = partial(prefills.test_the_work_list_has_every_row_tile_once_longest_first, num_seqs=1500)

MUTANTS = (
    KernelMutant(
        "a query sees the key after its own",
        "prefill_mma",
        (("if (CAUSAL) end = min(max(position + 1, 0), seq_len);", "if (CAUSAL) end = min(position + 2, seq_len);"),),
        ragged,
    ),
    KernelMutant(
        "a tile counts as seen whole when its last key is not",
        "prefill_mma",
        (("key + num_keys <= all.end;", "key + num_keys <= all.end + 1;"),),
        partial(prefills.check, case=Case((64,), (2,), group_size=1, num_kv_heads=1)),
    ),
    KernelMutant(
        "a tile counts as seen whole when the window has left its first key",
        "prefill_mma",
        (("key >= all.begin &&", "key + 1 >= all.begin &&"),),
        partial(prefills.check, case=Case((130,), (2,), group_size=1, num_kv_heads=1, window=129)),
    ),
    KernelMutant(
        "tiles behind the first rows are skipped by all rows of a warp",
        "prefill_mma",
        (("any = {first.begin, last.end};", "any = {first.begin, first.end};"),),
        partial(prefills.check, case=Case((70,), (30,), group_size=1, num_kv_heads=1)),
    ),
    KernelMutant(
        "what lies behind the last key is copied",
        "prefill_mma",
        (("from + n * kVecElements, c.inside(key))", "from + n * kVecElements, true)"),),
        partial(prefills.check, case=Case((70,), (21,), group_size=2, num_kv_heads=1, block_size=64)),
    ),
    KernelMutant(
        "a tile is overwritten while other warps read it",
        "prefill_mma",
        (("cp_async_wait<STAGES - 2>();\n    __syncthreads();", "cp_async_wait<STAGES - 2>();\n    __syncwarp();"),),
        long,
    ),
    KernelMutant(
        "a tile is read while its copies are under way",
        "prefill_mma",
        (("cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();"),),
        long,
    ),
    KernelMutant(
        "block ids are fetched one tile late",
        "prefill_mma",
        (("copy_ids(i + STAGES - 1, lane, warp);", "copy_ids(i + STAGES, lane, warp);"),),
        long,
    ),
    KernelMutant(
        "a converted tile is read before all threads have converted their part",
        "prefill_mma",
        (("      convert(i);\n      __syncthreads();\n", "      convert(i);\n"),),
        partial(prefills.check, case=Case((70,), (21,), group_size=2, num_kv_heads=1, kv_dtype="bfloat16")),
    ),
    KernelMutant(
        "a row of queries has the divisor of another",
        "prefill_mma",
        (("powers[first_row() + f * 16 + h * 8 + fresh_thread_id() % kWarpSize / 4]", "powers[first_row()]"),),
        prefills.test_each_row_of_queries_has_a_divisor_of_its_own,
    ),
    KernelMutant(
        "the divisor of a row of zeros makes its scale zero",
        "prefill_mma",
        (("fmaxf(largest * 0x1p-12f, 0x1p-60f)", "largest * 0x1p-12f"),),
        prefills.test_each_row_of_queries_has_a_divisor_of_its_own,
    ),
    KernelMutant(
        "dims of queries stand in another order than those of bytes of K",
        "prefill_mma",
        (("kStepsPerLoad == 1 ? 2 * lane + 8 * i : 4 * lane + 2 * i", "2 * lane + 8 * i"),),
        of_bytes,
    ),
    KernelMutant(
        "dims of bytes of V are written where other types have theirs",
        "prefill_mma",
        (("? n / 2 * 16 + lane % 4 * 4 + n % 2 * 2", "? n * 8 + lane % 4 * 2"),),
        of_bytes,
    ),
    KernelMutant(
        "shares beside bytes of V have the queries' type",
        "prefill_mma",
        (("a[i] = pack2<Operand>(", "a[i] = pack2<Q_TYPE>("),),
        of_bytes,
    ),
    KernelMutant(
        "V takes the scales of K in a prefill",
        "prefill_mma",
        (("to + TILE_TOKENS, p.v_scale + from", "to + TILE_TOKENS, p.k_scale + from"),),
        partial(
            prefills.check,
            case=Case((70,), (21,), group_size=2, num_kv_heads=1, kv_dtype="int8", scale_mode="token_head"),
        ),
    ),
    KernelMutant(
        "rows of later row tiles forget where their tile begins",
        "prefill_mma",
        (("kv_head * GROUP_SIZE + (row_begin + row) % GROUP_SIZE", "kv_head * GROUP_SIZE + row % GROUP_SIZE"),),
        partial(prefills.check, case=Case((30,), (11,), group_size=3, num_kv_heads=1), row_tile=16),
    ),
    KernelMutant(
        "what was summed is not rescaled to a larger maximum",
        "prefill_mma",
        (("if (rows.softmax(scores, factor)) rows.rescale(factor);", "rows.softmax(scores, factor);"),),
        long,
    ),
    KernelMutant(
        "the sum is of a quarter of the keys",
        "prefill_mma",
        (("        l[f][h] += __shfl_xor_sync(kFullMask, l[f][h], 2);\n", ""),),
        ragged,
    ),
    KernelMutant(
        "output takes the place of queries that other lanes still read",
        "prefill_mma",
        (("    __syncwarp();  // all lanes have read what lay in the tile\n", ""),),
        wide,
    ),
    KernelMutant(
        "chunks are looked for where they were not put",
        "prefill_mma",
        (("((lane_column ^ swizzle(lane_row)) ^ within) * 16", "((lane_column ^ lane_row % 4) ^ within) * 16"),),
        wide,
    ),
    KernelMutant(
        "the work list counts queries where it should count rows",
        "prefill_plan",
        (("ceil_div(queries_of(p, seq) * p.group_size, p.row_tile);", "ceil_div(queries_of(p, seq), p.row_tile);"),),
        partial(prefills.check, case=Case((30,), (30,), group_size=3, num_kv_heads=1), row_tile=16),
    ),
    KernelMutant(
        "shorter sequences come first",
        "prefill_plan",
        (("~static_cast<u32>(p.seq_lens[seq])", "static_cast<u32>(p.seq_lens[seq])"),),
        partial(prefills.test_the_work_list_has_every_row_tile_once_longest_first, num_seqs=7),
    ),
    KernelMutant(
        "sequences of one length share a rank",
        "prefill_plan",
        (("if (key_of(p, from[middle]) < key)", "if (key_of(p, from[middle]) >> 32 < key >> 32)"),),
        many_sequences,
    ),
    KernelMutant(
        "the order is left in the workspace",
        "prefill_plan",
        (("for (int width = kThreads; width < p.num_seqs; width *= 2) swap(to, spare);", ""),),
        many_sequences,
    ),
    KernelMutant(
        "pairs are compared before their neighbours have been",
        "prefill_plan",
        (("      __syncthreads();\n      const int other", "      const int other"),),
        partial(prefills.test_the_work_list_has_every_row_tile_once_longest_first, num_seqs=70),
    ),
    KernelMutant(
        "a last run of fewer sequences is sorted past its end",
        "prefill_plan",
        (("keys[own] = own < count ? key_of(p, first + own) : ~0ull;",
          "keys[own] = key_of(p, min(first + own, p.num_seqs - 1));"),),
        partial(prefills.test_the_work_list_has_every_row_tile_once_longest_first, num_seqs=7),
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _on_the_interpreter(backend: Backend) -> None:
    """Skips where nothing can be compiled, and on a GPU, where a mutant could do harm."""
    if backend.name != "ptxsim":
        pytest.skip("mutants run on the interpreter only")


@pytest.mark.parametrize("mutant", one_in(8, MUTANTS), ids=str)
def test_the_same_test_passes_without_the_mistake(mutant: KernelMutant, backend: Backend) -> None:
    mutant.check(backend)


@pytest.mark.parametrize("mutant", one_in(8, MUTANTS), ids=str)
def test_the_tests_notice_that(mutant: KernelMutant) -> None:
    from tests.ptxsim.backend import PtxsimBackend

    assert_killed(mutant, PtxsimBackend)
