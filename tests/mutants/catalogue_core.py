"""Mistakes in the core: references, the tree, transfers, the block table."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHANGED = "write_hint(&self.num_changes, self.num_changes + 1)\n"

LENGTH = "            seq_lens[i] = last\n"
PAD = "            memset(tables + i * w + wide, 0xFF, (w - wide) * sizeof(int32_t))\n"

MUTANTS = (
    Mutant(
        "a policy may name a victim that may not go",
        "pagedkv/_core/recency.pyx",
        ((" and may_go(p, tier, n, childless)):\n        return n", "):\n        return n"),),
        ("test_a_policy_that_names_what_may_not_go_is_passed_over[careless]",),
    ),
    Mutant(
        "a reference that no owner holds can be given back",
        "pagedkv/_core/block_pool.pyx",
        (("if left >= COUNT:", "if left >= COUNT and left != 0xFFFFFFFFU:"),),
        ("test_double_release_raises_and_changes_nothing",),
    ),
    Mutant(
        "ids of one call are checked before any is counted so the same id twice passes",
        "pagedkv/_core/block_pool.pyx",
        (
            ("        counts[block] = left\n", ""),
            ("    if code == OK:\n        for i in range(p.num",
             "    if code == OK:\n        for i in range(n):\n            counts[ids[i]] -= 1\n"
             "        for i in range(p.num"),
            ("        counts[ids[j]] += 1\n    return code", "        pass\n    return code"),
        ),
        ("test_the_same_id_twice_in_one_free_counts_twice",),
        quick=True,
    ),
    Mutant(
        "a row that was stepped again is as it was",
        "pagedkv/_core/block_table.pyx",
        (("            same &= self.rows[r].step == number\n", "            same = True\n"),),
        ("test_rows_are_in_their_step_until_one_is_stepped_cut_or_released",),
    ),
    *(
        Mutant(
            f"a step looks untouched after {what}",
            "pagedkv/_core/block_table.pyx",
            ((old, old.replace("write_hint(&self.num_changes, self.num_changes + 1)", "pass")),),
            ("test_a_step_is_untouched_until_a_row_of_its_table_changes_hands",),
        )
        for what, old in (
            ("another began", f"{CHANGED}                        out.number"),
            ("a commit", f"            return code\n        {CHANGED}"),
            ("a cancel", f"        cdef int32_t i, r\n        {CHANGED}"),
            ("a cut", f"        entry.step = 0\n        {CHANGED}"),
            ("a release", f"        row.live = 0\n        {CHANGED}"),
        )
    ),
    Mutant(
        "a step that is over is committed",
        "pagedkv/_core/block_table.pyx",
        (("            if number and self.rows[r].step != number:\n", "            if False:\n"),),
        ("test_a_commit_of_a_step_that_is_over_commits_nothing",),
    ),
    Mutant(
        "a step that is over cancels another step",
        "pagedkv/_core/block_table.pyx",
        (("            if r >= 0 and (number == 0 or self.rows[r].step == number):\n", "            if r >= 0:\n"),),
        ("test_a_step_that_is_over_cancels_no_other_step",),
    ),
    Mutant(
        "blocks under the watermark are handed out",
        "pagedkv/_core/block_pool.pyx",
        (("if n > pool_available(p):", "if n > pool_available(p) + p.watermark:"),),
        ("test_the_last_blocks_under_the_watermark_are_never_handed_out",),
    ),
    Mutant(
        "the tree takes the same block twice in one insertion",
        "pagedkv/_core/placement.pyx",
        (("pool.refs[given[i]] |= TREE", "pass"),),
        ("test_blocks_that_cannot_be_inserted_change_nothing",),
    ),
    Mutant(
        "an owner of a run forgets to count its last block",
        "pagedkv/_core/transfers.pyx",
        (
            (
                "    for i in range(length):\n        pool.refs[ids[i]] += 1",
                "    for i in range(length - 1):\n        pool.refs[ids[i]] += 1",
            ),
        ),
        ("test_an_owner_holds_its_path_and_shares_it_with_other_owners",),
    ),
    Mutant(
        "a demotion takes the blocks away although an owner came back for them",
        "pagedkv/_core/transfers.pyx",
        (("    if owners > 0:", "    if False:"),),
        ("test_a_block_wanted_again_while_it_is_demoted_stays_where_it_was",),
    ),
    Mutant(
        "a promotion is visible as soon as it starts",
        "pagedkv/_core/transfers.pyx",
        (
            (
                "    p.fates[n].transfer = t.id\n",
                "    p.fates[n].transfer = t.id\n    if promotes:\n"
                "        memcpy(node_ids(p.tree, n, dst), t.dst_ids, node.length * sizeof(int32_t))\n"
                "        node.tiers |= <uint32_t>1 << dst\n",
            ),
        ),
        ("test_a_promotion_is_visible_only_when_it_is_complete",),
    ),
    Mutant(
        "a promotion that failed counts as a success",
        "pagedkv/_core/transfers.pyx",
        (("    if not succeeded:", "    if not succeeded and not promotes:"),),
        ("test_a_promotion_that_fails_is_a_miss_for_everybody",),
    ),
    Mutant(
        "an exclusive tier keeps what was promoted out of it",
        "pagedkv/_core/transfers.pyx",
        (("        if not p.inclusive[src] and not must_stay(p, n, src):", "        if False:"),),
        ("test_an_inclusive_tier_keeps_its_copy_and_an_exclusive_one_does_not",),
    ),
    Mutant(
        "what was released last goes first",
        "pagedkv/_core/recency.pyx",
        (
            (
                "    link_hottest(&p.links[tier], list_no, n)",
                "    link_between(&p.links[tier], n, ~list_no, coldest(&p.links[tier], list_no))",
            ),
        ),
        ("test_the_coldest_leaf_goes_first_and_deepest_blocks_before_their_parents",),
    ),
    Mutant(
        "an evicted block is remembered for one eviction too many",
        "pagedkv/_core/policies/ghosts.pyx",
        (
            (
                "g.count[e.queue] - e.stamp < p.pools[tier].max_capacity",
                "g.count[e.queue] - e.stamp <= p.pools[tier].max_capacity",
            ),
        ),
        ("test_a_policy_over_runs_is_the_policy_over_single_blocks",),
    ),
    Mutant(
        "a block with the same hash passes for the same block",
        "pagedkv/_core/radix_tree.pyx",
        (
            (
                "parent\n                and memcmp(node.tokens, block, t.block_size * sizeof(int32_t)) == 0):",
                "parent):",
            ),
            (
                "    if memcmp(run, tokens, length * width) == 0:\n        return length\n    for k in range(length):",
                "    for k in range(1, length):",
            ),
        ),
        ("test_blocks_whose_hashes_collide_are_told_apart_by_their_tokens",),
    ),
    Mutant(
        "a split loses the last block",
        "pagedkv/_core/radix_tree.pyx",
        (("    rest = low.length - k\n", "    rest = low.length - k - (1 if low.length - k > 1 else 0)\n"),),
        ("test_a_branch_in_the_middle_of_a_run_splits_it_and_both_are_found",),
    ),
    Mutant(
        "a block that gives way to the tree's is never given back",
        "pagedkv/_core/insertion.pyx",
        (("            pool_drop_one(p.pools[0], blocks[i])", "            pass"),),
        ("test_two_who_compute_the_same_prefix_end_with_one_copy",),
    ),
    Mutant(
        "a namespace takes more than its quota",
        "pagedkv/_core/insertion.pyx",
        (("    if quota < 0:", "    if True:"),),
        ("test_what_the_quota_does_not_admit_stays_the_callers",),
    ),
    Mutant(
        "a released owner's handle still works once its slot is used again",
        "pagedkv/_core/owners.pyx",
        (("    if next_generation(&p.owners[slot].generation):\n", "    if True:\n"),),
        ("test_a_released_owner_is_stale_even_when_its_slot_is_used_again",),
    ),
    *(
        Mutant(
            what,
            "pagedkv/_core/block_table.pyx",
            (edit,),
            ("test_a_short_row_is_padded_with_minus_one_beside_a_long_one_also_after_a_cut",),
        )
        for what, edit in (
            ("a cut row keeps blocks it gave back in its columns", ("            self.put(r, i, NIL)\n", "")),
            (
                "a row far shorter than others is not padded",
                (f"            if wide < w:\n    {PAD}{LENGTH}", LENGTH),
            ),
        )
    ),
    Mutant(
        "a fork writes into the block it shares",
        "pagedkv/_core/block_table.pyx",
        (
            ("            if row.forked and q > 0:                # blocks",
             "            if False:                # blocks"),
            ("            if row.forked and row.scheduled > 0:", "            if False:"),
        ),
        ("test_siblings_never_see_each_others_writes",),
    ),
    Mutant(
        "a cut sequence counts tokens of a block it gave back as computed",
        "pagedkv/_core/block_table.pyx",
        (("keep_computed = whole * self.block_size", "keep_computed = keep"),),
        ("test_truncated_and_grown_differently_it_holds_the_new_content",),
    ),
    Mutant(
        "a truncation into a run in flight is refused",
        "pagedkv/_core/owners.pyx",
        (("        num_blocks = p.tree.nodes[n].depth  ", "        return num_blocks  "),),
        ("test_truncating_into_a_run_that_is_being_demoted_gives_up_the_whole_run",),
    ),
    Mutant(
        "what continues a run that could not be read keeps its tier full",
        "pagedkv/_core/transfers.pyx",
        (("                n = useless(p, tier, domain)\n", "                pass\n"),),
        ("test_room_behind_a_run_that_could_not_be_read_is_looked_for_once",),
    ),
    Mutant(
        "what nothing continues is dropped for room without end",
        "pagedkv/_core/transfers.pyx",
        (("\n                        and p.tree.nodes[n].first_child != NIL):\n", "):\n"),),
        ("test_room_behind_a_run_that_could_not_be_read_is_looked_for_once",),
    ),
    Mutant(
        "a promotion takes the copy that others hang on out of a closed tier",
        "pagedkv/_core/transfers.pyx",
        (("    return p.fates[n].copying >= 0 or (p.closed[tier] and p.fates[n].below[tier] > 0)\n",
          "    return p.fates[n].copying >= 0\n"),
         ("    assert not p.closed[tier] or p.fates[n].below[tier] == 0,", "    assert True,")),
        ("test_a_promotion_leaves_the_copy_that_others_hang_on",),
    ),
    Mutant(
        "a demotion leaves the beginning of its prefix behind",
        "pagedkv/_core/transfers.pyx",
        (("not copy_path(p, p.tree.nodes[n].parent, lower, INT32_MAX, EVICTED, &group)", "False"),),
        ("test_a_demotion_takes_the_beginning_along_and_leaves_it_on_the_device",),
    ),
    Mutant(
        "what arrives behind a block that did not arrive is kept",
        "pagedkv/_core/transfers.pyx",
        (("    return not p.closed[tier] or p.tree.nodes[parent].length == 0 or", "    return True or"),),
        ("test_a_failed_copy_drops_the_copies_queued_behind_it",),
    ),
    Mutant(
        "a block does not count those behind it in a closed tier",
        "pagedkv/_core/transfers.pyx",
        (("    p.fates[node.parent].below[tier] += 1\n    p.size", "    p.size"),),
        ("test_a_copy_leaves_after_those_behind_it",),
    ),
    Mutant(
        "a run does not know that it is being copied",
        "pagedkv/_core/transfers.pyx",
        (("        p.fates[n].copying = t.id\n", ""),),
        ("test_what_is_being_copied_may_be_matched_owned_and_cut",),
    ),
    Mutant(
        "copies are begun ahead of a read",
        "pagedkv/_core/write_behind.pyx",
        (("        if p.closed[tier] and p.num_reading[tier]:\n", "        if False:\n"),),
        ("test_copies_wait_for_reads_and_for_each_other",),
    ),
    Mutant(
        "a look counts as a second use",
        "pagedkv/_core/owners.pyx",
        (("        run_own(p, child)\n        p.counters",
          "        want_found(p, child)\n        run_own(p, child)\n        p.counters"),),
        ("test_a_suspended_request_a_prefetch_a_pin_and_a_look_are_no_second_use",),
    ),
    Mutant(
        "a block that a colder tier has skips the tier below",
        "pagedkv/_core/transfers.pyx",
        (("        redundant = not mirrored or", "        redundant = True or"),),
        ("test_a_block_that_the_next_tier_lacks_goes_there_although_a_colder_one_has_it",),
    ),
    Mutant(
        "a policy compiled for other headers is registered",
        "pagedkv/_core/policies/registry.pyx",
        (("    if policy.version != POLICY_VERSION or policy.size != sizeof(Policy):\n", "    if False:\n"),),
        ("test_a_policy_that_cannot_work_is_refused",),
    ),
    Mutant(
        "a policy takes the name of another one",
        "pagedkv/_core/policies/registry.pyx",
        (("    if known.get(name, <uintptr_t>policy) != <uintptr_t>policy:\n", "    if False:\n"),),
        ("test_a_policy_that_cannot_work_is_refused",),
    ),
    Mutant(
        "a policy that learns of requests by half is registered",
        "pagedkv/_core/policies/registry.pyx",
        (("    if not (whole if policy.arrive != NULL else none):\n", "    if False:\n"),),
        ("test_a_policy_that_cannot_work_is_refused",),
    ),
    Mutant(
        "an owner of all tokens leaves none to compute",
        "pagedkv/_core/block_table.pyx",
        (("if given >= 0 and i > limit:", "if False:"),),
        ("test_an_owner_of_all_tokens_leaves_some_to_compute",),
    ),
    Mutant(
        "of several entries for a transfer the first one decides",
        "pagedkv/_core/placement.pyx",
        (("good, begin = good and arrived[last] != 0, begin or", "begin = begin or"),),
        ("test_a_transfer_of_which_one_entry_failed_has_failed_as_a_whole",),
    ),
    Mutant(
        "entries for a transfer that lie apart are completed one by one",
        "pagedkv/_core/placement.pyx",
        (("        elif not is_grouped(ids):", "        elif False:"),),
        ("test_a_transfer_of_which_one_entry_failed_has_failed_as_a_whole",),
    ),
    *(
        Mutant(f"rows that follow others: {name}", "pagedkv/_core/block_table.pyx", edits, killers)
        for name, edits, killers in (
            (
                "a block that the leader only begins is named",
                (("> blocks_in(start + q, self", "> blocks_in(start + q + self.block_size - 1, self"),),
                ("test_a_row_follows_no_further_than_whole_blocks_of_equal_tokens_that_the_leader_writes",),
            ),
            (
                "a leader that computes nothing is followed",
                (("            if q <= 0 or until[i] >", "            if until[i] >"),),
                ("test_a_leader_that_computes_nothing_in_the_step_is_not_followed",),
            ),
            (
                "namespaces share",
                (("r == leader or row.root != other.root or", "r == leader or"),),
                ("test_rows_of_two_namespaces_never_share", "test_nothing_crosses_a_namespace"),
            ),
            (
                "other tokens are taken for the same",
                ((" and memcmp(row.tokens + own * bs, other.tokens + own * bs, bs * sizeof(int32_t)) == 0:", ":"),),
                ("test_a_follower_may_leave_its_leader_in_the_middle_of_a_run",),
            ),
            (
                "what lies before the first block that both hold is not looked at",
                (("if own > 0 and ours[own - 1] != theirs[own - 1]:", "if False:"),),
                ("test_rows_of_other_beginnings_do_not_share_what_follows",),
            ),
            (
                "rows share that hold different blocks which the tree has refused",
                (("if memcmp(ours + own, theirs + own, (first - own) * sizeof(int32_t)) != 0:", "if False:"),),
                ("test_rows_that_hold_different_blocks_which_the_tree_refused_do_not_share",),
            ),
            (
                "followers take references",
                (("        tie.until, tie.leader = until, leader\n",
                  "        tie.until, tie.leader = until, leader\n        for j in range(first, until):\n"
                  "            self.pool.refs[table[j]] += 1\n"),),
                ("test_followers_compute_only_what_their_leader_does_not_and_all_is_cached",),
            ),
            (
                "followers are committed before their leaders",
                ((" or self.ties[r].leader != NIL:\n", ":\n"),),
                ("test_leaders_are_committed_first_whatever_the_order_of_the_rows",),
            ),
            (
                "followers are committed without their leaders",
                ((" or self.ties[r].leader != NIL:\n", ":\n"),
                 (" and self.rows[self.ties[r].leader].marked != self.batch:", " and False:")),
                ("test_a_follower_without_its_leader_is_not_committed_and_nothing_changes",),
            ),
            (
                "followers keep their leader's blocks when a step is cancelled",
                (("                if self.num_following:\n                    self.part(r)\n"
                  "                self.rows[r].scheduled", "                self.rows[r].scheduled"),),
                ("test_a_cancelled_step_leaves_followers_as_they_were",),
            ),
            (
                "followers keep the blocks of a leader that is cut back",
                (("        if self.num_following:\n            self.part(r)\n        entry.scheduled = 0",
                  "        entry.scheduled = 0"),),
                ("test_whatever_ends_a_leader_or_a_follower_takes_followers_out_of_the_step",),
            ),
            (
                "followers keep the blocks of a leader that is stepped again",
                (("                if r >= 0:\n                    self.part(r)\n", "                pass\n"),),
                ("test_whatever_ends_a_leader_or_a_follower_takes_followers_out_of_the_step",),
            ),
            (
                "followers of followers stay in a step that their leader has left",
                (("            self.part(self.ties[r].follower)\n",
                  "            self.unlink(self.ties[r].follower)\n"),),
                ("test_a_leader_that_goes_takes_followers_of_followers_with_it",),
            ),
            (
                "a row that follows another one may be named before it is filled",
                (("        if data[follower] not in seen:\n", "        if False:\n"),),
                ("test_a_follower_can_be_followed_and_goes_before_its_followers",),
            ),
            (
                "blocks that the tree refuses are named without a reference",
                (("            self.pool.refs[theirs[j]] += 1\n", ""),),
                ("test_rows_take_references_on_blocks_that_the_tree_refuses",),
            ),
            (
                "a row in a step catches up",
                (("                    if row.step or blocks_in(", "                    if blocks_in("),),
                ("test_a_row_in_a_step_stays_as_it_is",),
            ),
            (
                "a row that catches up keeps its copy of its next block",
                (("    pool_drop_one(self.pool, self.table[<int64_t>r * self.width + j])\n"
                  "                            self", "    self"),),
                ("test_a_row_goes_on_from_blocks_that_came_since_it_was_opened",),
            ),
        )
    ),
    *(
        Mutant(
            f"a row catches up with blocks {where}",
            "pagedkv/_core/owners.pyx",
            ((guard, ""),),
            ("test_a_row_does_not_go_on_into_cold_blocks",),
        )
        for where, guard in (
            ("on their way to the host", "p.fates[child].transfer >= 0 or "),
            ("of the host", " or node_top(t, child) != 0"),
        )
    ),
    Mutant(
        "blocks that one row takes from another count as used once",
        "pagedkv/_core/owners.pyx",
        (("    if done:\n        want_found(p, p.owners", "    if False:\n        want_found(p, p.owners"),),
        ("test_blocks_that_two_prompts_of_a_step_share_count_as_used_twice",),
    ),
)
