"""Mistakes in the groups of layers: needs, tails, points, extents."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TAILS, POINTS, TABLE = "pagedkv/_core/tails.pyx", "pagedkv/_core/points.pyx", "pagedkv/_core/block_table.pyx"
ROOM, MOVES, POOL = "pagedkv/_core/group_room.pyx", "pagedkv/_core/tail_moves.pyx", "pagedkv/_core/block_pool.pyx"
NEEDS, COPIES = "pagedkv/scheduler/needs.py", "pagedkv/_core/point_copies.pyx"
COMPUTED = "blocks_in(row.computed, self.block_size, self.shift)"
AGREES = "test_the_core_over_groups_is_the_models_equal[{}]"

MUTANTS = (
    Mutant(
        "a window needs a block less", TAILS,
        (("    return k if k < g.window[group] else g.window[group]\n",
          "    return k if k < g.window[group] - 1 else g.window[group] - 1\n"),),
        (AGREES.format("window 5"),),
    ),
    Mutant(
        "a chunk needs nothing", TAILS,
        (("        return k % g.chunk[group]\n", "        return 0\n"),),
        (AGREES.format("chunk 6"),),
    ),
    Mutant(
        "half a tail makes a point", TAILS,
        (("        to_pages(p, n, tier, group, k - need(p.groups, group, k), k, what)\n",
          "        to_pages(p, n, tier, group, k - (need(p.groups, group, k) + 1) // 2, k, what)\n"),),
        (AGREES.format("window 16"),),
    ),
    Mutant(
        "a point does not keep its run", TAILS,
        (("    f.kids[hottest_of(f.tails)] += 1\n    link_hottest", "    link_hottest"),
         ("    unlink(&p.groups.points[tier], n)\n    f.kids[hottest_of(f.tails)] -= 1\n",
          "    unlink(&p.groups.points[tier], n)\n")),
        (AGREES.format("window 5"),),
    ),
    Mutant(
        "a dead end stays", ROOM,
        (("        give_up_path(p, n, tier)\n    drop_dead_end(p, n)\n", "        give_up_path(p, n, tier)\n"),),
        (AGREES.format("window 5"),),
        quick=True,
    ),
    Mutant(
        "a hit does not hold its tail", "pagedkv/_core/owners.pyx",
        (("        tail_own(p, owner)\n        if done:", "        if done:"),),
        (AGREES.format("window 2"),),
    ),
    Mutant(
        "a point is as old as its first use", TAILS,
        (("    p.fates[n].point = p.clock\n    point_unlink(p, n)\n    point_link(p, n)\n",
          "    p.fates[n].point = p.clock\n"),),
        ("test_the_point_used_longest_ago_goes_first_and_with_it_all_that_only_it_kept",),
    ),
    Mutant(
        "the end of a sequence is no point", TABLE,
        (("                point_make(&self.placement.place, row.owner, row.num_owned)\n", "                pass\n"),),
        (AGREES.format("window 5"),),
    ),
    Mutant(
        "where requests part is no point", TABLE,
        (("            point_make(p, row.owner, row.agreed)\n", "            pass\n"),),
        ("test_where_two_requests_part_is_hit_from_the_third_on",),
    ),
    Mutant(
        "drafts cost the row its window", TABLE,
        (("        kept = max(0, row.num_owned - row.spare)\n", "        kept = row.num_owned\n"),),
        ("test_drafts_that_are_cut_off_leave_the_window_behind_them",),
    ),
    Mutant(
        "a fork writes into the page that it shares", TABLE,
        (("                for j in range(max(row.num_owned, column), row.paged):\n",
          "                for j in range(row.paged, row.paged):\n"),
         (f"            for j in range(max(row.num_owned, {COMPUTED}), row.paged):\n",
          "            for j in range(row.paged, row.paged):\n")),
        ("test_a_fork_shares_pages_and_copies_the_one_that_it_writes",),
    ),
    Mutant(
        "a page that two rows hold as their own becomes the tree's", TABLE,
        (("            full = self.own_pages(r, full)\n", "            pass\n"),),
        ("test_a_page_that_two_forks_hold_as_their_own_is_not_the_trees",),
    ),
    Mutant(
        "an extent stays with its pool", POOL,
        (("    if p.used_in[extent] == 0:\n", "    if False:\n"),),
        ("test_an_extent_belongs_to_one_pool_and_goes_back_with_its_last_block",),
    ),
    Mutant(
        "a page that points alone hold keeps its extent from others", TAILS,
        (("    if left == pool.marks[page] and left > 0:\n        pool_cache(pool, &page, 1)\n",
          "    pool.num_cached += left == pool.marks[page] and left > 0\n"),),
        ("test_what_could_be_had_is_what_eviction_brings",),
    ),
    Mutant(
        "a tail that is on its way may be let go of", MOVES,
        (("        to_page(p, w.n, src, w.group, w.i, MARK)\n", ""),
         ("        to_page(p, w.n, t.src, w.group, w.i, UNMARK)\n", "")),
        ("test_random_requests_read_what_they_stand_for",),
    ),
    Mutant(
        "owners of a page that rises hold the colder one", MOVES,
        (("            holds_rise(p, w.n, t.dst, w.group, w.i)\n", "            pass\n"),),
        ("test_what_leaves_the_device_is_found_again_as_a_whole",),
    ),
    Mutant(
        "a page computed anew leaves its owners the colder one", TAILS,
        (("                holds_rise(p, n, DEVICE, group, i)\n", ""),),
        ("test_random_requests_read_what_they_stand_for",),
    ),
    Mutant(
        "a request that comes back for a tail loses its point", MOVES,
        (("not t.promotes and p.fates[n].point != t.clock ", "not t.promotes and p.fates[n].point == 0 "),),
        ("test_a_request_that_comes_back_during_a_demotion_finds_all_of_it",),
    ),
    Mutant(
        "a tail that could not be read is hit again", MOVES,
        (("    elif not copies and (tried if t.promotes else not stays):",
          "    elif not copies and not t.promotes and not stays:"),),
        ("test_a_tail_that_cannot_be_read_costs_its_hit_and_nothing_else",),
    ),
    Mutant(
        "room that is on its way is made again", ROOM,
        (("        if (leaving(p, tier) >= missing\n                or not", "        if (not"),),
        ("test_room_that_is_on_its_way_is_not_made_twice",),
    ),
    Mutant(
        "a tail counts as cold by the spine's blocks alone", "pagedkv/_core/placement.pyx",
        (("            tail_cold(p, n, more)\n", "            memset(more, 0, MAX_GROUPS * sizeof(int64_t))\n"),),
        ("test_a_tail_goes_before_its_spine_and_a_hit_brings_it_alone",),
    ),
    Mutant(
        "a prompt that no tier below holds pushes all others out", ROOM,
        (("    return fits >= 1\n", "    return True\n"),),
        ("test_a_prompt_that_no_tier_below_holds_leaves_the_others_there",),
    ),
    Mutant(
        "the newest blocks of a namespace are lost to its quota below", ROOM,
        (("    if more[0] > quota_left(p, n, lower): ", "    if False: "),),
        ("test_a_quota_bounds_what_a_namespace_has_in_the_host",),
    ),
    Mutant(
        "a tail that is being read counts as a run", "pagedkv/_core/transfers.pyx",
        (("            blocks += unowned_pages(p, t)\n", "            blocks += t.num_blocks\n"),),
        ("test_a_tail_that_comes_for_nobody_is_room_to_come",),
    ),
    Mutant(
        "runs of the namespaces with quotas are looked at for a class alone", ROOM,
        (("            if found != NIL:\n                break\n",
          "            if best != NIL or found != NIL:\n                break\n"),),
        ("test_of_two_namespaces_the_coldest_run_goes_first",),
    ),
    Mutant(
        "a tail on its way for another is taken for one of one's own", "pagedkv/_core/owners.pyx",
        (("    if p.groups != NULL and done and done == total and tail_rises(p, n):\n", "    if False:\n"),),
        ("test_a_request_that_finds_a_tail_on_its_way_for_another_waits_for_it",),
    ),
    Mutant(
        "a path is cut amid a run that moves", "pagedkv/_core/owners.pyx",
        (("        if p.tree.nodes[n].depth + p.tree.nodes[n].length <= num_blocks or p.fates[n].transfer < 0:\n",
          "        if True:\n"),),
        ("test_a_sequence_is_cut_back_while_its_run_is_on_its_way_down",),
    ),
    Mutant(
        "a boundary that has gone is told for ever", TAILS,
        (("    event_point(p, EVENT_NOT_RESUMABLE, n, tier)\n", ""),),
        ("test_a_cache_by_groups_publishes_its_spine_and_tells_where_requests_go_on",),
    ),
    Mutant(
        "a run that could not be read leaves its boundary told", "pagedkv/_core/telling.pyx",
        (("            event_point(p, EVENT_RESUMABLE if kind == EVENT_STORED else EVENT_NOT_RESUMABLE, n, tier)\n",
          "            pass\n"),),
        ("test_random_requests_read_what_they_stand_for",),
    ),
    Mutant(
        "pages of short groups are copied as the first group's", "pagedkv/cache/group_mover.py",
        (('        told["src_tier"] += LANE * told["lane"]\n', ""),
         ('        told["dst_tier"] += LANE * told["lane"]\n', "")),
        ("test_prompts_that_went_to_the_host_attend_as_if_they_had_stayed[windows]",),
    ),
    Mutant(
        "a tail is not loaded where its spine is on the device", "pagedkv/cache/load.py",
        (("(held.num_cold or held.cold_tail)", "held.num_cold"),),
        ("test_a_tail_alone_is_loaded_behind_a_spine_that_has_stayed",),
    ),
    Mutant(
        "a scheduler does not count the pages of short groups", NEEDS,
        (("        return not self._placement.could_have(amount.counts)\n",
          "        return not self._placement.could_have(self._spine(int(amount.counts[0])).counts)\n"),),
        ("test_a_step_finds_room_for_the_pages_of_every_group",),
    ),
    Mutant(
        "a request that is to begin anew finds its scattered pages", "pagedkv/scheduler/running.py",
        (("        self._placement.clear()\n", ""),),
        ("test_a_request_left_alone_with_scattered_pages_begins_anew_by_itself",),
    ),
    Mutant(
        "others begin beside a request that is to run by itself", "pagedkv/scheduler/admission.py",
        (("        if alone is not None and not alone.ended:\n", "        if False:\n"),),
        ("test_a_request_left_alone_with_scattered_pages_begins_anew_by_itself",),
    ),
    Mutant(
        "a request that does not even fit by itself keeps others out", "pagedkv/scheduler/aside.py",
        (("            running.alone = None\n", "            pass\n"),),
        ("test_a_request_that_does_not_even_fit_by_itself_lets_others_go_on",),
    ),
    Mutant(
        "pages of another namespace are not zeroed", "pagedkv/cache/scrub.py",
        (("                zero(group, self._given(part, starts, lookahead, none)[0])\n", "                pass\n"),),
        ("test_no_page_shows_another_namespaces_numbers",),
    ),
    Mutant(
        "a point is restored without its whole tail", "pagedkv/cache/points_found.py",
        (("= np.all(begins <= boundaries - needs, axis=0)", "= np.ones(len(run.found), np.bool_)"),),
        ("test_after_a_crash_each_prompt_hits_as_far_as_the_store_allows",),
    ),
    Mutant(
        "of a long stretch of pages the last ones alone are restored", "pagedkv/cache/points_found.py",
        (("        if step:\n", "        if False:\n"),),
        ("test_after_a_crash_each_prompt_hits_as_far_as_the_store_allows",),
    ),
    Mutant(
        "a path is written before the tail of its point", COPIES,
        (("    if missing <= most and not has_point_in(p, n, tier):\n",
          "    copy_path(p, n, tier, <int32_t>more[0], reason, &group)\n"
          "    if missing <= most and not has_point_in(p, n, tier):\n"),),
        ("test_a_tail_is_decided_before_the_last_blocks_of_its_path",),
    ),
    Mutant(
        "a copy of a tail takes its point along", MOVES,
        (("            if not copies and not stays and not", "            if not stays and not"),),
        ("test_a_copied_point_is_where_it_was_and_below",),
    ),
    Mutant(
        "a tail on its way down is not read up", MOVES,
        (("    return rising_tail(p, n) >= 0\n", "    return p.fates[n].tails & ~POINTS != 0\n"),),
        ("test_a_tail_is_read_while_a_copy_of_it_goes_down",),
    ),
    Mutant(
        "a tail that is refused is asked for without end", "pagedkv/_core/write_behind.pyx",
        (("blocks + (blocks >= 0 and p.groups != NULL and lacks_point(p, n, tier))", "blocks"),),
        ("test_a_copy_that_is_refused_is_not_asked_for_without_end",),
    ),
    Mutant(
        "a new quota counts the pages of a tail on its way", "pagedkv/_core/retention.pyx",
        ((" and p.transfers[i].copies and not p.transfers[i].is_tail\n", " and p.transfers[i].copies\n"),),
        ("test_a_quota_that_comes_amid_a_copy_counts_no_pages_of_its_tail",),
    ),
    Mutant(
        "a closed tier keeps paths that lead to no point", ROOM,
        (("    if p.closed[tier]:\n        give_up_path(p, n, tier)\n", ""),),
        ("test_a_full_closed_tier_loses_its_coldest_points_whole",),
    ),
    Mutant(
        "a checkpoint takes the place of hotter points", "pagedkv/_core/write_behind.pyx",
        (("ASKED, INT64_MAX if in_use(p, n) else p.fates[n].point)", "ASKED, INT64_MAX)"),),
        ("test_a_checkpoint_takes_no_place_of_what_was_used_later",),
    ),
    Mutant(
        "copies go on while a tail is read from below", MOVES,
        (("    p.num_reading[src] += t.promotes\n", ""), ("    p.num_reading[src] -= t.promotes\n", "")),
        ("test_nothing_is_copied_while_a_tail_is_read_from_below",),
    ),
    Mutant(
        "a mirrored run never comes to the host", ROOM,
        (("    if lower == NIL or others == 0:\n        return lower != NIL\n",
          "    if True:\n        return others == 0 and lower != NIL\n"),),
        ("test_a_mirrored_point_goes_to_the_host_all_the_same",),
    ),
    Mutant(
        "an extent changes hands with its former headers", "pagedkv/tiers/disk/lanes.py",
        (("if other != lane and not self.slots[other].bury(there).all():\n", "if there is None:\n"),),
        ("test_an_extent_that_changes_hands_forgets_its_former_pages",
         "test_damaged_headers_in_an_extent_of_no_lane_do_no_harm_to_the_next_one",
         "test_a_purged_page_does_not_come_back_from_an_extent_that_changed_hands"),
    ),
    Mutant(
        "pages that points share go down with each of them", MOVES,
        (("            if is_leaving(p, &w, src, dst):\n                return E_STATE\n", ""),),
        ("test_pages_that_points_share_go_down_once",
         "test_pages_that_points_share_are_copied_once_to_a_closed_tier"),
    ),
    Mutant(
        "a copy that waits for a shared page is forgotten", COPIES,
        (("            return UNDER_WAY if code == E_STATE else 0\n", "            return 0\n"),),
        ("test_pages_that_points_share_are_copied_once_to_a_closed_tier",),
    ),
    Mutant(
        "a row takes an owner without its tail", TABLE,
        ((" and self.owns_tail(slot)):\n", "):\n"),),
        ("test_a_row_takes_no_owner_without_the_pages_of_its_end",),
    ),
    Mutant(
        "a replay leaves moves under way", "pagedkv/lab/replay/engine_groups.py",
        (("        self._answer_moves()  # room that came from dropped blocks may leave moves beside it\n", ""),),
        ("test_no_move_is_under_way_when_the_next_request_comes",),
    ),
    Mutant(
        "a tail overdraws the write budget", "pagedkv/cache/dispatcher.py",
        (("            continued = continued and num_blocks > 0", "            continued = continued"),),
        ("test_a_write_budget_is_of_the_bytes_of_pages",),
    ),
    Mutant(
        "a block that spans extents gives back the first alone", POOL,
        (("    for _i in range(p.span):\n        e.owner", "    for _i in range(1):\n        e.owner"),),
        ("test_memory_that_is_counted_is_given_back_to_the_last_unit",),
    ),
    Mutant(
        "making room takes whole runs", ROOM,
        (("(missing + pool.span - 1) // pool.span * pool.per_extent, -1, before)", "p.tree.max_run, -1, before)"),),
        ("test_of_two_namespaces_the_coldest_run_goes_first", "test_every_request_hits_as_the_rule_says"),
    ),
    Mutant(
        "a kept boundary leaves the caller's references on its pages", POINTS,
        (("                to_page(p, n, DEVICE, group, i, LET)\n                left += 1\n",
          "                left += 1\n"),),
        ("test_boundaries_share_pages_and_the_last_one_to_go_frees_them",),
    ),
    Mutant(
        "an owner that retraces keeps the pages of its hit", "pagedkv/_core/owners.pyx",
        (("    tail_disown(p, owner)\n    done = own_runs", "    done = own_runs"),),
        ("test_every_request_hits_as_the_rule_says",),
    ),
    Mutant(
        "a replay keeps no boundary where requests part", "pagedkv/lab/replay/engine_groups.py",
        (("        if hit < agreed:\n            wanted.add(agreed)\n", ""),),
        ("test_the_hits_are_those_of_the_rule_as_exact_integers",),
    ),
    Mutant(
        "headers that a crash brings back stay beside those of another lane", "pagedkv/tiers/disk/settle.py",
        (("        torn.append(np.intersect1d(own[mine], np.concatenate(hit)))\n", "        torn.append(own[:0])\n"),),
        ("test_headers_of_two_lanes_in_one_extent_are_those_of_the_last_one",),
    ),
    Mutant(
        "a header from the future wins its extent", "pagedkv/tiers/disk/settle.py",
        (("given < next_generation, ", "given > 0, "),),
        ("test_a_header_from_the_future_does_not_win_its_extent",),
    ),
    Mutant(
        "a header from the future wins its key", "pagedkv/tiers/disk/slots.py",
        (("        order = order[~surplus[order]]\n", ""),),
        ("test_a_header_from_the_future_does_not_win_its_key",),
    ),
    Mutant(
        "a page is written where a header could not be buried", "pagedkv/tiers/disk/lanes.py",
        (("        self._lane_of[left // self._per_extent[lane]] = NO_LANE\n", ""),),
        ("test_a_header_that_cannot_be_buried_at_the_opening_is_buried_before_a_page_is_written_there",),
    ),
    Mutant(
        "headers of other lanes keep purges on record", "pagedkv/tiers/disk/scan.py",
        (('                is_header &= found["fingerprint"] != fingerprint\n', "                pass\n"),),
        ("test_headers_of_another_lane_are_no_reason_to_keep_purges_on_record",),
    ),
    Mutant(
        "a repair writes over pages of another group", "pagedkv/tools/store/scan.py",
        (('if is_others[i] and states[i] != "tombstone":', "if False:"),),
        ("test_a_part_of_a_header_beside_a_good_page_of_another_group_stays",),
    ),
    Mutant(
        "a page in an extent of another group is live for the tools", "pagedkv/tools/store/scan.py",
        (("elif is_others[i] and not is_new[i]:", "elif False:"),),
        ("test_taken_pages_of_group_0_are_counted_by_inspect",),
    ),
    Mutant(
        "a broken page is live for the tools", "pagedkv/tools/store/scan.py",
        (("elif is_torn[i] and not is_new[i]:", "elif False:"),),
        ("test_headers_that_a_power_failure_brought_back_count_for_no_tool",),
    ),
    Mutant(
        "an extent that changes hands during a check is wrong", "pagedkv/tools/store/scan.py",
        (("elif is_others[i] and not is_new[i]:", "elif is_others[i]:"),),
        ("test_an_extent_that_changes_hands_while_it_is_checked_is_not_wrong",),
    ),
    Mutant(
        "the rest of a tombstone is wrong", "pagedkv/tools/store/scan.py",
        (('form.geometry.extent_slots and not any(found["key"].tobytes())', "False"),),
        ("test_use_and_crashes_alone_leave_nothing_wrong",),
    ),
    Mutant(
        "a repair does not look again where it has emptied an extent", "pagedkv/tools/store/repair.py",
        (("            if state.lanes:\n", "            if False:\n"),),
        ("test_a_repair_looks_again_where_it_has_buried_the_last_page_of_an_extent",),
    ),
    Mutant(
        "tombstones of several groups tear each other", "pagedkv/tools/store/repair.py",
        (("sorted(places, reverse=True)", "sorted(places)"),),
        ("test_damaged_headers_over_each_other_leave_no_doubt_after_a_repair",),
    ),
    Mutant(
        "a purge is forgotten beside a header that cannot be read", "pagedkv/tiers/disk/lanes.py",
        (("        is_done = all(done) and self._is_sure\n", "        is_done = all(done)\n"),),
        ("test_a_header_that_cannot_be_read_in_the_extent_of_another_lane_keeps_purges_on_record",),
    ),
    Mutant(
        "a store hangs in one lane alone", "pagedkv/tiers/mover/hangs.py",
        (("    return number % LANE\n", "    return number\n"),),
        ("test_a_disk_that_hangs_in_one_lane_hangs_in_all",),
    ),
    Mutant(
        "a store of other groups of layers is opened", "pagedkv/tiers/disk/store.py",
        (("        if found.lanes != self.lanes:\n", "        if False:\n"),),
        ("test_a_store_of_other_groups_is_refused_with_the_group",),
    ),
    Mutant(
        "a recording takes half a tail for a point's", "pagedkv/lab/recording/group_snapshot.py",
        (("num_blocks - group.need(num_blocks))\n", "num_blocks - (group.need(num_blocks) + 1) // 2)\n"),),
        ("test_after_random_steps_the_pages_are_those_of_the_books_and_the_bytes",),
    ),
    Mutant(
        "a recording begins a sequence's pages at its first block", "pagedkv/lab/recording/group_snapshot.py",
        (("enumerate(table.pages, start=table.first)", "enumerate(table.pages)"),),
        ("test_after_random_steps_the_pages_are_those_of_the_books_and_the_bytes",),
    ),
    Mutant(
        "a recording does not hear of the pages that move", "pagedkv/lab/recording/group_snapshot.py",
        (("        if move.group:\n            source, target", "        if False:\n            source, target"),),
        ("test_a_page_on_the_move_is_told_at_both_ends_with_what_it_holds",),
    ),
    Mutant(
        "a recording with pages in extents of other groups is read", "pagedkv/lab/recording/group_reader.py",
        (("!= group:\n                    raise", "is None:\n                    raise"),),
        ("test_books_over_groups_that_contradict_themselves_are_refused_with_the_place",),
    ),
    Mutant(
        "a copy takes pages that lie apart for neighbours", "pagedkv/tiers/cuda_copy.py",
        (("    if not src_stride == dst_stride == block_bytes:\n", "    if False:\n"),),
        ("test_pages_that_lie_apart_move_one_by_one_and_after_the_kernels",),
    ),
    Mutant(
        "a copy forgets the distance between pages", "pagedkv/tiers/cuda_copy.py",
        (("int(dst_blocks[start]) * dst_stride", "int(dst_blocks[start]) * block_bytes"),),
        ("test_pages_that_lie_apart_move_one_by_one_and_after_the_kernels",),
    ),
    Mutant(
        "pages move before the kernels that write them are done", "pagedkv/tiers/mover/transfer.py",
        (("isinstance(tier, DeviceTier | DeviceLane)", "isinstance(tier, DeviceTier)"),),
        ("test_a_mover_of_groups_moves_the_pages_of_a_gpu",),
    ),
    Mutant(
        "the pages of a GPU are moved as if they lay in the host's memory", "pagedkv/cache/group_mover.py",
        (("                        if isinstance(tier, DeviceTier)\n", "                        if False\n"),),
        ("test_a_mover_of_groups_moves_the_pages_of_a_gpu",),
    ),
    Mutant(
        "pages move as if memory were page-locked by pages", "pagedkv/cache/group_mover.py",
        (("ArenaTier(tier.name, pages, tier.gpu, tier.piece_bytes)", "ArenaTier(tier.name, pages, tier.gpu)"),),
        ("test_no_copy_of_a_groups_pages_reaches_into_the_next_page_locked_piece",),
    ),
    Mutant(
        "pages leave their scales behind", "pagedkv/cache/group_mover.py",
        (("tier.arena.reshape(-1, stride)[:, :size]", "tier.arena.reshape(-1, stride)[:, : size * 2 // 3]"),),
        ("test_a_request_that_was_swapped_to_the_host_goes_on_with_the_right_tokens",),
    ),
    Mutant(
        "a gather on a GPU puts a group's layers first", "pagedkv/cache/gpu_group_kv.py",
        (("out, self.layout.groups[number].layers, layout)", "out, range(len(kv._layers)), layout)"),),
        ("test_gathers_of_all_groups_are_those_of_the_cpu",),
    ),
    Mutant(
        "pages that lie apart are cut out before their bytes become numbers", "pagedkv/cache/gpu_group_kv.py",
        (("GpuKV(group.spec, rows, *shared, int(rows.shape[1]), self._lock)",
          "GpuKV(group.spec, rows[:, : group.page_bytes], *shared)"),),
        ("test_views_of_pages_that_lie_apart_need_nothing_that_cupy_refuses",),
    ),
    Mutant(
        "a GPU's groups read the tables of the first", "pagedkv/cache/group_kv.py",
        (("kv.bind(of_group, part) for kv, of_group in", "kv.bind(arrays, part) for kv, of_group in"),),
        ("test_the_kernels_over_groups_compute_what_the_cpu_does_over_all_tokens",),
    ),
)  # fmt: skip
