"""Mutants of the CPU kernels."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CALL, SHAPES, KERNELS, NUMBERS = (f"pagedkv/cpu/{name}" for name in ("attend.c", "attend.h", "kernels.h", "numbers.h"))
WRITE, MERGE, CONVERT, GATHER = (
    f"pagedkv/cpu/{name}" for name in ("write.c", "merge.c", "write_numbers.h", "gather.c")
)
VARIANTS = "test_every_variant_of_every_batch_is_right"
HOLES = "test_blocks_that_no_window_reaches_need_not_be_there_but_all_others_must[cpu]"
TIES = "test_every_tie_goes_to_even_and_its_neighbours_to_the_nearer_number"


class WriteMutant(Mutant):
    """One in C that is a part of the module `_write`."""

    @property
    def module(self) -> str:
        """Name of the extension module to build."""
        return "pagedkv.cpu._write"


class GatherMutant(Mutant):
    """One in C that is a part of the module `_gather`."""

    @property
    def module(self) -> str:
        """Name of the extension module to build."""
        return "pagedkv.cpu._gather"


GATHERING = (
    GatherMutant(
        "a range that begins within a block is taken from the block's beginning", GATHER,
        (("layer * s->from_layer + (from - first) * s->from_token", "layer * s->from_layer"),),
        ("test_every_range_is_what_numpy_gathers",),
    ),
    GatherMutant(
        "a range that ends within a block takes the whole block", GATHER,
        (("smaller(first + c->block_size, c->stop)", "first + c->block_size"),),
        ("test_nothing_outside_the_result_is_written",),
    ),
    GatherMutant(
        "tokens are taken for neighbours where only heads are", GATHER,
        (("(count == 1 || (s->from_token == all_heads && s->to_token == all_heads))", "1"),),
        ("test_every_range_is_what_numpy_gathers",),
    ),
    GatherMutant(
        "what is stored past the caches lacks the end of a piece", GATHER,
        (("memcpy(to + at, from + at, (size_t)(bytes - at));", ";"),),
        ("test_a_result_larger_than_the_caches_has_the_same_bits_on_any_number_of_threads",),
    ),
    Mutant(
        "a block beyond the arena is read", "pagedkv/cpu/_gather.pyx",
        (("if not 0 <= block < k.shape[0]:", "if not 0 <= block:"),),
        ("test_a_gather_that_does_not_fit_is_refused_and_writes_nothing[a block beyond the arena]",),
    ),
    Mutant(
        "a call that gathers keeps the GIL", "pagedkv/cpu/_gather.pyx",
        (("    with nogil:\n        gather_tokens", "    if True:\n        gather_tokens"),),
        ("test_others_run_while_a_call_gathers",),
    ),
    Mutant(
        "a result may lie in the arena", "pagedkv/cpu/kv_gatherer.py",
        (("if np.may_share_memory(array, k) or np.may_share_memory(array, v):", "if False:"),),
        ("test_a_result_in_the_arena_itself_is_refused",),
    ),
    Mutant(
        "a scatter of what is cached already writes it again", "pagedkv/cache/sequence.py",
        (("layer.swapaxes(0, 1))[cached:])", "layer.swapaxes(0, 1))[: len(layer) - cached])"),),
        ("test_a_range_is_scattered_and_what_is_cached_already_stays_as_it_is[NHD-NHD]",),
    ),
)  # fmt: skip

WRITING = (
    WriteMutant(
        "float64 is rounded to float32 before it is rounded to float16", WRITE,
        (("once = s->to_type == F16;", "once = 0;"),), ("test_float64_becomes_float16_in_one_rounding",),
    ),
    WriteMutant(
        "a tie of a smaller type is rounded up", CONVERT,
        (("(1u << (lost - 1)) - 1 + (size >> lost & 1)", "(1u << (lost - 1))"),), (f"{TIES}[float8_e4m3]",),
    ),
    WriteMutant(
        "fp8 that is too large wraps around", CONVERT,
        (("found > largest ? largest : found));", "found));"),),
        ("test_what_does_not_fit_saturates_and_nan_is_marked",),
    ),
    WriteMutant(
        "a computed scale overlooks NaN", WRITE,
        (("most = size > most ? size : most;", "most = size > most && size <= 0x7f800000 ? size : most;"),),
        ("test_a_row_of_zeros_and_one_with_nan_keep_their_meaning_with_computed_scales",),
    ),
    WriteMutant(
        "a row is divided by a scale of 0", WRITE, (("if (by == 0)", "if (0)"),),
        ("test_a_row_of_zeros_and_one_with_nan_keep_their_meaning_with_computed_scales",),
    ),
    WriteMutant(
        "a skipped token goes to slot 1", WRITE,
        (("slot = c->slots[token];", "slot = c->slots[token] < 0 ? 1 : c->slots[token];"),),
        ("test_tokens_go_to_their_slots_and_skipped_ones_nowhere",),
    ),
    WriteMutant(
        "threads share tokens and not slots", WRITE,
        (("owner_of(slot, shared->items) != item", "owner_of(token << NEIGHBOURS_LOG2, shared->items) != item"),),
        ("test_a_thread_that_gets_ahead_does_not_put_an_earlier_token_over_a_later_one",),
    ),
    *(
        Mutant(
            f"the fast check of a write overlooks {what}", "pagedkv/cpu/_write.pyx", ((old, new),),
            (f"test_anything_unusual_takes_the_full_check[{killer}]",),
        )
        for what, old, new, killer in (
            ("a slot that is too large", "if at[i] >= num_slots:", "if False:", "a slot beyond the cache"),
            ("rows in the cache", "is_apart(k, kc)", "True", "k in the cache itself"),
            ("rows in the other cache", "is_apart(v, kc)", "True", "v in the memory of K's cache"),
            ("a read-only cache", "            and cnp.PyArray_ISBEHAVED(cache))", "            )",
             "a cache that is read-only"),
            ("the values' shape", "values.shape[0] == slots.shape[0] and", "", "a token fewer in v"),
            ("a second type", " or kc.descr.type_num != vc.descr.type_num", "", "caches of two types"),
        )
    ),
    Mutant(
        "rows that lie in the cache are read while it is written", "pagedkv/cpu/numbers.py",
        (("return array.copy() if shared else array", "return array"),),
        ("test_rows_that_lie_in_the_cache_itself_are_read_before_anything_is_written",),
    ),
    WriteMutant(
        "a number that becomes infinity is not told", WRITE,
        (("        else if (overflow(numbers, count, limit))", "        else if (0)"),),
        ("test_a_number_beyond_float16_is_told_wherever_it_stands",),
    ),
    WriteMutant(
        "the largest number of float16 is told to be too large", WRITE,
        (("F16 ? 0x477ff000", "F16 ? 0x477fe000"),),
        ("test_numbers_that_fit_and_infinities_that_were_given_are_not",),
    ),
    Mutant(
        "a call that writes keeps the GIL", "pagedkv/cpu/_write.pyx",
        (("    with nogil:\n        write_rows", "    if True:\n        write_rows"),),
        ("test_others_run_while_a_call_writes",),
    ),
    Mutant(
        "a call that merges keeps the GIL", "pagedkv/cpu/_write.pyx",
        (("    with nogil:\n        merge_rows", "    if True:\n        merge_rows"),),
        ("test_others_run_while_a_call_merges",),
    ),
    WriteMutant(
        "what lies in a state without keys is read", MERGE, (("if (weight != 0)", "if (1)"),),
        ("test_states_of_every_dtype_are_merged_by_their_weights",),
    ),
    WriteMutant(
        "weights are not taken from the largest lse", MERGE,
        (("exp(lse_of(c, row, state) - row->most)", "exp(lse_of(c, row, state))"),),
        ("test_states_of_any_lse_are_weighed_without_overflow",),
    ),
    WriteMutant(
        "a merged lse that is NaN is overlooked", MERGE,
        (("if (!(lse <= row.most))", "if (lse > row.most)"),),
        ("test_nan_and_infinity_reach_the_result_of_their_own_row_alone",),
    ),
)  # fmt: skip

MUTANTS = (
    Mutant(
        "of queries in no order, the first has the first keys that any sees", SHAPES,
        (("int i = c->q_positions ? 1 : count - 1;", "int i = count - 1;"),),
        ("test_windows_and_alibi_reach_through_all_levels",),
    ),
    Mutant(
        "a query stands at its sequence's keys, whatever the caller says", SHAPES,
        (("s.position = c->q_positions ?", "s.position = 0 ?"),),
        ("test_windows_and_alibi_reach_through_all_levels",),
    ),
    Mutant(
        "positions may be any number", "pagedkv/cpu/attention.py",
        ((".max(initial=0) >= MOST_POSITION:", ".max(initial=0) < 0:"),),
        ("test_what_does_not_fit_is_refused_before_anything_is_written[a position beyond all keys]",),
    ),
    Mutant(
        "the last block must be there where no query sees any of its keys", "pagedkv/cpu/_attend.pyx",
        (("        if seen.begin == seen.end:\n", "        if False:\n"),), (HOLES,),
    ),
    Mutant(
        "mask offsets may fall so far that their bits overflow", "pagedkv/cpu/_attend.pyx",
        (("                    c.mask_indptr[seq + 1] < c.mask_indptr[seq] or \\\n", ""),),
        ("test_what_does_not_fit_is_refused_before_anything_is_written",),
    ),
    Mutant(
        "the first block that a query sees may be any number", "pagedkv/cpu/_attend.pyx",
        (("range(seen.begin // c.block_size,", "range(seen.begin // c.block_size + 1,"),), (HOLES,),
    ),
    *GATHERING,
    *WRITING,
    Mutant(
        "a row in which something is not finite is left as the fast path made it", CALL,
        (("if (odd != 0 || lse == INFINITY || lost)", "if (0)"),),
        ("test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else",),
    ),
    Mutant(
        "a window is one key too short", SHAPES,
        (("? s.position + 1 - c->window : 0;", "? s.position + 2 - c->window : 0;"),),
        (f"{VARIANTS}[portable-around a tile-window]",),
    ),
    Mutant(
        "a sequence is cut by the size of its batch", CALL,
        (("const int part = rows <= TILED_ROWS ? part_of(keys) : keys;",
          "const int part = rows <= TILED_ROWS ? part_of(keys) / c->num_seqs + 1 : keys;"),),
        ("test_the_bits_depend_on_the_sequence_alone",),
    ),
    Mutant(
        "a sink takes no weight", CALL,
        (("l = l * mine + exp2f(sink - top);", "l = l * mine;"),),
        (f"{VARIANTS}[portable-around a block-sinks]",),
    ),
    Mutant(
        "a larger maximum leaves what was summed before as it was", KERNELS,
        (("const float less = *m == -INFINITY ? 0 : exp2f(*m - top);", "const float less = 1;"),),
        (f"{VARIANTS}[portable-around a tile-plain]",),
    ),
    Mutant(
        "halves are rounded up at a tie", NUMBERS,
        (("size += 0xfff + (size >> 13 & 1);", "size += 0x2000;"),),
        ("test_outputs_are_rounded_to_nearest_even",),
    ),
    WriteMutant(
        "a V of no width takes the scale of its K", WRITE,
        (("            if (c->sides[side].dim) /*", "            if (1) /*"),),
        ("test_latents_move_between_tiers_and_outlive_a_restart",),
    ),
)  # fmt: skip
