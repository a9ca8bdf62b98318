"""Mutants of what keeps, writes, finds and copies partly filled last blocks."""

from tests.mutants.mutant import Mutant

CORE = "pagedkv/_core/"
NOT_WHOLE = ("test_a_prompt_of_the_tokens_that_stand_for_none_does_not_match_it",)

MUTANTS = (
    Mutant(
        "a partly filled block matches as a whole one",
        CORE + "owners.pyx",
        (("        if child == NIL or is_remainder(t, child):\n", "        if child == NIL:\n"),),
        NOT_WHOLE,
    ),
    Mutant(
        "a row takes over a partly filled block that reads like its own",
        CORE + "insertion.pyx",
        (("            if p.fates[child].transfer >= 0 or is_remainder(t, child):\n",
          "            if p.fates[child].transfer >= 0:\n"),),
        NOT_WHOLE,
    ),
    Mutant(
        "a computed block that reads like a partly filled one joins the tree",
        CORE + "insertion.pyx",
        (("k = whole_blocks(t, at, min(k, t.max_run))", "k = min(k, t.max_run)"),),
        ("test_a_computed_block_that_reads_like_one_joins_no_tree",),
    ),
    Mutant(
        "tokens that are not there are copied",
        CORE + "radix_tree.pyx",
        (("    while best > 0 and tokens[best - 1] == NO_TOKEN:\n", "    while False:\n"),),
        NOT_WHOLE,
    ),
    Mutant(
        "a partly filled block stays beside the longer one",
        CORE + "block_table.pyx",
        (("        if self.placement.place.has_remainders:\n", "        if False:\n"),),
        ("test_a_longer_block_takes_its_place",),
    ),
    Mutant(
        "a partly filled block is kept although the tree has its tokens",
        CORE + "remainders.pyx",
        (("fill, SCANNED, where) == fill:", "fill, SCANNED, where) < 0:"),),
        ("test_a_longer_block_takes_its_place",),
    ),
    Mutant(
        "a last block that a fork shares is kept",
        CORE + "remainders.pyx",
        ((" or p.pools[0].refs[id] != 1:", ":"),),
        ("test_a_row_that_shares_its_last_block_keeps_nothing_and_the_last_one_does",),
    ),
    Mutant(
        "a last block whose copy is not made is kept",
        CORE + "block_table.pyx",
        (("self.num_groups > 1 or row.step or not 0 < fill", "self.num_groups > 1 or not 0 < fill"),),
        ("test_a_row_whose_copy_on_write_is_not_made_keeps_nothing",),
    ),
    Mutant(
        "a restored run swallows its partly filled block",
        CORE + "insertion.pyx",
        (("    return max(k, 1)\n", "    return num_blocks\n"),),
        ("test_a_restored_run_is_cut_before_it",),
    ),
    Mutant(
        "of a restored run that was cut only the last part can be evicted",
        CORE + "insertion.pyx",
        (("        while n != above:\n            recency_link(p, tier, n)\n            n = t.nodes[n].parent\n",
          "        recency_link(p, tier, n)\n"),),
        ("test_a_restored_run_is_cut_before_it",),
    ),
    Mutant(
        "a partly filled block below the device is copied from as if it were there",
        CORE + "placement.pyx",
        (("                if ((node_top(p.tree, child) > 0) == below and", "                if ("),),
        ("test_it_goes_to_a_colder_tier_and_comes_back",),
    ),
    Mutant(
        "a partial hit on a partly filled block is no second use",
        CORE + "placement.pyx",
        (("                    want_reused(p, child)\n", "                    pass\n"),),
        ("test_it_is_written_by_the_rule_of_the_disk",),
    ),
    Mutant(
        "runs that were used again merge with those that were not",
        CORE + "transfers.pyx",
        ((" or (p.has_remainders and a.matched != b.matched) or", " or"),),
        ("test_a_turn_added_to_a_conversation_was_not_asked_for_again_itself",),
    ),
    Mutant(
        "the last block of a sequence that dies is kept",
        "pagedkv/cache/engine.py",
        (("        keeps = is_whole and self.keeps_remainders\n", "        keeps = self.keeps_remainders\n"),),
        ("test_a_sequence_that_dies_without_its_release_keeps_nothing",),
    ),
    Mutant(
        "a part is copied only into a block that is free already",
        "pagedkv/cache/engine.py",
        (("        if target < 0 and self.moves.may_wait:", "        if False:"),),
        ("test_a_part_is_copied_into_the_room_of_a_colder_block",),
    ),
    Mutant(
        "a partly filled block is loaded whatever that takes",
        "pagedkv/cache/matcher.py",
        (("load_s is None or compute_s is None or load_s <= compute_s", "True"),),
        ("test_what_loads_slower_than_it_computes_stays_where_it_is",),
    ),
    Mutant(
        "a part of a full block below the device is left there",
        CORE + "placement.pyx",
        (("            found.partial_tier = node_top(t, where[0])\n",
          "            found.partial_tier = node_top(t, where[0]) if is_remainder(t, where[0]) else NIL\n"),),
        ("test_a_part_of_a_block_below_the_device_is_promoted_and_copied",),
    ),
    Mutant(
        "a part is loaded though partial hits are switched off",
        "pagedkv/cache/matcher.py",
        (("        if not self._partial_hits:\n            return False\n", ""),),
        ("test_a_part_below_the_device_is_left_there_where_parts_are_switched_off",),
    ),
    Mutant(
        "a run is cut for a part that is not worth its load",
        "pagedkv/cache/remainder.py",
        ((" and self._worth(common, start, prefix.partial_tier)", ""),),
        ("test_a_part_below_the_device_that_is_computed_faster_stays_there",),
    ),
    Mutant(
        "a load lets go of a partly filled block before a row has copied from it",
        "pagedkv/cache/load.py",
        (("        self._remainder.settle()  #", "        self._remainder.let_go()  #"),),
        ("test_a_load_lets_nothing_of_it_go_before_it_is_copied",),
    ),
    Mutant(
        "a request is never begun if a partly filled block beside it has no room",
        "pagedkv/scheduler/running.py",
        (("                entry.do_without_remainders()\n", "                pass\n"),),
        ("test_a_request_that_takes_the_whole_device_is_served_though_one_lies_below",),
    ),
    Mutant(
        "a load fails where only its partly filled block has no room",
        "pagedkv/cache/load.py",
        (("        if self._stage != NEEDS_ROOM or not self.num_beside:\n            return False\n",
          "        return False\n"),),
        ("test_without_room_for_it_a_load_brings_the_prefix_alone",),
    ),
    Mutant(
        "a prefetch gives up where only its partly filled block has no room",
        "pagedkv/cache/matcher.py",
        (("                load.do_without_remainder()\n", "                pass\n"),),
        ("test_a_prefetch_without_room_for_it_brings_the_prefix_alone",),
    ),
    Mutant(
        "a scheduler waits for its other loads to copy a part of a block",
        "pagedkv/scheduler/running.py",
        (("                load.awaits_reads = alone and not self.is_room_coming()\n",
          "                load.awaits_reads = True\n"),),
        ("test_a_part_of_a_block_is_not_waited_for_while_other_requests_load",),
    ),
    Mutant(
        "nothing is reserved for a partly filled block beside a request's own",
        "pagedkv/scheduler/loading.py",
        (("                entry.total += sum(load.num_beside for load in entry.loads.values())\n", ""),),
        ("test_the_block_of_a_remainder_is_beside_those_that_the_request_needs",),
    ),
    Mutant(
        "of many siblings only the youngest are looked at",
        CORE + "radix_tree.pyx",
        (("    if child != NIL and best < limit:   ", "    if False:   "),),
        ("test_among_many_siblings_it_is_kept_once_found_and_given_back",),
    ),
    Mutant(
        "only the longest of those that a block has outgrown is given back",
        CORE + "remainders.pyx",
        (("    cdef int32_t child, fill = p.tree.block_size - 1\n",
          "    cdef int32_t child, fill = p.tree.block_size - 1\n    if fill > 1:\n        fill = 1\n"),),
        ("test_of_several_that_a_longer_block_has_outgrown_none_is_left",),
    ),
)  # fmt: skip
