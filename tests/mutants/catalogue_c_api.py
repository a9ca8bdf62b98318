"""Mistakes in the calls for C: arguments, codes, moves, rows."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PREFIXES, ROWS = "pagedkv/_core/c_api/prefixes.pyx", "pagedkv/_core/c_api/rows.pyx"

MUTANTS = (
    Mutant(
        "a transfer that was not handed out is completed",
        PREFIXES,
        (("        elif is_not_taken(p, ends[i].transfer):\n", "        elif False:\n"),),
        ("test_a_transfer_that_was_not_handed_out_cannot_be_completed",),
    ),
    Mutant(
        "a transfer whose moves were not taken is completed",
        "pagedkv/_core/placement.pyx",
        (("if is_not_taken(&self.place, data[i]) or finish_as(", "if finish_as("),),
        ("test_a_transfer_whose_moves_were_not_taken_cannot_be_completed",),
    ),
    Mutant(
        "the handle of the first owner is 0",
        "pagedkv/_core/owners.pyx",
        (("            grown[slot].generation = 1 ", "            pass "),),
        ("test_zero_names_no_owner_though_a_row_has_one",),
    ),
    Mutant(
        "a lookup without memory goes on",
        PREFIXES,
        (("        if ids == NULL:\n            return PAGEDKV_E_MEMORY\n        tops =", "        tops ="),),
        ("test_whichever_allocation_of_a_call_fails_the_books_agree_and_it_succeeds_later",),
    ),
    Mutant(
        "an owner that memory is short for is another error",
        PREFIXES,
        (
            (
                "    if slot < 0:\n        return PAGEDKV_E_MEMORY\n    if found",
                "    if slot < 0:\n        return PAGEDKV_E_STATE\n    if found",
            ),
        ),
        ("test_whichever_allocation_of_a_call_fails_the_books_agree_and_it_succeeds_later",),
    ),
    Mutant(
        "a completion without memory goes on",
        PREFIXES,
        (("    if ends == NULL:\n        return PAGEDKV_E_MEMORY\n", ""),),
        ("test_whichever_allocation_of_a_call_fails_the_books_agree_and_it_succeeds_later",),
    ),
    Mutant(
        "a transfer is handed out in parts",
        PREFIXES,
        (
            (
                "        if last > room:\n            break\n",
                "        last = min(last, room)\n        if last == taken:\n            break\n",
            ),
        ),
        ("test_moves_come_in_whole_transfers",),
    ),
    Mutant(
        "one entry that arrived is enough",
        PREFIXES,
        (("= ends[num].arrived and ends[j].arrived", "= ends[num].arrived or ends[j].arrived"),),
        ("test_entries_for_a_transfer_count_together_and_a_stale_one_stops_all",),
    ),
    Mutant(
        "a transfer that was not tried counts as failed",
        PREFIXES,
        (("outcomes[i] != PAGEDKV_NOT_TRIED\n", "True\n"),),
        ("test_a_promotion_that_failed_is_settled_away_and_one_not_tried_can_be_hit[2-4]",),
    ),
    Mutant(
        "a short array gets as much as it can take",
        PREFIXES,
        (("found > room:\n        code = PAGEDKV_E_ROOM\n", "found > room:\n        found = room\n"),),
        ("test_a_short_array_is_told_how_long_it_must_be",),
    ),
    Mutant(
        "a released owner is released again",
        PREFIXES,
        ((" if slot >= 0 else PAGEDKV_E_STALE\n\n\n# ---- room", "\n\n\n# ---- room"),),
        ("test_a_refused_call_on_prefixes_changes_nothing",),
    ),
    Mutant(
        "copies without room for them are written",
        ROWS,
        (("            or out.num_copies > out.copies_room):\n", "):\n"),),
        ("test_copies_without_room_are_refused_and_then_listed",),
    ),
    Mutant(
        "a step over is committed",
        ROWS,
        (("    if code == E_STATE:\n        return PAGEDKV_E_STALE ", "    if code == E_STATE:\n        return OK "),),
        ("test_a_step_that_is_over_is_not_committed_and_cancels_no_other_one",),
    ),
    Mutant(
        "a full table says that blocks are missing",
        ROWS,
        (
            (
                "return PAGEDKV_E_ROWS if code == E_BLOCKS else code\n\n\ncdef int row_open",
                "return code\n\n\ncdef int row_open",
            ),
        ),
        ("test_a_full_table_and_a_full_pool_are_told_apart",),
    ),
    Mutant(
        "a remainder is always kept",
        ROWS,
        (("        if keep_remainder:\n", "        if True:\n"),),
        ("test_a_remainder_is_kept_where_it_is_asked_for",),
    ),
)
