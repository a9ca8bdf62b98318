"""Mistakes in the policy hazard.

What it remembers, what it learns, and how far it may leave LRU's order.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HAZARD = "pagedkv/_core/policies/hazard/learner.pyx"
GUARD = "pagedkv/_core/policies/hazard/guard.pyx"
VISITS = "pagedkv/_core/policies/hazard/visits.pyx"
SESSIONS = "pagedkv/_core/policies/hazard/sessions.pyx"
HISTORY = "pagedkv/_core/policies/hazard/history.pyx"
MODEL = "pagedkv/_core/policies/hazard/model.pyx"
OWNERS = "pagedkv/_core/owners.pyx"
TRANSFERS = "pagedkv/_core/transfers.pyx"
TABLE = "pagedkv/_core/block_table.pyx"
ENGINE = "pagedkv/cache/engine.py"

MUTANTS = (
    Mutant(
        "a run is used as a whole where a prompt leaves it halfway",
        HAZARD,
        (("        if k < h.pasts[q].length:\n", "        if False:\n"),),
        ("test_a_run_is_cut_where_a_prompt_leaves_it_and_its_last_block_stands_alone",),
    ),
    Mutant(
        "a part of a run teaches what its end is like",
        HAZARD,
        (("close_past(z, z.path[i], not cut or i < count - 1)", "close_past(z, z.path[i], True)"),),
        ("test_a_part_of_a_run_teaches_nothing",),
    ),
    Mutant(
        "an age that was lived through is learned again and again",
        HAZARD,
        (("                p.learned = <uint8_t>stage_end(stage)\n", ""),),
        ("test_what_was_not_used_teaches_each_age_it_lived_through_once",),
    ),
    Mutant(
        "nothing holds the policy to LRU's order",
        GUARD,
        (("    return <int64_t>room if room > 0 else 0\n", "    return 1 << 40\n"),),
        ("test_nor_with_the_window_that_everybody_has",),
    ),
    Mutant(
        "what was lost is risked again as soon as it was won back",
        GUARD,
        (("    g.room = min(g.room, g.slack * g.total - g.behind)", "    g.room = min(g.room, 1e18)"),),
        ("test_what_was_lost_and_won_back_is_not_risked_on_top_of_what_may_be_lost",),
    ),
    Mutant(
        "a block that comes back is lacking for ever",
        HAZARD,
        (("    history_keep(&z.history, q, p.length)\n", ""),),
        ("test_lru_beside_it_is_lru_and_what_it_lacks_is_what_is_not_cached",),
    ),
    Mutant(
        "what came into the cache without a request is won from LRU",
        HAZARD,
        (("    hits = min(hits, v.known) ", "    hits = max(hits, 0) "),),
        ("test_what_came_into_the_cache_without_a_request_is_won_from_nobody",),
    ),
    Mutant(
        "time goes back when the clock does",
        HAZARD,
        (("    else:\n        z.now = now\n", "    z.now = now\n"),),
        ("test_a_clock_that_steps_back_is_counted_and_stands_still",),
    ),
    Mutant(
        "a visit that is not over can be reported and ended",
        VISITS,
        ((" or not v.at[slot].live or not v.at[slot].departed:", " or not v.at[slot].live:"),),
        ("test_a_visit_is_reported_once_and_only_when_it_is_over",),
    ),
    Mutant(
        "what a visit knew and did not compute is never waited for again",
        HAZARD,
        ((" + 1)\n            history_stage(&z.history, q, stage_after(p.learned))\n", " + 1)\n"),),
        ("test_a_visit_that_used_nothing_leaves_what_it_found_as_it_was",),
    ),
    Mutant(
        "a visit that computed nothing counts as a use",
        "pagedkv/_core/policies/hazard/requests.pyx",
        (("p.owners[owner].num_blocks if used else 0, used, output", "p.owners[owner].num_blocks, True, output"),),
        ("test_a_visit_that_used_nothing_leaves_what_it_found_as_it_was",),
    ),
    Mutant(
        "nothing is ever forgotten",
        HISTORY,
        (("    while h.num_blocks > h.max_blocks and stage >= 0:\n", "    while False:\n"),),
        ("test_no_more_is_remembered_than_was_allowed",),
    ),
    Mutant(
        "what cannot be forgotten hides what could be",
        HISTORY,
        (("                history_stage(h, p, stage)      # or", "                pass      # or"),),
        ("test_what_stays_cached_for_long_does_not_keep_the_rest_from_being_forgotten",),
    ),
    Mutant(
        "a cut counts what LRU has of a run twice",
        HISTORY,
        (("    b.lru -= a.lru\n", ""),),
        ("test_lru_beside_it_is_lru_and_what_it_lacks_is_what_is_not_cached",),
    ),
    Mutant(
        "what is left of a run leads to a past that may be forgotten",
        TRANSFERS,
        (("    else:\n        end_moved(p, n)\n", ""),),
        ("test_a_run_that_was_evicted_in_part_and_then_forgotten_is_still_known_where_it_is_cached",),
    ),
    Mutant(
        "an eviction is not noticed",
        TRANSFERS,
        (("    if p.policy.on_lost != NULL:\n", "    if False:\n"),),
        ("test_lru_beside_it_is_lru_and_what_it_lacks_is_what_is_not_cached",),
    ),
    Mutant(
        "the index is the plain hazard of the next bin",
        MODEL,
        (("        while top > 0:                  # the tang", "        while False:                  # the tang"),),
        ("test_the_index_is_the_best_of_all_moments_to_stop",),
    ),
    Mutant(
        "a level learns from one bin alone",
        MODEL,
        (("        sum += g[k]\n", "        sum = g[k]\n"),),
        ("test_learning_is_adagrad_on_the_logistic_loss",),
    ),
    Mutant(
        "what a caller keeps is won from LRU",
        HAZARD,
        (("    lru_hits = max(lru_hits, min(kept, hits))\n", ""),),
        ("test_what_a_caller_keeps_is_won_from_nobody",),
    ),
    Mutant(
        "a step makes room without LRU",
        ENGINE,
        (("            self._requests.begin(rows)\n", "            pass\n"),),
        ("test_room_that_a_step_makes_is_made_by_lru_too",),
    ),
    Mutant(
        "a request is over although a fork goes on with it",
        "pagedkv/_core/policies/requests.pyx",
        ((".owner != NIL and t.rows[r].next_kin == r:\n", ".owner != NIL:\n"),),
        ("test_a_request_whose_fork_goes_on_is_not_over_when_its_row_departs",),
    ),
    Mutant(
        "LRU makes room for what may never be computed",
        HAZARD,
        (("    if hits >= num_blocks:     ", "    if True:     "),),
        ("test_lru_makes_room_when_blocks_are_computed_and_not_when_a_request_comes",),
    ),
    Mutant(
        "LRU makes room for each of those who use what one of them computes",
        HAZARD,
        (("num_blocks - max(v.known, hits) ", "num_blocks - v.known "),),
        ("test_what_another_computes_just_now_needs_room_in_lru_once",),
    ),
    Mutant(
        "what a request computes again takes no room in LRU before it is over",
        HAZARD,
        (("        history_lru_set(h, q, h.pasts[q].length)\n", ""),),
        ("test_lru_beside_it_is_lru_where_requests_hold_what_they_use",),
    ),
    Mutant(
        "LRU has room for all that runs",
        HAZARD,
        (("    too_few = history_lru_fit(h)\n", "    too_few = min(history_lru_fit(h), <int64_t>0)\n"),),
        ("test_lru_beside_it_is_lru_where_requests_hold_what_they_use",),
    ),
    Mutant(
        "who leaves lets go of what others use",
        HISTORY,
        (("    h.pasts[p].users -= 1\n", "    h.pasts[p].users = 0\n"),),
        ("test_lru_beside_it_is_lru_where_requests_hold_what_they_use",),
    ),
    Mutant(
        "what others have used since was left behind too",
        HAZARD,
        (("        if p.visit == s.serial and p.users == 0:\n", "        if p.users == 0:\n"),),
        ("test_what_others_have_used_since_was_not_left_behind",),
    ),
    Mutant(
        "what a session left behind is told twice",
        HAZARD,
        (("                p.learned = <uint8_t>bin\n", ""),),
        ("test_what_was_left_behind_has_not_been_used_up_to_then_and_says_so_once",),
    ),
    Mutant(
        "sessions of different namespaces are one",
        SESSIONS,
        (("^ <uint64_t>(root + 1) * ", "^ <uint64_t>1 * "),),
        ("test_the_same_number_in_another_namespace_is_another_session",),
    ),
    Mutant(
        "a hint that was not given is one",
        MODEL,
        (("        if f >= ALWAYS and s.x[f] == 0:\n", "        if False:\n"),),
        ("test_learning_is_adagrad_on_the_logistic_loss",),
    ),
)
