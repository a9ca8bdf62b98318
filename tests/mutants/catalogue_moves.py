"""Mistakes in the code that moves blocks between tiers.

The conductor, admission, scrub, the mover and its tickets.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DISPATCHER, MOVER = "pagedkv/cache/dispatcher.py", "pagedkv/tiers/mover/mover.py"
TICKET = "pagedkv/tiers/mover/ticket.py"
WORKER = "pagedkv/tiers/mover/worker.py"
SCRUB, ADMISSION, CACHE = "pagedkv/cache/scrub.py", "pagedkv/cache/admission.py", "pagedkv/cache/cache.py"

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
        "a failed promotion is served", DISPATCHER,
        (("        transfers, ok = ticket.results()\n",
          "        transfers, ok = ticket.results()\n        ok = ok | (moves['dst_tier'][0] == 0)\n"),),
        ("test_the_proof_holds[schedules]",), 300,
    ),
    Mutant(
        "what a damaged or failing disk gave is served", DISPATCHER,
        (("        transfers, ok = ticket.results()\n",
          "        transfers, ok = ticket.results()[0], np.ones_like(ticket.results()[1])\n"),),
        ("test_the_proof_holds[machine]",), 8000,
    ),
    Mutant(
        "a demotion that admission refused is told to have arrived", DISPATCHER,
        (("        self._dispatch.give_up(group, announce=not self._hooks.all)",
          "        there = np.ones(len(group), np.bool_)[: len(np.unique(group['transfer']))]\n"
          "        self._dispatch.finish(np.unique(group['transfer']), there, there)"),),
        ("test_a_disk_hit_slower_than_computing_is_declined_counted_and_kept",
         "test_second_hit_writes_only_what_was_asked_for_again",
         "test_what_is_refused_leaves_no_block_whose_prefix_is_gone"),
    ),
    Mutant(
        "what loads slower than it computes is loaded", "pagedkv/cache/matcher.py",
        (("        if worth < len(tiers):", "        if False:"),),
        ("test_a_disk_hit_slower_than_computing_is_declined_counted_and_kept",),
    ),
    Mutant(
        "the write budget is never used up", ADMISSION,
        (("if num_bytes > left and not overdraw and self._left < self._room:", "if False:"),),
        ("test_a_budget_allows_an_hours_share_at_once_and_its_rate_after_that",),
    ),
    Mutant(
        "evictions use up the budget that reuse is to have", ADMISSION,
        (("        left = self._left - self._room / 2 if spare else self._left\n", "        left = self._left\n"),),
        ("test_reuse_spends_all_of_the_budget_and_evictions_its_upper_half",),
    ),
    Mutant(
        "a prefix is judged run by run", DISPATCHER,
        (("for part in groups_of(moves) if", "for part in transfers_of(moves) if"),),
        ("test_a_prefix_is_paid_for_as_a_whole_or_not_written",),
    ),
    Mutant(
        "a checkpoint goes on after the budget is used up", "pagedkv/cache/checkpoint.py",
        (("            if self._refused() > refused:\n", "            if False:\n"),),
        ("test_a_checkpoint_ends_where_the_budget_does",),
    ),
    Mutant(
        "closing writes nothing", CACHE,
        (("            if self._checkpoint is not None and wait:\n", "            if False:\n"),),
        ("test_a_cache_closed_and_opened_again_has_its_prompts",),
    ),
    Mutant(
        "a purge is not told to the disk", CACHE,
        (("            if self._store is not None:\n                self._store.purge(",
          "            if False:\n                self._store.purge("),),
        ("test_the_proof_holds[machine]",), 20_000,
    ),
    Mutant(
        "a purge does not wait for what is on its way to the disk", CACHE,
        (("            self.moves.drain_namespace(root)", "            pass"),),
        ("test_the_proof_holds[schedules]",), 2000,
    ),
    Mutant(
        "a block that another namespace filled is not zeroed", SCRUB,
        (("            zero(blocks)\n", ""),),
        ("test_the_unwritten_tail_of_a_block_shows_nothing_of_another_namespace",),
    ),
    Mutant(
        "what a failed promotion read stays in its blocks", DISPATCHER,
        (('            self._scrub.spoilt(moves["dst_block"][upward & ~arrived])\n', ""),),
        ("test_what_a_failed_promotion_read_shows_in_nobodys_block",),
    ),
    Mutant(
        "a promoted block is not known to be its namespace's", DISPATCHER,
        (("                self._scrub.holds(part[", "                (lambda *_: None)(part["),),
        ("test_a_promoted_block_is_known_to_be_its_namespaces",),
    ),
)  # fmt: skip

INTERRUPTS = (
    Mutant(
        "a row is lost where an exception comes before its sequence is made", "pagedkv/_core/held.pyx",
        (("        if self.table is not None and self.table.lock.may_be_taken():\n            self.release()\n",
          "        pass\n"),),
        ("test_a_row_whose_holder_dies_is_released",),
    ),
    Mutant(
        "an owner is lost where an exception comes before it is released", "pagedkv/_core/held.pyx",
        (("        if self.placement is not None and self.placement.lock.may_be_taken():\n            self.release()\n",
          "        pass\n"),),
        ("test_an_owner_whose_holder_dies_is_released",),
    ),
    Mutant(
        "reads that an owner still waits for count as given up", "pagedkv/_core/transfers.pyx",
        (("& COUNT == 2:  #", "& COUNT >= 2:  #"),),
        ("test_blocks_that_are_read_for_no_owner_are_counted_and_no_others",),
    ),
    Mutant(
        "a copy to a colder tier counts as a read that was given up", "pagedkv/_core/transfers.pyx",
        (("        if t.node == NIL or t.dst != 0:\n", "        if t.node == NIL:\n"),),
        ("test_a_copy_under_way_of_a_run_that_is_read_owns_nothing_of_it",),
    ),
    Mutant(
        "moves that were taken and lost stay under way for ever", "pagedkv/_core/dispatch.pyx",
        (("            self.dispatch.give_up_moves(self.moves, False, True)\n", "            pass\n"),),
        ("test_moves_that_were_taken_and_lost_are_given_up",),
    ),
    Mutant(
        "a copy that was not made is shown after its step was cancelled", "pagedkv/_core/block_table.pyx",
        (("                if self.num_copied and self.rows[r].scheduled:\n                    self.uncopy(r)\n", ""),),
        ("test_a_copy_that_was_not_made_is_undone_with_its_step",),
    ),
    Mutant(
        "a close that was interrupted is never finished", CACHE,
        (("        if self._is_over or not", "        if self._engine.closed or not"),),
        ("test_a_close_that_was_interrupted_can_be_repeated",),
    ),
)  # fmt: skip

MOVERS = (
    Mutant(
        "a ticket is settled when its first part is over", TICKET,
        (("            last = self._pending == 0\n        if left:", "            last = True\n        if left:"),),
        ("test_a_ticket_is_not_done_before_its_last_part",),
    ),
    Mutant(
        "a part that a worker tells of twice counts twice", TICKET,
        (("            again = bool(self._over[moves[0]])\n", "            again = False\n"),),
        ("test_a_part_that_is_told_of_twice_counts_once",),
    ),
    Mutant(
        "a worker that finds no memory ends", WORKER,
        (("        except BaseException:  # noqa: PERF203 - no memory",
          "        except ZeroDivisionError:  # no memory"),),
        ("test_a_worker_that_finds_no_memory_fails_its_part_and_goes_on",),
    ),
    Mutant(
        "what a round without memory has taken is left to a Taken that never dies",
        "pagedkv/cache/dispatcher_thread.py",
        (("                dispatcher.recover(taken)\n", "                pass\n"),),
        ("test_moves_that_a_round_without_memory_had_taken_are_given_up",),
    ),
    Mutant(
        "what interrupts a caller's round is dropped where moves are submitted", DISPATCHER,
        (("problem)\n            self._hear(problem)\n", "problem)\n"),),
        ("test_what_a_signal_handler_raises_in_the_storage_comes_out_of_the_call[submit-HandlerTimeout]",),
    ),
    Mutant(
        "what interrupts a caller's round is dropped where the end of moves is reported", DISPATCHER,
        (("ends the ticket again\n                self._hear(problem)\n", "ends the ticket again\n"),),
        ("test_what_a_signal_handler_raises_in_the_storage_comes_out_of_the_call[results-KeyboardInterrupt]",),
    ),
    Mutant(
        "an interrupt is taken for a handle that says nothing", DISPATCHER,
        (("if self._hear(problem) and not isinstance(problem, MemoryError):", "if False:"),),
        ("test_what_a_signal_handler_raises_in_the_storage_comes_out_of_the_call[is_settled-HandlerTimeout]",),
    ),
    Mutant(
        "what interrupts a caller's round is dropped where moves are given up", DISPATCHER,
        (("is_interrupt(problem):\n            raise problem\n", "is_interrupt(problem):\n            pass\n"),),
        ("test_an_interrupt_while_moves_are_given_up_comes_out_and_keeps_no_block[submit]",),
    ),
    Mutant(
        "a MemoryError of a hook in a caller's round is dropped", DISPATCHER,
        (("            if not self._hear(problem):\n", "            if True:\n"),),
        ("test_a_hook_of_moves_without_memory_is_told_to_the_caller_that_makes_the_round[begin]",),
    ),
    Mutant(
        "a traceback that is kept keeps the moves of its round", DISPATCHER,
        (("            self.recover(self._taken)\n", ""),),
        ("test_an_interrupt_at_any_line_of_a_callers_round_comes_out_and_stops_nothing[a hook]",),
    ),
    Mutant(
        "moves of a round that was interrupted twice are never over", DISPATCHER,
        (("                self._recover_taken()\n                self._taken =", "                self._taken ="),),
        ("test_a_round_that_is_interrupted_again_while_it_gives_up_moves_is_ended_by_the_next",),
    ),
    Mutant(
        "an interrupt in a caller's round leaves a span without an end", DISPATCHER,
        (("        self._jobs.append(job)  # first:", "        # first:"),
         ("        self._tell(job, span.__enter__)\n",
          "        self._tell(job, span.__enter__)\n        self._jobs.append(job)\n")),
        ("test_an_interrupt_at_any_line_of_a_callers_round_comes_out_and_stops_nothing[a hook]",),
    ),
    Mutant(
        "an interrupt in the end of a span leaves hooks out", DISPATCHER,
        (("                if not self._tell(job, end):\n", "                if self._tell(job, end):\n"),),
        ("test_an_interrupt_at_any_line_of_a_callers_round_comes_out_and_stops_nothing[a hook]",),
    ),
    Mutant(
        "a job is over before callers are told of its moves", DISPATCHER,
        (("            self._jobs.remove(job)  # last:", "            # last:"),
         ("        if not job.tickets:\n", "        if not job.tickets:\n            self._jobs.remove(job)\n")),
        ("test_hooks_that_were_not_told_of_the_end_of_moves_hold_up_no_later_call",),
    ),
    Mutant(
        "NumPy looks at a tier, and drops what interrupts that", DISPATCHER,
        (('upward = moves["dst_tier"] == DEVICE', 'upward = moves["dst_tier"] == Tier.DEVICE'),),
        ("test_numpy_asks_python_nothing_of_a_tier_where_it_would_drop_an_interrupt",),
    ),
    Mutant(
        "a thread that has left a monitor still has it", "pagedkv/threads/monitor.pyx",
        (("            self.owner = 0\n", "            pass\n"),),
        ("test_a_monitor_that_an_exception_leaves_is_no_ones",),
    ),
    Mutant(
        "a thread that waits for a monitor still has it", "pagedkv/threads/monitor.pyx",
        (("self.depth, self.owner = 1, <unsigned long>PyThread_get_thread_ident()", "self.depth = 1"),),
        ("test_a_thread_that_waits_does_not_have_the_monitor_meanwhile_and_has_it_again_afterwards",),
    ),
    Mutant(
        "parts loaded after a program's handler end before it", "pagedkv/__init__.py",
        (('importlib.import_module("pagedkv.threads.ending")', "pass"),),
        ("test_a_handler_that_a_program_registers_for_its_end_never_hangs",),
    ),
    Mutant(
        "who waits at the end does not see that the threads are stopped", "pagedkv/cache/waits.py",
        (("            if dispatcher.has_stopped:\n", "            if False:\n"),),
        ("test_a_handler_that_a_program_registers_for_its_end_never_hangs",),
    ),
    Mutant(
        "the interpreter ends before a thread has begun", "pagedkv/threads/spawn.py",
        (("    while _unbegun and time", "    while False and time"),),
        ("test_a_process_ends_only_when_its_threads_have_begun",),
    ),
    Mutant(
        "the end waits for a thread that could not be started", "pagedkv/threads/spawn.py",
        (("may be a thread\n        _unbegun.discard(mark)\n", "may be a thread\n"),),
        ("test_the_end_waits_for_no_thread_that_there_is_not",),
    ),
    Mutant(
        "the end waits long for a thread that never begins", "pagedkv/threads/spawn.py",
        (("time.monotonic() + BEGIN_S", "time.monotonic() + 300 * BEGIN_S"),),
        ("test_a_thread_that_never_begins_does_not_hold_up_the_end",),
    ),
    Mutant(
        "a thread that dies before it begins is waited for", "pagedkv/threads/crew.py",
        (('        while self._state == "waits":\n', '        for _ in range(self._state == "waits"):\n'),),
        ("test_an_errand_whose_thread_never_begins_is_begun_by_another",),
    ),
    Mutant(
        "a thread that never says that it has begun is waited for", "pagedkv/threads/crew.py",
        (("    if not Errand(thread.start).ends_within(BEGIN_S):\n",
          "    if not Errand(thread.start).ends_within(1e6):\n"),),
        ("test_a_thread_that_never_begins_is_given_up",),
    ),
    Mutant(
        "who waits for a prefetch does not see that no thread serves it", "pagedkv/cache/prefetch.py",
        (("                self._have_served()\n", "                pass\n"),),
        ("test_who_waits_has_another_thread_started_where_the_first_never_began",),
    ),
    Mutant(
        "a prefetch that finds no memory ends its thread", "pagedkv/cache/prefetch.py",
        (("            except BaseException:  # noqa: PERF203 - no memory",
          "            except ZeroDivisionError:  # no memory"),),
        ("test_the_thread_of_prefetches_goes_on_where_it_found_no_memory",),
    ),
    Mutant(
        "a request that ends in an interrupted call is not counted", "pagedkv/scheduler/scheduler.py",
        (("        self._count()\n        if self._reporter.before", "        if self._reporter.before"),),
        ("test_a_request_is_counted_once_wherever_its_end_is_interrupted",),
    ),
    Mutant(
        "an interrupted purge leaves an entry for good", "pagedkv/cache/roots.py",
        (("        if rest:\n            self._leaving[digest] = rest\n        else:\n",
          "        self._leaving[digest] = rest\n        if not rest:\n"),
         ("        for digest, roots in itertools.islice(list(self._leaving.items()), LOOKED_AT):",
          "        for digest, roots in [entry for entry in self._leaving.items() if entry[1]][:LOOKED_AT]:")),
        ("test_a_purge_that_is_interrupted_at_any_line_leaves_nothing",),
    ),
)  # fmt: skip

HANGS = (
    Mutant(
        "what a read that is not waited for may still write is given to another owner", DISPATCHER,
        (("            pool.incref(blocks)\n", "            pass\n"),
         ("            pool.free(blocks)\n", "            pass\n")),
        ("test_a_request_goes_on_after_its_deadline_and_a_late_read_lands_in_nobodys_block",),
    ),
    Mutant(
        "what a read that was not waited for has filled is never free again", DISPATCHER,
        (("            pool.free(blocks)\n", "            pass\n"),),
        ("test_a_request_goes_on_after_its_deadline_and_a_late_read_lands_in_nobodys_block",),
    ),
    Mutant(
        "a read that comes back too late is served", TICKET,
        (("            if ok is not None and not left and not again:\n", "            if ok is not None:\n"),),
        ("test_a_read_is_left_at_its_deadline_and_what_it_does_later_changes_nothing",),
    ),
    Mutant(
        "a store that hangs is sent one call after the other", MOVER,
        (("                    queued = [part for part in parts if not part.is_into(hanging)]\n",
          "                    hanging = set()\n                    queued = list(parts)\n"),),
        ("test_a_call_that_hangs_is_left_its_store_is_told_and_nobody_else_is_sent_there",),
    ),
    Mutant(
        "what a store that is off did not look for is taken to be gone", WORKER,
        (("    if ok is not None and off:\n", "    if False:\n"),),
        ("test_a_read_that_a_store_refused_says_nothing_against_what_is_there",
         "test_what_is_asked_for_in_the_rest_after_a_hang_stays_on_the_disk"),
    ),
    Mutant(
        "a log that raises loses the result of a call that is left", "pagedkv/tiers/mover/work_queue.py",
        (("        finally:\n            for part in left:\n", "        finally:\n            for part in left:\n"
          "                self.log_once(part, TimeoutError, 'the tier does not answer in time')\n"),),
        ("test_who_is_interrupted_while_a_hang_is_logged_costs_nobody_the_result",),
    ),
    Mutant(
        "no room is made ahead", "pagedkv/cache/step.py",
        (("            self._engine.moves.make_room_ahead(arrays.num_new_blocks)\n", ""),),
        ("test_a_steady_decode_loop_waits_for_no_room",),
    ),
    Mutant(
        "room is made ahead by dropping", "pagedkv/cache/moves.py",
        (("            if below:\n", "            if below := max(1, below):\n"),),
        ("test_nothing_is_dropped_ahead_where_the_tier_below_is_held",),
    ),
    Mutant(
        "room ahead has no bound", "pagedkv/cache/moves.py",
        (("self._low - (self._low >> 3) - 1, 0), self._most_ahead)", "self._low - (self._low >> 3) - 1, 0), 10**6)"),),
        ("test_no_more_is_made_than_a_64th_of_the_device_twice",),
    ),
    Mutant(
        "who lacks room does not wait for a late read", "pagedkv/cache/dispatcher.py",
        (("        if is_late and on_device:\n", "        if False:\n"),
         ("hold_late(-is_late * int(on_device.sum()))\n", "room_made()\n")),
        ("test_who_lacks_the_blocks_of_a_late_read_waits_for_them",),
    ),
    Mutant(
        "a late read with a long deadline counts as hanging", "pagedkv/cache/dispatcher.py",
        (("is_late = 0 < until <= int(self._runtime.seconds() * 1e9)", "is_late = ticket.seconds < LATE_S"),),
        ("test_callers_wait_for_the_blocks_of_a_late_read_however_long_its_deadline_was",),
    ),
    Mutant(
        "a wait looks without a pause once its deadline is over", "pagedkv/cache/load.py",
        (("due_s if due_s > 0 else due_s + GRACE_S", "due_s"),),
        ("test_a_wait_beyond_the_deadline_looks_again_when_the_load_is_given_up",),
    ),
    Mutant(
        "blocks of a scheduler's late reads count as others'", "pagedkv/_core/dispatch.pyx",
        (("            found = self.late_now() + read", "            found = read"),),
        ("test_callers_wait_for_late_reads_until_they_would_hang",),
    ),
    Mutant(
        "a late read is waited for although it hangs", "pagedkv/_core/dispatch.pyx",
        (("if self.late > 0 and not self.closed and now_ns() < self.late_until else 0", "if self.late > 0 else 0"),),
        ("test_callers_wait_for_late_reads_until_they_would_hang",),
    ),
    Mutant(
        "a path that was refused is copied again and again", "pagedkv/_core/write_behind.pyx",
        (("        if 0 < entry.left <= before: ", "        if False: "),),
        ("test_a_path_that_is_refused_or_fails_is_copied_no_more_before_its_next_use",),
    ),
)  # fmt: skip

MUTANTS = CONDUCTOR + INTERRUPTS + MOVERS + HANGS
