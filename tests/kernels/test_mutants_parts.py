"""Mutants of divided row tiles: would the tests notice?

Each mistake names the test that must fail on it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from pagedkv.kernels import schedules
from pagedkv.kernels.backend import Backend
from tests.attention import test_cascade as cascades
from tests.kernels import test_parts as parts
from tests.kernels.cases import Case
from tests.mutants.kernels import KernelMutant, assert_killed
from tests.slices import one_in

long = partial(parts.check, case=replace(parts.LONG, group_size=2), kernel="prefill_mma")
two_heads = partial(parts.check, case=Case((700,), (3,), group_size=2), kernel="prefill_mma")
on_hopper = partial(parts.check, case=replace(parts.LONG, group_size=2), kernel="prefill_wgmma")
several = partial(parts.check, case=replace(parts.MIXED, num_kv_heads=2), kernel="prefill_wgmma")  # segments per CTA
all_keys = partial(parts.check, case=replace(parts.LONG, causal=False), kernel="prefill_wgmma")
listed = parts.check_list
through_levels = {"shared": [140, 9, 14], "own": [9, 40, 3, 12, 23], "window": 100, "alibi": False}
window = partial(cascades.check_distances, kernel="prefill_mma", q_len=3, **through_levels)
decoded_window = partial(cascades.check_distances, kernel="decode_mma", q_len=1, **through_levels)
divided = cascades.check_division

MUTANTS = (
    KernelMutant(
        "the longer parts end a tile early",
        "prefill_mma",
        (("(tile + part_tiles + (item.part < longer)) * TILE_TOKENS", "(tile + part_tiles) * TILE_TOKENS"),),
        long,
    ),
    KernelMutant(
        "a part begins where a longer one before it has not ended",
        "prefill_mma",
        (("item.part * part_tiles + min(item.part, longer)", "item.part * part_tiles"),),
        long,
    ),
    KernelMutant(
        "the first of two parts to arrive merges",
        "prefill_mma",
        (("others) == others;", "others) == 0;"),),
        long,
    ),
    KernelMutant(
        "the merge leaves out the last part",
        "prefill_mma",
        (("merge_parts(p, s, s.num_parts(),", "merge_parts(p, s, s.num_parts() - 1,"),),
        long,
    ),
    KernelMutant(
        "KV heads share the slots of their parts",
        "prefill_mma",
        (("s.kv_head * p.schedule.part_slots + item.first_slot", "item.first_slot"),),
        two_heads,
    ),
    KernelMutant(
        "the list does not begin anew with the next launch",
        "prefill_wgmma",
        (("atomicInc(p.schedule.next_item, all - 1)", "atomicInc(p.schedule.next_item, all)"),),
        several,
    ),
    KernelMutant(
        "an item after the first ones goes to two CTAs",
        "prefill_wgmma",
        (("at = gridDim.x + atomicInc(", "at = gridDim.x - 1 + atomicInc("),),
        several,
    ),
    KernelMutant(
        "a part's maximum is not in base 2",
        "prefill_mma",
        (("        m[f][h] *= row_fold(f, h);\n", ""),),
        long,
    ),
    KernelMutant(
        "parts forget the scale of V",
        "prefill_mma",
        (("{pair.x * v_scale, pair.y * v_scale};", "{pair.x, pair.y};"),),
        partial(
            parts.check,
            case=Case((500,), (3,), group_size=2, num_kv_heads=1, kv_dtype="int8", scale_mode="head"),
            kernel="prefill_mma",
        ),
    ),
    KernelMutant(
        "rows past the end of a part are stored",
        "prefill_mma",
        (("        if (r >= segment.num_rows) continue;\n", ""),),
        partial(parts.test_every_part_is_stored_in_its_slot_alone, kernel="prefill_mma"),
    ),
    KernelMutant(
        "tiles of a part count from the sequence's first key",
        "prefill_wgmma",
        (("const int first_key = s.begin / TILE_TOKENS * TILE_TOKENS;", "const int first_key = 0;"),),
        on_hopper,
    ),
    KernelMutant(
        "a segment's tiles are looked for where the last one's were",
        "prefill_wgmma",
        (("  ring.passed += 2 * tiles;\n", ""),),
        several,
    ),
    KernelMutant(
        "the last tile is not masked where all keys are seen",
        "prefill_wgmma",
        (("if (CAUSAL) end = min(max(position + 1, 0), seq_len);", "end = seq_len + !CAUSAL;"),),
        all_keys,
    ),
    KernelMutant(
        "the next queries take the place of those that products still read",
        "prefill_wgmma",
        (("dynamic_shared + (turn + 1) % 2 * kQueryBytes + group", "dynamic_shared + turn % 2 * kQueryBytes + group"),),
        several,
    ),
    KernelMutant(
        "a warp reads the next segment before it is there",
        "prefill_wgmma",
        (("    mbarrier_wait(full + turn % 2, turn / 2 % 2);\n    const bool more", "    const bool more"),),
        on_hopper,
    ),
    KernelMutant(
        "a segment is put in a place that warps still read",
        "prefill_wgmma",
        (("    mbarrier_wait(empty + turn % 2, turn / 2 % 2 ^ 1);\n    if (lane", "    if (lane"),),
        several,
    ),
    KernelMutant(
        "parts are shorter than they may be",
        "prefill_plan",
        (("key_tiles / p.min_part_tiles), 1)", "key_tiles), 1)"),),
        partial(listed, seq_lens=(2077,), q_lens=(186,), window=300, num_sms=13, slots_per_sm=1),
    ),
    KernelMutant(
        "more parts are wanted than the workspace holds",
        "prefill_plan",
        (("  if (sums[2] > p.part_slots) return kNever;\n", ""),),
        partial(listed, seq_lens=(5763, 5037), q_lens=(151, 148), num_sms=13, num_kv_heads=2, min_keys=1),
    ),
    KernelMutant(
        "parts are listed in slots that the workspace does not have",
        "prefill_plan",
        (("    if (wanted && first_slot + wanted > p.part_slots) parts = 1;\n", ""),),
        parts.test_row_tiles_that_find_no_slots_stay_whole,
    ),
    KernelMutant(
        "slots of earlier rounds are given again",
        "prefill_plan",
        (("    slots += total;\n", ""),),
        partial(listed, seq_lens=(4000,) * 1100, q_lens=(1,) * 1100, num_sms=2000),
    ),
    KernelMutant(
        "the merge costs nothing",
        "prefill_plan",
        (("parts / kMergedParts : 0", "0 : 0"),),
        partial(listed, seq_lens=(100000,), q_lens=(1,), num_sms=132),
    ),
    KernelMutant(
        "only 32 parts at most are tried",
        "prefill_plan",
        (("max(1 << (31 - __clz(parts)) >> 2, 1)", "1"),),
        partial(listed, seq_lens=(131072,), q_lens=(1,), num_sms=264),
    ),
    KernelMutant(
        "of bounds that cost the same the smallest is taken",
        "prefill_plan",
        (("if (costs[warp] < least)", "if (costs[warp] <= least)"),),
        partial(listed, seq_lens=(59314,), q_lens=(60,), num_sms=132, num_kv_heads=2),
    ),
    KernelMutant(
        "a level's queries stand at its last keys",
        "decode_mma",
        (("POSITIONS ? p.q_positions[q_first + query] : seq_len - q_len + query", "seq_len - q_len + query"),),
        decoded_window,
    ),
    KernelMutant(
        "a level's keys begin with the window of its last query",
        "prefill_mma",
        (("max(begin, visible_keys(at.least,", "max(begin, visible_keys(at.greatest,"),),
        window,
    ),
    KernelMutant(
        "a tile that the first query's window has is taken for seen by all",
        "prefill_mma",
        (("last = visible_keys(at.greatest,", "last = visible_keys(at.least,"),),
        window,
    ),
    KernelMutant(
        "a query stands behind a level's keys as if it were the last level",
        "query_positions",
        (("p.below ? p.below[query] : query - end", "query - end"),),
        window,
    ),
    KernelMutant(
        "the greatest position of a level is the least",
        "query_positions",
        (("atomicMax(&greatest", "atomicMin(&greatest"),),
        window,
    ),
    KernelMutant(
        "the least position of a level is any",
        "query_positions",
        (("    atomicMin(&least, position);\n", ""),),
        window,
    ),
    KernelMutant(
        "a list counts keys of a prefix that the window has left",
        "prefill_plan",
        (("spans) return {spans[2 * seq], spans[2 * seq + 1]};", "false) return {};"),),
        divided,
    ),
    KernelMutant(
        "slices count keys of a prefix that the window has left",
        "plan",
        (("spans) return {spans[2 * seq], spans[2 * seq + 1]};", "false) return {};"),),
        divided,
    ),
    KernelMutant(
        "a window's first keys count",
        "prefill_plan",
        (("ceil_div(end, p.tile_tokens) - begin / p.tile_tokens", "ceil_div(end, p.tile_tokens)"),),
        partial(listed, seq_lens=(131072, 20000), q_lens=(1, 2048), window=4096, num_sms=132, num_kv_heads=8),
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _on_the_interpreter(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where nothing can be compiled, and on a GPU, where a mutant could do harm."""
    if backend.name != "ptxsim":
        pytest.skip("mutants run on the interpreter only")
    monkeypatch.setattr(schedules, "MIN_PART_KEYS", 1)


@pytest.mark.parametrize("mutant", one_in(len(MUTANTS), MUTANTS), ids=str)
def test_the_same_test_passes_without_the_mistake(mutant: KernelMutant, backend: Backend) -> None:
    mutant.check(backend)


@pytest.mark.parametrize("mutant", one_in(8, MUTANTS), ids=str)
def test_the_tests_notice_that(mutant: KernelMutant) -> None:
    from tests.ptxsim.backend import PtxsimBackend

    assert_killed(mutant, PtxsimBackend)
