"""Mistakes in what moves blocks between tiers: the conductor, admission, scrub, the mover and its tickets."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MOVING, MOVER, TICKET = "pagedkv/moving.py", "pagedkv/tiers/mover.py", "pagedkv/tiers/ticket.py"
SCRUB, ADMISSION, CACHE = "pagedkv/scrub.py", "pagedkv/admission.py", "pagedkv/cache.py"

CONDUCTOR = (
    Mutant(
        "a promotion is served before it is over", "pagedkv/_core/transfers.pyx",
        (("    p.fates[n].transfer = t.id\n",
          "    p.fates[n].transfer = t.id\n    if promotes:\n"
          "        memcpy(node_ids(p.tree, n, dst), t.dst_ids, node.length * sizeof(int32_t))\n"
          "        node.tiers |= <uint32_t>1 << dst\n"),),
        ("test_the_proof_holds[schedules]",), 300,
    ),
    Mutant(
        "a failed promotion is served", MOVING,
        (("        transfers, ok = ticket.results()\n",
          "        transfers, ok = ticket.results()\n        ok = ok | (moves['dst_tier'][0] == DEVICE)\n"),),
        ("test_the_proof_holds[schedules]",), 300,
    ),
    Mutant(
        "what a damaged or failing disk gave is served", MOVING,
        (("        transfers, ok = ticket.results()\n",
          "        transfers, ok = ticket.results()[0], np.ones_like(ticket.results()[1])\n"),),
        ("test_the_proof_holds[machine]",), 8000,
    ),
    Mutant(
        "a demotion that admission refused is told to have arrived", MOVING,
        (("        never = np.zeros(len(transfers), np.bool_)\n",
          "        never = np.ones(len(transfers), np.bool_)\n"),),
        ("test_a_disk_hit_slower_than_computing_is_declined_counted_and_kept",
         "test_second_hit_writes_only_what_was_asked_for_again",
         "test_what_is_refused_leaves_no_block_whose_prefix_is_gone"),
    ),
    Mutant(
        "what loads slower than it computes is loaded", "pagedkv/matching.py",
        (("        if worth < len(tiers):", "        if False:"),),
        ("test_a_disk_hit_slower_than_computing_is_declined_counted_and_kept",),
    ),
    Mutant(
        "the write budget is never used up", ADMISSION,
        (("if num_bytes > self._left and not overdraw and self._left < self._room:", "if False:"),),
        ("test_a_budget_allows_an_hours_share_at_once_and_its_rate_after_that",),
    ),
    Mutant(
        "a purge is not told to the disk", CACHE,
        (("            if self._store is not None:\n                self._store.purge(",
          "            if False:\n                self._store.purge("),),
        ("test_the_proof_holds[machine]",), 20_000,
    ),
    Mutant(
        "a purge does not wait for what is on its way to the disk", CACHE,
        (("        self._conductor.drain_namespace(root)  # what is on its way", "        # what is on its way"),),
        ("test_the_proof_holds[schedules]",), 2000,
    ),
    Mutant(
        "a block that another namespace filled is not zeroed", SCRUB,
        (("            zero(blocks)\n", ""),),
        ("test_the_unwritten_tail_of_a_block_shows_nothing_of_another_namespace",),
    ),
    Mutant(
        "what a failed promotion read stays in its blocks", MOVING,
        (('            self._scrub.spoilt(moves["dst_block"][upward & ~arrived])\n', ""),),
        ("test_what_a_failed_promotion_read_shows_in_nobodys_block",),
    ),
    Mutant(
        "a promoted block is not known to be its namespace's", MOVING,
        (("                self._scrub.holds(part[", "                len(part["),),
        ("test_a_promoted_block_is_known_to_be_its_namespaces",),
    ),
)  # fmt: skip

MOVERS = (
    Mutant(
        "a ticket is settled when its first part is over", TICKET,
        (("            last = self._pending == 0\n", "            last = True\n"),),
        ("test_a_ticket_is_not_done_before_its_last_part",),
    ),
)  # fmt: skip

HANGS = (
    Mutant(
        "what a read that is not waited for may still write is given to somebody else", MOVING,
        (("            pool.incref(blocks)\n", "            pass\n"),
         ("                pool.free(blocks)\n", "                pass\n")),
        ("test_a_request_goes_on_after_its_deadline_and_a_late_read_lands_in_nobodys_block",),
    ),
    Mutant(
        "what a read that was not waited for has filled is never free again", MOVING,
        (("                pool.free(blocks)\n", "                pass\n"),),
        ("test_a_request_goes_on_after_its_deadline_and_a_late_read_lands_in_nobodys_block",),
    ),
    Mutant(
        "a read that comes back too late is served", TICKET,
        (("            if ok is not None and not left:\n", "            if ok is not None:\n"),),
        ("test_a_read_is_left_at_its_deadline_and_what_it_does_later_changes_nothing",),
    ),
    Mutant(
        "a store that hangs is sent one call after the other", MOVER,
        (("                    queued = [part for part in parts if part.store not in hanging]\n",
          "                    hanging = set()\n                    queued = list(parts)\n"),),
        ("test_a_call_that_hangs_is_left_its_store_is_told_and_nobody_else_is_sent_there",),
    ),
    Mutant(
        "what a store that is off did not look for is taken to be gone", MOVER,
        (("    if ok is not None and off:\n", "    if False:\n"),),
        ("test_a_read_that_a_store_refused_says_nothing_against_what_is_there",
         "test_what_is_asked_for_in_the_rest_after_a_hang_stays_on_the_disk"),
    ),
    Mutant(
        "a log that raises loses the result of a call that is left", "pagedkv/tiers/overdue.py",
        (("    finally:\n        for part in left:\n", "    finally:\n        for part in left:\n"
          "            log_once(shared, part, TimeoutError, 'the tier does not answer in time')\n"),),
        ("test_who_is_interrupted_while_a_hang_is_logged_costs_nobody_the_result",),
    ),
)  # fmt: skip

MUTANTS = CONDUCTOR + MOVERS + HANGS
