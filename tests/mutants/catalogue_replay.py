"""Mistakes in the replay: who holds what until when, and the bounds."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BOUNDS = "pagedkv/lab/replay/bounds.pyx"
ENGINE = "pagedkv/lab/replay/engine_sim.py"
SCHEDULE = "pagedkv/lab/replay/schedule.py"

MUTANTS = (
    Mutant(
        "a small file may name any number of blocks",
        "pagedkv/lab/replay/trace_npz.py",
        (("    if num_accesses > max(FEW_ACCESSES, MAX_ACCESSES_PER_BYTE * stored_bytes):\n", "    if False:\n"),),
        ("test_a_small_file_that_names_very_many_blocks_is_refused_before_they_take_memory",),
    ),
    Mutant(
        "a file of empty lines is read to its end",
        "pagedkv/lab/replay/trace_jsonl.py",
        (("        if spare < 0:\n", "        if False:\n"),),
        ("test_empty_lines_without_end_are_refused_after_a_mebibyte",),
    ),
    Mutant(
        "a request that generates lets go of its blocks at once",
        ENGINE,
        (("        if generating is None:\n            cache.close(visit)\n", "        cache.close(visit)\n"),),
        ("test_what_a_running_request_holds_is_not_evicted_and_the_next_keeps_what_fits",),
    ),
    Mutant(
        "a bound evicts what a running request holds",
        BOUNDS,
        ((" or keys[block] != victim.key or holders[block]:", " or keys[block] != victim.key:"),),
        ("test_min_equals_the_best_of_all_eviction_choices_while_requests_run",),
    ),
    Mutant(
        "a bound never evicts again what was held at its turn",
        BOUNDS,
        (
            (
                "                    if children[block] == 0:\n                        heap_push",
                "                    if children[block] == 0 and hits[i] == 0:\n"
                "                        heap_push",
            ),
        ),
        ("test_min_equals_the_best_of_all_eviction_choices_while_requests_run",),
    ),
    Mutant(
        "a request holds a block more than fits beside the others",
        BOUNDS,
        (("(holders[paths[a]] or used < capacity)", "(holders[paths[a]] or used <= capacity)"),),
        ("test_what_is_held_follows_from_the_trace_and_the_device_alone",),
    ),
    Mutant(
        "who is over at an arrival goes after it",
        SCHEDULE,
        (("np.lexsort((ends, request, time))", "np.lexsort((request, ends, time))"),),
        ("test_who_is_over_goes_before_who_arrives_in_order_of_the_ends_and_then_of_arrival",),
        quick=True,
    ),
    Mutant(
        "cold blocks that find no room on the device count as hits",
        ENGINE,
        (("            hit = placement.settle(owner)\n", "            placement.settle(owner)\n"),),
        ("test_a_request_whose_cold_blocks_find_no_room_on_the_device_hits_those_that_do",),
    ),
)
