"""Mutants of the decode kernels: would the tests notice?

Each mistake names the test that must fail on it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pagedkv.kernels.backend import Backend
from tests.kernels import test_compile as compiling
from tests.kernels import test_decode_mla as mla
from tests.kernels import test_decode_mma as mma
from tests.kernels import test_decode_simt as simt
from tests.kernels import test_decode_tma as tma
from tests.kernels import test_schedule as schedule
from tests.kernels.cases import Case
from tests.mutants.kernels import KernelMutant, assert_killed
from tests.slices import one_in


def few_ctas(backend: Backend) -> None:
    """Row tiles that begin and end within CTAs.

    Every CTA has the end of one and the beginning of another.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "num_sms", 1)
        mma.check(backend, Case((64, 384, 704), num_kv_heads=1))


def one_slice(backend: Backend) -> None:
    """Fewer tiles than two slices need stay with one CTA."""
    with pytest.MonkeyPatch.context() as patch:
        schedule.test_the_kernels_segments_are_those_of_the_oracle(backend, patch, (200,), (1,), 0, 1, 4)


def short_rows(backend: Backend) -> None:
    """Copies of rows of 64 bytes, in machine code: the interpreter has no L2."""
    compiling.test_copies_of_a_heads_row_do_not_fetch_the_next_heads(compiling.Farm(), 64, "LTC64B")


ragged = partial(mma.check, case=Case((15, 170), num_kv_heads=1))
chunk = partial(mma.check, case=Case((17, 70), (3, 5), num_kv_heads=1), max_q_len=5)
window = partial(mma.check, case=Case((170,), window=20, num_kv_heads=1))
many_tiles = partial(mma.check, case=Case((300,), block_size=8, num_kv_heads=1), schedule="whole")
token_scales = partial(
    mma.check, case=Case((17, 70), kv_dtype="int8", scale_mode="token_head", num_kv_heads=1, q_dtype="bfloat16")
)
head_scales = partial(mma.check, case=Case((17, 70), kv_dtype="float8_e4m3", scale_mode="head"))
small_scales, falling_scales, large_queries = (
    partial(
        mma.test_sizes_beyond_those_of_f16, case=Case((200, 300), q_dtype="bfloat16", kv_dtype="float8_e4m3", **sizes)
    )
    for sizes in (
        {"v_size": 2.0**-30, "scale_mode": "token_head"},
        {"v_spread": 40, "softmax_scale": 30.0, "scale_mode": "token_head"},
        {"q_size": 2.0**60, "softmax_scale": 2.0**-63, "scale_mode": "tensor"},
    )
)
latents = partial(mla.check, case=replace(mla.PLAIN, seq_lens=(33, 150)), schedule="whole")
wide_latents = partial(
    mla.check, case=replace(mla.PLAIN, kv_dtype="float8_e4m3", scale_mode="tensor", q_dtype="bfloat16")
)
far_blocks = partial(mma.test_blocks_past_2_to_the_31_elements_are_reached, block_size=16)
tma_ragged = partial(tma.check, case=Case((15, 170), num_kv_heads=1))
tma_long = partial(tma.check, case=Case((700,), num_kv_heads=1, head_dim=128), schedule="whole")
simt_ragged = partial(simt.check, case=Case((15, 70), num_kv_heads=1, block_size=1))
simt_partitioned = partial(simt.check, case=Case((600, 530), window=70, num_kv_heads=1), schedule="partitioned")


def mutant(name: str, kernel: str, old: str, new: str, check: Any) -> KernelMutant:
    return KernelMutant(name, kernel, ((old, new),), check)


MUTANTS = (
    # Waiting
    mutant(
        "warps store their states over rings that others still read",
        "decode_mma",
        "  __syncthreads();  // the rings are read; all their copies are done\n",
        "",
        ragged,
    ),
    mutant(
        "the states of the warps are read before all are there",
        "decode_mma",
        "WarpParts<kWarps>& parts, float o_factor) {\n  sync_computing();\n",
        "WarpParts<kWarps>& parts, float o_factor) {\n",
        ragged,
    ),
    mutant(
        "K is read one group of copies too early",
        "decode_mma",
        "cp_async_wait<2 * STAGES - 3>();",
        "cp_async_wait<2 * STAGES - 2>();",
        ragged,
    ),
    mutant(
        "V is read one group of copies too early",
        "decode_mma",
        "cp_async_wait<2 * STAGES - 2>();",
        "cp_async_wait<2 * STAGES - 1>();",
        ragged,
    ),
    mutant(
        "lanes read what other lanes have copied without meeting them",
        "decode_mma",
        "cp_async_wait<2 * STAGES - 2>();\n    __syncwarp();",
        "cp_async_wait<2 * STAGES - 2>();",
        ragged,
    ),
    mutant(
        "a part is announced before it is visible",
        "decode_mma",
        "fence_gpu();  // the part is visible before the arrival is",
        "",
        few_ctas,
    ),
    mutant(
        "parts are read before their announcement is acquired",
        "decode_mma",
        "fence_gpu();  // the arrivals are seen before the parts are read",
        "",
        few_ctas,
    ),
    mutant(
        "arrivals are not back at zero for the next launch",
        "decode_mma",
        "atomicInc(p.schedule.arrivals + s.first_cta, others)",
        "atomicAdd(p.schedule.arrivals + s.first_cta, 1)",
        mma.test_a_plan_takes_other_lengths_after_update_and_smaller_batches,
    ),
    mutant(
        "two parts share a slot",
        "decode_mma",
        "return 2 * cta + (cta == first_cta);",
        "return 2 * cta;",
        few_ctas,
    ),
    mutant(
        "one CTA too few is waited for",
        "decode_mma",
        "const u32 others = s.last_cta - s.first_cta;",
        "const u32 others = s.last_cta - s.first_cta - 1;",
        few_ctas,
    ),
    mutant(
        "parts are added without their weights",
        "decode_mma",
        "share[i] = weight(share[i], m);",
        "share[i] = 1.f;",
        few_ctas,
    ),
    mutant(
        "every second part is missing in the sum",
        "decode_mma",
        "for (int step = kWarpSize / 2; step > 0; step /= 2) {",
        "for (int step = kWarpSize / 2; step > 1; step /= 2) {",
        few_ctas,
    ),
    mutant(
        "the sums of the four lanes of a vector are not added",
        "decode_mma",
        "for (int step = kVecLanes; step < kWarpSize; step *= 2)",
        "for (int step = 2 * kVecLanes; step < kWarpSize; step *= 2)",
        few_ctas,
    ),
    mutant(
        "parts beyond those that lanes read at once are lost",
        "decode_mma",
        "round < num_parts; round += kPartLanes * kPartsAtOnce",
        "round < min(num_parts, kPartLanes * kPartsAtOnce); round += kPartLanes * kPartsAtOnce",
        mma.test_more_parts_than_lanes_read_at_once,
    ),
    mutant("few tiles are cut into slices of one", "decode_simt", "kLeastUnits = 4;", "kLeastUnits = 1;", one_slice),
    # Where KV lies
    mutant(
        "the place of a block to attend is computed in 32 bits",
        "decode_mma",
        "from += block_of(i, 0) * block_stride",
        "from += static_cast<int>(block_of(i, 0) * block_stride)",
        far_blocks,
    ),
    mutant(
        "keys outside the segment are copied too",
        "decode_mma",
        "from + at + chunk * kChunkDims, inside(key + row));",
        "from + at + chunk * kChunkDims, true);",
        ragged,
    ),
    mutant("block ids are used twice", "decode_mma", "        ids = next_ids;\n", "", many_tiles),
    mutant(
        "table entries are looked up outside the segment",
        "decode_mma",
        "kv.place(min(max(key, s.begin), s.end - 1))",
        "kv.place(key)",
        window,
    ),
    # What is computed
    mutant("a query sees the key behind it", "decode_mma", "key < seen.end;", "key <= seen.end;", chunk),
    mutant(
        "the window holds a key more",
        "decode_mma",
        "begin = min(max(position + 1 - window, 0), end);",
        "begin = min(max(position - window, 0), end);",
        window,
    ),
    mutant(
        "tiles that only some rows see wholly are not masked",
        "decode_mma",
        "visible_keys(at.least, s.seq_len, p.window).end};",
        "visible_keys(at.greatest, s.seq_len, p.window).end};",
        partial(mma.check, case=Case((80,), (4,), num_kv_heads=1), max_q_len=4),
    ),
    mutant(
        "the sum is not rescaled when the maximum rises",
        "decode_mma",
        "        l[group][column] *= factor[group][column];\n",
        "",
        many_tiles,
    ),
    mutant(
        "half the output is not rescaled when the maximum rises",
        "decode_mma",
        "for (int i = 0; i < 4; ++i) o[group][step][i] *= factor[group][i % 2];",
        "for (int i = 0; i < 2; ++i) o[group][step][i] *= factor[group][i % 2];",
        many_tiles,
    ),
    mutant(
        "the output is rescaled only if the last row's maximum rises",
        "decode_mma",
        "raised |= largest > m[group][column];",
        "raised = largest > m[group][column] && lane_id() % 4 == 3;",
        many_tiles,
    ),
    mutant(
        "one of two chains of sums is lost",
        "decode_mma",
        "sums[0][group][i] + sums[kChains - 1][group][i]",
        "sums[0][group][i]",
        ragged,
    ),
    mutant(
        "groups of keys in part outside the segment are copied whole",
        "decode_mma",
        "if (s.begin <= key && key + kGroupKeys <= s.end) return copy_whole",
        "if (s.begin <= key && key < s.end) return copy_whole",
        ragged,
    ),
    mutant(
        "later rows of a whole group lie where unswizzled rows do",
        "decode_mma",
        "return (from ^ ahead % 8 * 16) + ahead * 128;",
        "return from + ahead * 128;",
        ragged,
    ),
    mutant(
        "the scales of K and V of a token are swapped",
        "decode_mma",
        "(lane_id() < kGroupKeys ? kv.p.k_scale : kv.p.v_scale)",
        "(lane_id() < kGroupKeys ? kv.p.v_scale : kv.p.k_scale)",
        token_scales,
    ),
    mutant(
        "the output takes the scale of K",
        "decode_mma",
        "parts, kFolded ? kv.v_scale({0, 0}, s.kv_head) : 1.f)",
        "parts, kFolded ? kv.k_scale({0, 0}, s.kv_head) : 1.f)",
        head_scales,
    ),
    mutant(
        "values of one-byte types stand in the order of two-byte types",
        "decode_mma",
        "(kStepsPerLoad == 1 ? row : row % 8 * 2 + row / 8)",
        "row",
        head_scales,
    ),
    mutant(
        "pairs of values are converted in the order of bytes",
        "decode_mma",
        "second - first == 2 ? __byte_perm(word, 0, 0x3120) : word;",
        "word;",
        head_scales,
    ),
    mutant(
        "shares times small scales become subnormal",
        "decode_mma",
        "const float power = power_below(top[group][column])",
        "const float power = 1.f",
        small_scales,
    ),
    mutant(
        "units do not fall with the shares that made them large",
        "decode_mma",
        "fmaxf(top[group][column] * factor[group][column], largest)",
        "fmaxf(top[group][column], largest)",
        falling_scales,
    ),
    mutant(
        "the output is not brought into new units",
        "decode_mma",
        "factor[group][column] *= unit[group][column] * inverse;",
        "",
        small_scales,
    ),
    mutant(
        "queries beyond f16 become infinite",
        "decode_mma",
        "power_below(fmaxf(largest * 0x1p-12f, 0x1p-60f))",
        "1.f",
        large_queries,
    ),
    mutant(
        "scores take the size of another row's queries",
        "decode_mma",
        "__shfl_sync(kFullMask, power, own_row(0, column) * 4)",
        "power",
        partial(
            mma.check, case=Case((70,), kv_dtype="float8_e4m3", scale_mode="tensor", q_dtype="bfloat16", group_size=7)
        ),
    ),
    mutant(
        "the sink's weight is not measured from the larger maximum",
        "decode_mma",
        "  l = l * o_factor + weight(sink_log2, largest);",
        "  l = l * o_factor + weight(sink_log2, m);",
        partial(mma.check, case=Case((0, 70), sinks=True)),
    ),
    # decode_tma
    mutant(
        "a buffer is filled while warps still read it",
        "decode_tma",
        "    mbarrier_wait(empty + next.buffer, next.parity ^ 1);\n",
        "",
        tma_long,
    ),
    mutant(
        "one warp frees a buffer for all",
        "decode_tma",
        "mbarrier_init(empty + i, kWarps);",
        "mbarrier_init(empty + i, 1);",
        tma_long,
    ),
    mutant(
        "a buffer is read before it is full",
        "decode_tma",
        "    mbarrier_wait(full + next.buffer, next.parity);\n",
        "",
        tma_ragged,
    ),
    mutant(
        "more bytes are expected than come",
        "decode_tma",
        "mbarrier_arrive_expect(barrier, Layout::kBytes);",
        "mbarrier_arrive_expect(barrier, Layout::kBytes + 16);",
        tma_ragged,
    ),
    mutant(
        "values of keys outside the segment are multiplied by zero",
        "decode_tma",
        "else rows.add_values<VLayout, true>(keys);",
        "else rows.add_values<VLayout, false>(keys);",
        tma_ragged,
    ),
    mutant(
        "the fetching warp runs into barriers of the computing ones",
        "decode_tma",
        "void sync_computing() { named_barrier(1, COMPUTE_THREADS); }",
        "void sync_computing() { __syncthreads(); }",
        tma_ragged,
    ),
    mutant(
        "a pair's second tile is read where there is none",
        "decode_tma",
        "if (kPartial && !keys[g].any) continue;",
        "",
        tma_ragged,
    ),
    mutant(
        "both tiles of a pair count as whole when the first is",
        "decode_tma",
        "first_key + (kTilesAtOnce - 1) * TILE_TOKENS + kGroupKeys <= s.end",
        "first_key + kGroupKeys <= s.end",
        tma_ragged,
    ),
    mutant(
        "of a pair's buffers only the first is released",
        "decode_tma",
        "      if (i >= count) break;\n",
        "      if (i >= 1) break;\n",
        tma_long,
    ),
    # decode_mla
    mutant(
        "a tile is read before all threads have copied their part",
        "decode_mla",
        "    __syncthreads();  // the tile is there, and the one before it has been read\n",
        "",
        latents,
    ),
    mutant(
        "the output takes the place of tiles that others read",
        "decode_mla",
        "  __syncthreads();  // the tiles are read\n",
        "",
        latents,
    ),
    mutant(
        "shares are read before they are written",
        "decode_mla",
        "    part.add_tile(shared, s, ring.first_key + i * TILE_TOKENS);\n    __syncthreads();\n",
        "    part.add_tile(shared, s, ring.first_key + i * TILE_TOKENS);\n",
        latents,
    ),
    mutant(
        "scores lack a part of the dims",
        "decode_mla",
        "for (int split = 0; split < kSplits; ++split) dot +=",
        "for (int split = 1; split < kSplits; ++split) dot +=",
        latents,
    ),
    mutant(
        "the latents' output is not rescaled",
        "decode_mla",
        "o[rows][step][i] *= factor[rows][i % 2];",
        "o[rows][step][i] *= 1.f;",
        latents,
    ),
    mutant(
        "latents outside the segment are copied",
        "decode_mla",
        "const bool inside = s.begin <= key && key < s.end;\n      const KV_TYPE* from",
        "const bool inside = true;\n      const KV_TYPE* from",
        latents,
    ),
    mutant(
        "queries lie in the order of two-byte types",
        "decode_mla",
        "kStepsPerLoad == 1 ? within : within / 4 * 2 + within % 4 / 2 * 8;",
        "within;",
        wide_latents,
    ),
    mutant(
        "a block is looked up for the tile before",
        "decode_mla",
        "block = look_up(i + 1);",
        "block = look_up(i);",
        latents,
    ),
    mutant(
        "a copy of a short row has L2 fetch the next head's",
        "decode_mma",
        "HEAD_DIM_V * sizeof(KV_TYPE) % 128 == 0 ? 128 : 64;",
        "HEAD_DIM_V * sizeof(KV_TYPE) % 128 == 0 ? 128 : 128;",
        short_rows,
    ),
    # decode_simt and decode_reduce
    mutant(
        "a lane looks up the block of a token past the end",
        "decode_simt",
        "kv.place(inside ? token : s.begin)",
        "kv.place(token)",
        simt_ragged,
    ),
    mutant(
        "groups of lanes in a warp are not all merged",
        "decode_simt",
        "for (int step = kTokenLanes; step < kWarpSize; step *= 2) {",
        "for (int step = kTokenLanes; step < kWarpSize / 2; step *= 2) {",
        simt_ragged,
    ),
    mutant(
        "the first partition that the window reaches is left out",
        "decode_reduce",
        "const int first = s.begin / tokens,",
        "const int first = ceil_div(s.begin, tokens),",
        simt_partitioned,
    ),
)


def fresh() -> Backend:
    """The interpreter: a mutant may read and write where it must not."""
    from tests.ptxsim.backend import PtxsimBackend

    return PtxsimBackend()


CHECKS = {id(one.check): one for one in MUTANTS}


@pytest.fixture(autouse=True)
def _on_the_interpreter(backend: Backend) -> None:
    """Skips where nothing can be compiled, and on a GPU, where a mutant could do harm."""
    if backend.name != "ptxsim":
        pytest.skip("mutants run on the interpreter only")


@pytest.mark.parametrize("mutant", one_in(8, CHECKS.values()), ids=str)
def test_the_same_test_passes_without_the_mistake(mutant: KernelMutant, backend: Backend) -> None:
    mutant.check(backend)


@pytest.mark.parametrize("mutant", one_in(8, MUTANTS), ids=str)
def test_the_tests_notice_that(mutant: KernelMutant) -> None:
    assert_killed(mutant, fresh)
