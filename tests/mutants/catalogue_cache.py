"""Mistakes in the cache and the mover: names, moves, steps."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROW_ORDER = "pagedkv/cache/row_order.py"
MUTANTS = (
    Mutant(
        "room for a promotion is made before its prefix is owned",
        "pagedkv/cache/cache.py",
        (("            load.bring()\n            return self._opened(",
          "            cold = int(np.count_nonzero(self.placement.match(prompt, root)[0]))\n"
          "            self.moves.make_room(cold)\n"
          "            load.bring()\n            return self._opened("),),
        ("test_making_room_for_a_promotion_never_drops_what_is_promoted",),
    ),
    Mutant(
        "all namespaces share one root",
        "pagedkv/cache/roots.py",
        (("self._placement.tree.namespace(digest)", 'self._placement.tree.namespace(b"")'),),
        ("test_no_block_crosses_namespaces_on_any_tier",),
        quick=True,
    ),
    Mutant(
        "a directory's own order of rows is not looked for",
        ROW_ORDER,
        (("    there = None if disk is None else fingerprint_in(disk.path)\n", "    there = None\n"),),
        ("test_a_directory_keeps_its_own_order_and_its_blocks_are_found",),
    ),
    Mutant(
        "processes that share blocks choose an order each",
        ROW_ORDER,
        (("    if shares:\n", "    if False:\n"),),
        ("test_blocks_that_other_processes_share_are_by_token_and_auto_is_refused",),
    ),
    Mutant(
        "memory that the caller lays out counts as a GPU's",
        ROW_ORDER,
        ((" if on_gpu and owns_memory else ", " if on_gpu else "),),
        ("test_rows_are_by_head_with_a_gpu_and_by_token_without",),
    ),
    Mutant(
        "a flag may be anything",
        "pagedkv/spec/sizes.py",
        (("    if value is not True and value is not False:\n", "    if False:\n"),),
        ("test_a_flag_that_is_no_bool_is_refused_before_anything_is_held",),
    ),
    Mutant(
        "the same value in another field makes the same namespace",
        "pagedkv/spec/namespace.py",
        (("_HEADER.pack(tag, kind, len(data))", "_HEADER.pack(0, kind, len(data))"),),
        ("test_the_same_value_in_another_field_is_another_namespace",),
    ),
    Mutant(
        "a chain key does not say where its tokens end",
        "pagedkv/_core/chain_key.py",
        (
            ("_FIELD.pack(_TOKENS, len(token_bytes)) + token_bytes", "token_bytes"),
            ("_FIELD.pack(_EXTRA, len(extra)) + extra", "extra"),
        ),
        ("test_no_field_can_lend_bytes_to_its_neighbour",),
    ),
    Mutant(
        "moves that came too late count as done",
        "pagedkv/tiers/mover/worker.py",
        ((' else "late")\n        return None', ' else "late")\n        return np.ones(part.moves.shape, np.bool_)'),),
        ("test_what_has_not_started_by_its_deadline_is_late",),
    ),
    Mutant(
        "a transfer of which one block arrived counts as done",
        "pagedkv/tiers/mover/ticket.py",
        (("return ids, failed == 0", "return ids, failed < np.bincount(index.reshape(-1))"),),
        ("test_one_bad_block_fails_its_transfer_and_no_other",),
    ),
    Mutant(
        "two moves may have the same destination",
        "pagedkv/tiers/mover/parts.py",
        (("if np.unique(targets).size != targets.size:", "if False:"),),
        ("test_moves_that_cannot_be_carried_out_are_refused_as_a_whole",),
    ),
    Mutant(
        "the core is told that every move arrived",
        "pagedkv/cache/dispatcher.py",
        (("        transfers, ok = ticket.results()\n",
          "        transfers, ok = ticket.results()[0], np.ones_like(ticket.results()[1])\n"),),
        ("test_a_disk_that_lost_its_content_is_a_miss_and_never_wrong",),
    ),
    Mutant(
        "a stored block is believed although its key is not that of its content",
        "pagedkv/cache/records.py",
        (("elif record.key != chain_key(secret, record.namespace, record.parent, record.tokens):", "elif False:"),),
        ("test_a_stored_block_whose_key_is_not_that_of_its_content_is_never_used",),
    ),
    Mutant(
        "blocks whose beginning is gone stay on the disk",
        "pagedkv/cache/records.py",
        (('    orphans["no_parent"] = [found.block for key, found in records.items() if key not in reached]\n', ""),),
        ("test_a_stored_block_whose_key_is_not_that_of_its_content_is_never_used",),
    ),
    Mutant(
        "the source of a copy is let go of before it is copied",
        "pagedkv/cache/engine.py",
        (("                kv.copy_blocks(arrays.copies)\n",
          "                self.table.copies_done()\n                kv.copy_blocks(arrays.copies)\n"),),
        ("test_the_source_of_a_copy_is_nobody_elses_until_it_is_copied",),
    ),
    Mutant(
        "a step commits although its body raised",
        "pagedkv/cache/step.py",
        (("            if kind is None:\n                self._check_complete",
          "            if True:\n                self._check_complete"),
         ("        if kind is not None:\n            self._cancel()\n            return\n", "")),
        ("test_an_exception_inside_commits_nothing",),
    ),
    Mutant(
        "what a clock raises comes out of the call",
        "pagedkv/observe/clock.py",
        (("            self._failed(problem)\n            return self._last\n", "            raise\n"),),
        ("test_a_clock_that_fails_under_the_write_budget_costs_no_request",),
    ),
    Mutant(
        "a clock may give infinity",
        "pagedkv/observe/clock.py",
        (("    if not -LIMIT_S < value < LIMIT_S:", "    if False:"),),
        ("test_the_last_good_reading_stands_in_for_a_bad_one",),
    ),
    Mutant(
        "the write budget pays for a clock's step back",
        "pagedkv/observe/clock.py",
        (("max(0.0, now - self._seen)", "now - self._seen"),),
        ("test_a_day_back_costs_the_write_budget_nothing_and_wins_nothing",),
    ),
    Mutant(
        "what admission raises comes out of the move",
        "pagedkv/cache/admission.py",
        (("        if came_from_signal(problem):\n            raise problem\n", "        raise problem\n"),),
        ("test_a_run_that_cannot_be_judged_is_written_as_far_as_the_budget_goes",),
    ),
    Mutant(
        "the table of what is proved is emptied where there are no rows",
        "tests/reliability/table.py",
        (("    if table.count(\"\\n|\") < 2:", "    if False:"),),
        ("test_a_table_is_not_emptied_for_lack_of_rows",),
    ),
    Mutant(
        "a layer is attended before it is written",
        "pagedkv/cache/step.py",
        (("if num_new and own not in self._written:", "if False:"),),
        ("test_attending_a_layer_before_it_is_written_is_refused",),
    ),
    Mutant(
        "a step whose copies the tier refuses stays scheduled",
        "pagedkv/cache/engine.py",
        (("            if not refused:\n                self.table.cancel(rows)\n", "            pass\n"),),
        ("test_a_step_whose_copies_the_tier_refuses_is_cancelled",),
    ),
    Mutant(
        "a step that is interrupted as it begins stays scheduled",
        "pagedkv/cache/step.py",
        (("if begun or not is_refusal(problem):", "if begun:"),),
        ("test_a_step_that_is_interrupted_as_it_begins_is_cancelled",),
    ),
    Mutant(
        "an opening that is interrupted leaves its directory locked",
        "pagedkv/cache/cache.py",
        (("            self._hit_tokens = dict.fromkeys(",
          "            undo.pop_all()\n"
          "            self._hit_tokens = dict.fromkeys("),),
        ("test_an_opening_that_is_interrupted_leaves_its_directory_and_no_thread",),
    ),
    Mutant(
        "an error of ours that a signal handler raises is taken for a refusal",
        "pagedkv/observe/callbacks.py",
        (("    return isinstance(problem, PagedKVError) and not came_from_signal(problem)\n",
          "    return isinstance(problem, PagedKVError)\n"),),
        ("test_an_error_of_ours_that_a_signal_handler_raises_is_an_interrupt_and_no_refusal",),
    ),
    Mutant(
        "a hook of moves waits for its own thread",
        "pagedkv/cache/waits.py",
        (("        if not self.may_wait:\n", "        if False:\n"),),
        ("test_a_hook_of_moves_never_waits_for_its_own_thread",),
    ),
    Mutant(
        "a hook of moves is refused when its quota is set already",
        "pagedkv/cache/waits.py",
        (("            The caller must not wait; nothing was decided.\n        \"\"\"\n        self.check_may_wait()\n",
          "            The caller must not wait; nothing was decided.\n        \"\"\"\n"),),
        ("test_a_hook_of_moves_that_would_wait_for_moves_is_refused",),
    ),
    Mutant(
        "a purge that is made again waits for nothing",
        "pagedkv/cache/roots.py",
        (("                return list(self._leaving.get(digest, ())), 0\n", "                return [], 0\n"),),
        ("test_a_purge_that_is_made_again_waits_for_what_the_interrupted_one_waited_for",),
    ),
    Mutant(
        "a queue that could not grow keeps what it took",
        "pagedkv/tiers/mover/mover.py",
        (("                        while len(queue.parts) > before:\n                            queue.parts.pop()\n",
          ""),),
        ("test_where_the_queue_cannot_grow_nothing_is_queued",),
    ),
    Mutant(
        "an interrupt of a clock that the dispatcher reads is dropped",
        "pagedkv/cache/dispatcher.py",
        (("            self.interrupts.append(interrupt)  # of the caller's clock",
          "            # of the caller's clock"),),
        ("test_an_interrupt_of_a_clock_that_the_dispatcher_reads_comes_out_of_a_call_that_waits",),
    ),
    Mutant(
        "callers go on before the hooks were told of the end of their moves",
        "pagedkv/cache/dispatcher.py",
        (("len(job.tickets) > 1  # this ticket is among them\n", "len(job.tickets) > 0\n"),),
        ("test_callers_go_on_once_the_hooks_of_their_moves_have_returned",),
    ),
    Mutant(
        "a MemoryError of the dispatcher's hooks comes out of a later call",
        "pagedkv/cache/dispatcher.py",
        (("        except MemoryError as problem:\n            if not self._hear(problem):\n"
          "                with suppress(BaseException):\n                    self._hooks.no_memory(problem)\n", ""),),
        ("test_without_memory_for_hooks_of_moves_no_later_call_fails",),
    ),
    Mutant(
        "a span whose begin was interrupted is ended twice",
        "pagedkv/observe/hooks.py",
        (("        while self._states:  # emptied: where the begin was interrupted, this is called at the end too\n"
          "            self._end(*self._states.pop())\n",
          "        for hook, state in reversed(self._states):\n            self._end(hook, state)\n"),),
        ("test_no_end_is_told_twice_where_the_begin_was_interrupted",),
    ),
    Mutant(
        "a full tier passes for a process without memory",
        "pagedkv/observe/callbacks.py",
        (("    return isinstance(problem, MemoryError) and not isinstance(problem, PagedKVError)\n",
          "    return isinstance(problem, MemoryError)\n"),),
        ("test_a_full_tier_met_by_a_hook_is_the_hooks_own_trouble",),
    ),
    Mutant(
        "what lies in colder tiers is taken for a device hit",
        "pagedkv/cache/load.py",
        (("self._worth(held.handle) if is_all and (held.num_cold or held.cold_tail) else None", "None"),),
        ("test_a_request_is_told_in_nested_spans",),
    ),
    Mutant(
        "a device hit asks the core again where its blocks are",
        "pagedkv/cache/load.py",
        (("self._worth(held.handle) if is_all and (held.num_cold or held.cold_tail) else None",
          "self._worth(held.handle)"),),
        ("test_a_device_hit_takes_the_core_four_times_at_most",),
    ),
    Mutant(
        "a run on its way for another caller ends a load's match",
        "pagedkv/cache/load.py",
        (("            is_all = is_late or (is_known and held.blocked < 0)\n", "            is_all = True\n"),),
        ("test_a_prefix_that_is_loaded_for_another_is_waited_for_and_read_once",),
    ),
    Mutant(
        "a load keeps its whole match, whatever became of it",
        "pagedkv/cache/load.py",
        (("self._placement.settle(self.held.handle) if self._num_matched() else 0", "self._num_matched()"),),
        ("test_late_at_a_block_keeps_what_came_before_it_and_computes_the_rest",),
    ),
    Mutant(
        "a load waits for a tier that hangs, whatever its deadline",
        "pagedkv/cache/load.py",
        ((" or self._is_late(GRACE_S)", ""),),
        ("test_a_tier_that_hangs_beyond_every_deadline_holds_no_load",),
    ),
    Mutant(
        "a load that found no room goes on owning its prefix",
        "pagedkv/cache/load.py",
        (("        self._error = problem\n        self.cancel()\n", "        self._error = problem\n"),),
        ("test_a_load_without_room_says_so_and_holds_nothing",),
    ),
    Mutant(
        "options that a storage of one's own knows nothing of are passed over",
        "pagedkv/cache/parts.py",
        (('if device != "cpu" or backend is not None or threads != THREADS or remote is not None:', "if False:"),),
        ("test_options_of_the_usual_storage_beside_another_are_refused",),
    ),
    Mutant(
        "callers that carry out moves themselves do so at the same time",
        "pagedkv/cache/dispatcher.py",
        (("        with self._pumping:\n", "        if True:\n"),),
        ("test_callers_that_carry_out_moves_themselves_come_one_after_the_other",),
    ),
    Mutant(
        "a block is its new namespace's before the copy is there",
        "pagedkv/cache/engine.py",
        (("        self.kv.copy_blocks(pair)\n        self._scrub.holds(target, root)\n",
          "        self._scrub.holds(target, root)\n        self.kv.copy_blocks(pair)\n"),),
        ("test_a_copy_that_is_interrupted_leaves_nothing_of_another_namespace[reused in part]",),
    ),
    Mutant(
        "a handle that cannot say whether it is settled stops the dispatcher",
        "pagedkv/cache/dispatcher.py",
        (("                self._lose(moves, problem, in_use=True)\n", "                raise\n"),),
        ("test_a_handle_that_says_nothing_of_its_moves_costs_these_and_the_cache_goes_on[raises-True]",),
    ),
    Mutant(
        "any storage is taken twice",
        "pagedkv/cache/storage.py",
        (("        if known is not None and known() is not None:\n", "        if False:\n"),),
        ("test_any_storage_serves_one_cache_at_a_time",),
    ),
    Mutant(
        "memory beside device_memory is taken, and one of them is not", "pagedkv/cache/parts.py",
        (("    if device is not None:\n        raise InvalidArgument(\n            \"memory and",
          "    if False:\n        raise InvalidArgument(\n            \"memory and"),),
        ("test_memory_beside_a_device_is_refused_with_what_to_give",),
    ),
)  # fmt: skip
