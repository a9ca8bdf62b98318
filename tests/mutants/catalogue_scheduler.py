"""Mistakes in the scheduler: who runs, who gives way, what a report changes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ADMISSION = "pagedkv/scheduler/admission.py"
PLANNING = "pagedkv/scheduler/planning.py"
RUNNING = "pagedkv/scheduler/running.py"
REPORTING = "pagedkv/scheduler/reporting.py"
SCHEDULER = "pagedkv/scheduler/scheduler.py"
QUEUE = "pagedkv/scheduler/queue.py"
LIMITS = "pagedkv/scheduler/limits.py"
LANES = "pagedkv/scheduler/lanes.py"
REOPENING = "pagedkv/scheduler/reopening.py"
ASIDE = "pagedkv/scheduler/aside.py"
MOVES = "pagedkv/cache/moves.py"
SHARING = "pagedkv/scheduler/sharing.py"
WAITS = "pagedkv/cache/waits.py"
ROOM = "pagedkv/scheduler/room.py"
STEPPER = "pagedkv/serving/stepper.py"
LOADING = "pagedkv/scheduler/loading.py"

MUTANTS = (
    Mutant(
        "the best request gives way when blocks run out",
        PLANNING,
        (("        worst = running.requests[-1]\n", "        worst = running.requests[0]\n"),),
        ("test_when_blocks_run_out_the_last_is_suspended_and_comes_to_the_same",),
    ),
    Mutant(
        "prompts take more tokens than a step has",
        PLANNING,
        (("                budget -= take\n", "                pass\n"),),
        ("test_a_step_never_has_more_tokens_than_allowed",),
    ),
    Mutant(
        "a request that can never fit is queued",
        SCHEDULER,
        (("        if needs.as_blocks(worst) > needs.capacity:\n",
          "        if needs.as_blocks(worst) > needs.capacity + 1:\n"),),
        ("test_a_request_of_exactly_the_device_runs_and_one_token_more_is_refused",),
    ),
    Mutant(
        "branches are not given the block that a copy on write needs",
        LIMITS,
        (("width * (blocks - shared + 1)", "width * (blocks - shared)"),),
        ("test_the_most_blocks_that_a_request_can_hold", "test_branches_of_exactly_the_device_run"),
    ),
    Mutant(
        "admission does not count what the running ones have begun",
        RUNNING,
        (("nothing if alone else promised + needs.watermark", "nothing if alone else needs.watermark"),),
        ("test_with_room_for_one_prompt_the_second_waits_until_the_first_has_its_blocks",),
    ),
    Mutant(
        "admission does not count what began in the same step",
        ADMISSION,
        (("else promised + fresh", "else promised"),),
        ("test_with_room_for_one_prompt_the_second_waits_until_the_first_has_its_blocks",),
    ),
    Mutant(
        "who is suspended is swapped whatever the options say",
        RUNNING,
        ((' or self._options.preemption == "recompute"', ""),),
        ("test_how_to_suspend_can_be_decided_against_what_was_measured",),
    ),
    Mutant(
        "the watermark is not left free",
        RUNNING,
        ((" else promised + needs.watermark", " else promised"),),
        ("test_the_watermark_leaves_room_for_those_that_run",),
    ),
    Mutant(
        "branches come back all at once",
        RUNNING,
        (
            ("                    return\n                self.computing.remove(branch)\n",
             "                    continue\n                self.computing.remove(branch)\n"),
            ("        self.held.remove(request)\n        for branch",
             "        if any(branch in self.computing for branch in request.live()):\n            return\n"
             "        self.held.remove(request)\n        for branch"),
        ),
        ("test_branches_come_back_one_after_the_other_so_that_their_prompt_is_computed_once",),
    ),
    Mutant(
        "beams that were cut back go on one by one",
        RUNNING,
        (("if request.beams == 1 or len(request.live()) == 1:", "if True:"),),
        ("test_beams_stay_in_step_when_steps_are_never_reported",),
    ),
    Mutant(
        "a rejected draft stays",
        REPORTING,
        (("        if len(draft) > len(kept) - 1:\n", "        if len(draft) > len(kept):\n"),),
        ("test_a_draft_is_kept_as_far_as_it_is_right",),
        quick=True,
    ),
    Mutant(
        "a draft of a step that raised stays",
        SCHEDULER,
        (("            self._planner.forget_draft(branch)\n", ""),),
        ("test_a_draft_of_a_step_that_raised_is_forgotten",),
    ),
    Mutant(
        "a step that was never reported loses its tokens",
        SCHEDULER,
        (("if self._running.pending(branch) == 0:", "if self._running.pending(branch) < 0:"),),
        ("test_a_step_that_was_committed_and_never_reported_is_made_good",),
    ),
    Mutant(
        "a report of a step that was not committed counts",
        SCHEDULER,
        (("if self.cache.table.info(plan.batch.rows[0]).num_computed != plan.expected:", "if plan.expected < 0:"),),
        ("test_an_exception_inside_the_step_commits_nothing_and_the_requests_go_on",),
    ),
    Mutant(
        "an abort releases sequences that are in a step",
        SCHEDULER,
        (('if request.state == "running" and self._plan is not None:', "if False:"),),
        ("test_an_abort_inside_a_step_leaves_the_others_alone",),
    ),
    Mutant(
        "a tenant is charged nothing",
        QUEUE,
        (("tenant.finish = max(tenant.finish, self.now) + request.charge", "tenant.finish = self.now"),),
        ("test_tenants_get_their_shares_whatever_they_ask_for",),
    ),
    Mutant(
        "what a request did not take is not given back",
        QUEUE,
        (("max(0.0, request.charge - taken / tenant.weight)", "0.0"),),
        ("test_tenants_get_their_shares_whatever_they_ask_for",),
    ),
    Mutant(
        "service does not go on, so that the oldest may wait for ever",
        QUEUE,
        (("self.now += num_tokens / max(self._active_weight, 1e-9)", "pass"),),
        ("test_a_low_priority_gets_its_turn_under_an_endless_stream_of_high_ones",),
    ),
    Mutant(
        "a longer prefix may overtake for ever",
        ADMISSION,
        (("waiting[0].overtaken >= window", "waiting[0].overtaken < 0"),),
        ("test_nobody_is_overtaken_more_often_than_the_window",),
    ),
    Mutant(
        "costs decide the other way round",
        RUNNING,
        (("2 * load > compute", "2 * load < compute"),),
        ("test_measured_costs_decide_between_swapping_and_computing_again",),
    ),
    Mutant(
        "a lane runs one token longer than it may",
        "pagedkv/scheduler/_lanes.pyx",
        (("found = data[LAST * capacity + i] <= now", "found = data[LAST * capacity + i] < now"),),
        ("test_lanes_end_at_their_own_tokens_and_their_own_last_step_alone[0]",),
    ),
    Mutant(
        "a lane that goes leaves the last one where it was",
        "pagedkv/scheduler/_lanes.pyx",
        (("(n - 1 - i) * sizeof(int64_t)", "(n - 2 - i) * sizeof(int64_t)"),),
        ("test_a_lane_that_goes_lets_those_after_it_move_up_and_leaves_the_others[0]",),
    ),
    Mutant(
        "a lane keeps the stop tokens of the one before it",
        "pagedkv/scheduler/_lanes.pyx",
        (("if j < k else NO_STOP", "if j < k else data[(STOPS + j) * capacity + i]"),),
        ("test_a_lane_is_written_into_its_own_column[stops0]",),
    ),
    Mutant(
        "branches come back with what the tree has, shared or not",
        REOPENING,
        (
            ("    if table.info(kin.row).num_committed >= whole:", "    if True:"),
            ("            if seq.blocks[:whole].tolist() == kin.blocks[:whole].tolist():", "            if True:"),
        ),
        ("test_branches_share_their_prompt_again_although_a_quota_keeps_it_out_of_the_tree",),
    ),
    Mutant(
        "a branch that comes back is not compared with the one before it",
        REOPENING,
        (("            if seq.blocks[:whole].tolist() == kin.blocks[:whole].tolist():", "            if True:"),),
        ("test_branches_share_their_prompt_again_when_it_is_purged_while_they_come_back",),
    ),
    Mutant(
        "branches that come back apart are suspended for ever, and worlds of the proof progress see it",
        REOPENING,
        (
            ("    if table.info(kin.row).num_committed >= whole:", "    if True:"),
            ("            if seq.blocks[:whole].tolist() == kin.blocks[:whole].tolist():", "            if True:"),
        ),
        ("test_worlds_in_which_branches_came_back_apart_end",),
    ),
    Mutant(
        "branches that share less than they could go on like that",
        ASIDE,
        (("running.is_beyond(left):", "False:"),),
        ("test_branches_that_share_less_than_they_could_come_back_once_more",),
    ),
    Mutant(
        "a request whose other branches found no room is begun again at once",
        ADMISSION,
        (('if request.state not in ("running", "loading"):  # there', 'if request.state == "waiting":  # there'),),
        ("test_a_request_whose_second_branch_finds_no_room_waits_for_another_step",),
    ),
    Mutant(
        "a request steps aside by what a prefetch holds in passing",
        ASIDE,
        (("        while not fitting and running.wait(alone=True):", "        while False:"),),
        ("test_a_request_is_not_refused_for_what_a_prefetch_holds_in_passing",),
    ),
    Mutant(
        "a plan does not wait for what is under way",
        PLANNING,
        (("        elif running.wait(alone=alone):\n            return True\n", ""),),
        ("test_a_plan_waits_for_a_prefetch_that_is_about_to_let_go",),
    ),
    Mutant(
        "what an interrupted call left is not mended",
        "pagedkv/scheduler/mending.py",
        (("        if self.torn:\n            self.mend()\n        else:\n            self.heard()\n", ""),),
        ("test_a_scheduler_that_is_interrupted_at_any_line_goes_on_with_the_same_tokens",),
    ),
    Mutant(
        "a report that was interrupted counts in part",
        "pagedkv/scheduler/scheduler.py",
        (("            self._reporter.before.restore()\n", ""),),
        ("test_a_scheduler_that_is_interrupted_at_any_line_goes_on_with_the_same_tokens",),
    ),
    Mutant(
        "the end of a prefetch is not waited for",
        WAITS,
        (("        others = threading.get_ident() not in self._prefetching\n", "        others = False\n"),),
        ("test_a_plan_waits_for_a_prefetch_that_is_about_to_let_go",),
    ),
    Mutant(
        "a prefetch under way takes what a plan has claimed meanwhile",
        MOVES,
        (("            if fits:\n", "            if True:\n"),),
        ("test_a_prefetch_under_way_takes_nothing_that_a_plan_has_claimed_meanwhile",),
    ),
    Mutant(
        "blocks stay spoken for when the plan is reported",
        SCHEDULER,
        (("        self._plan = None\n        self._claim.blocks = 0\n        self._queue.serve",
          "        self._plan = None\n        self._queue.serve"),),
        ("test_schedulers_speak_for_what_each_of_them_plans_and_for_nothing_once_they_are_gone",),
    ),
    Mutant(
        "a request that does not fit beside others' blocks stops those that do",
        ASIDE,
        (("        if fitting and left is not None:\n            running.suspend(left)\n        return bool(fitting)\n",
          "        return False\n"),),
        ("test_a_request_that_does_not_fit_beside_what_others_hold_lets_those_go_first_that_do",),
    ),
    Mutant(
        "a request that stepped aside stays there until nothing else is left",
        SCHEDULER,
        (("            self._aside.look_again()\n", "            pass\n"),),
        ("test_a_request_takes_its_turn_again_as_soon_as_others_leave_room_for_it",),
    ),
    Mutant(
        "sequences that running requests will need are given away",
        ROOM,
        (("        return free < sum(map(_most_branches, self.requests)) - len(self._rows(self.requests))\n",
          "        return free < 0\n"),),
        ("test_no_request_begins_in_a_sequence_that_the_samples_of_another_will_need",
         "test_a_request_gives_way_where_others_took_the_sequences_that_better_placed_samples_need"),
    ),
    Mutant(
        "a report's forks are counted without what it drops",
        REPORTING,
        (("new_rows += -1 if _is_over(branch) else goes - 1", "new_rows += max(0, goes - 1)"),),
        ("test_a_beam_forks_into_the_sequence_of_one_that_the_same_report_drops",),
    ),
    Mutant(
        "a request forks before another has dropped its beams",
        REPORTING,
        (("        going = {request: self._drop(request, pairs, told) for request, pairs in forking.items()}\n",
          "        going: dict[Request, list[tuple[Branch, list[tuple[int, int]]]]] = {}\n"
          "        for request, pairs in forking.items():\n"
          "            going[request] = []\n"
          "            self._fork(request, self._drop(request, pairs, told), told)\n"),),
        ("test_a_beam_forks_into_the_sequence_that_another_request_drops_later_in_the_report",),
    ),
    Mutant(
        "a scheduler that is gone still speaks for blocks",
        "pagedkv/cache/moves.py",
        (("weakref.ref(claim))", "lambda: claim)"),),
        ("test_schedulers_speak_for_what_each_of_them_plans_and_for_nothing_once_they_are_gone",),
    ),
    Mutant(
        "the caller is not told of a request that finished in an interrupted report",
        SCHEDULER,
        (("            plan.finished = tuple(self._untold)\n", "            plan.finished = ()\n"),),
        ("test_a_request_that_finished_in_an_interrupted_report_is_in_the_next_plan_where_nothing_is_left_to_run",),
    ),
    Mutant(
        "a mending that is interrupted cuts a token twice",
        "pagedkv/scheduler/mending.py",
        (("            if self._taken_back is None:  # at once,", "            if True:  # at once,"),),
        ("test_a_mending_that_is_interrupted_too_cuts_no_token_twice",),
    ),
    Mutant(
        "a refusal in the middle of a report loses the request",
        "pagedkv/scheduler/mending.py",
        (("self.torn = self.is_half_done or not is_refusal(problem)", "self.torn = not is_refusal(problem)"),),
        ("test_a_fork_that_another_thread_left_no_sequence_for_loses_no_request",),
    ),
    Mutant(
        "what an interrupted call was about to return is never told",
        SCHEDULER,
        (("        finished, expired = self._telling\n", "        finished, expired = [], ()\n"),),
        ("test_what_an_interrupted_call_was_about_to_return_is_told_again",),
    ),
    Mutant(
        "a promotion asks for room that it needs no more",
        "pagedkv/cache/moves.py",
        (("                if _total(self._cold(owner)) >= _total(cold):\n                    raise\n",
          "                raise\n"),),
        ("test_a_promotion_needs_less_room_once_another_thread_has_brought_some_of_it_up",),
    ),
    Mutant(
        "a plan keeps lanes that came or went since",
        "pagedkv/scheduler/lanes.py",
        (("        n = len(self.branches)\n        self._planned = None\n", "        n = len(self.branches)\n"),),
        ("test_a_long_run_at_capacity_starves_nobody",),
    ),
    Mutant(
        "a load has no room for the next token",
        LOADING,
        (("len(branch.tokens) + 1 + lookahead", "len(branch.tokens) + lookahead"),),
        ("test_two_loads_that_would_fill_the_device_exactly_do_not_lock_up",),
    ),
    Mutant(
        "blocks kept for a load are given to others",
        ROOM,
        (("self._known - self.loading.reserved)\n", "self._known)\n"),),
        ("test_what_a_load_is_to_have_is_not_given_to_requests_that_come_later",),
    ),
    Mutant(
        "loads may have all of the device",
        LOADING,
        (("        return needs + entry.need <= self._options.loading_share * pool.max_blocks\n",
          "        return True\n"),),
        ("test_loads_begin_by_rank_within_their_share_and_one_always_may",),
    ),
    Mutant(
        "a request that may not load is passed for ever",
        ADMISSION,
        (("            other.overtaken += 1\n", "            pass\n"),),
        ("test_a_request_with_nothing_to_load_passes_one_that_may_not_load_at_most_window_times",),
    ),
    Mutant(
        "a request that runs is suspended while another loads",
        PLANNING,
        (("        if running.give_up_load(worst):\n            return True\n", ""),),
        ("test_loads_give_way_before_a_request_that_runs_is_suspended",),
    ),
    Mutant(
        "a loading request has no place among those that run",
        ROOM,
        (("self.width + loading.width + request.width > options", "self.width + request.width > options"),),
        ("test_loads_have_their_place_among_those_that_run",),
    ),
    Mutant(
        "a load is given up before its time",
        LOADING,
        (("max(2 * sum(", "max(sum("),),
        ("test_a_load_has_a_deadline_by_what_loads_and_prompts_take",),
    ),
    Mutant(
        "a caller spins where a prompt does not fit beside a load",
        PLANNING,
        (("            running.waits_beside_loads()\n", "            pass\n"),),
        ("test_wait_returns_for_a_move_where_a_prompt_does_not_fit_beside_a_load",),
    ),
    Mutant(
        "a request that comes wakes no caller that waits",
        SCHEDULER,
        (("        self._waiting.is_news = True\n", ""),),
        ("test_wait_returns_for_a_failed_load_a_request_another_thread_and_a_deadline",),
    ),
    Mutant(
        "of a request that comes back only the first branch is loaded",
        LOADING,
        (("            for branch in live[1:]:\n", "            for branch in live[len(live) :]:\n"),),
        ("test_branches_that_come_back_are_all_loaded_and_none_is_waited_for",),
    ),
    Mutant(
        "new tokens of samples come in another order than the report's",
        REPORTING,
        (("key=lambda one: (lane_of[one[0]], one[1])", "key=lambda one: lane_of[one[0]]"),),
        ("test_samples_come_in_the_order_of_their_first_tokens_also_where_one_stops_at_once",),
    ),
    Mutant(
        "new tokens of a draft include those behind a stop token",
        REPORTING,
        (("            told.append((branch, 0, NewTokens(branch, kept, branch)))\n",
          "            told.append((branch, 0, NewTokens(branch, entry, branch)))\n"),),
        ("test_of_a_draft_only_what_was_accepted_is_told_and_nothing_behind_a_stop_token",),
    ),
    Mutant(
        "a report that was interrupted and never counted has told its tokens",
        "pagedkv/scheduler/mending.py",
        (("        self._plan.told = None\n", ""),),
        ("test_a_report_that_is_interrupted_before_it_counts_tells_nothing",),
    ),
    Mutant(
        "a stop token that is the last one allowed counts as the length",
        "pagedkv/scheduler/request.py",
        (("        if len(self._output) and int(",
          "        if 0 < len(self._output) < request.max_new_tokens and int("),),
        ("test_a_stop_token_that_is_also_the_last_one_allowed_stops",),
    ),
    Mutant(
        "the queue takes one request more than its bound",
        SCHEDULER,
        (("waiting >= allowed:", "waiting > allowed:"),),
        ("test_one_request_too_many_is_refused_and_nothing_of_it_is_left",),
    ),
    Mutant(
        "the time of a suspension is lost",
        "pagedkv/scheduler/timing.py",
        (("passed = now - self._paused[request] if request in self._paused else since", "passed = since"),),
        ("test_a_suspension_counts_in_the_time_of_the_token_after_it",),
    ),
    Mutant(
        "moves do not say whom they are for",
        "pagedkv/cache/jobs.py",
        (("        self.span.decided_in(self.context)\n", "        pass\n"),),
        ("test_a_request_that_comes_back_and_the_moves_that_it_asks_for_carry_its_trace",),
    ),
    Mutant(
        "a trace goes on after its work",
        "pagedkv/observe/hooks.py",
        (("            _traces.reset(self._token)\n", "            pass\n"),),
        ("test_a_trace_ends_with_its_work",),
    ),
    Mutant(
        "what cannot be collected is found out in the middle of a scrape",
        "pagedkv/observe/metrics.py",
        (("    raise WrongType(f\"{name} must be a KVCache or a Scheduler, not {type(given).__name__}\")\n",
          "    return (given,)\n"),),
        ("test_what_cannot_be_collected_is_refused_before_it_is_scraped",),
    ),
    Mutant(
        "a cache under two names is counted twice",
        "pagedkv/observe/metrics.py",
        (("if not any(one is known for known in seen)]", "if True]"),),
        ("test_a_cache_under_two_names_is_scraped_once",),
    ),
    Mutant(
        "a submission that was cancelled runs all the same",
        "pagedkv/serving/async_scheduler.py",
        (("            box.abandon()\n            self._abort(box)\n            raise\n", "            raise\n"),),
        ("test_a_submission_that_is_cancelled_leaves_no_request",),
    ),
    Mutant(
        "a reader that is cancelled leaves its request running",
        "pagedkv/serving/stream.py",
        (("Error:\n            self._give_up()\n", "Error:\n"),),
        ("test_a_reader_that_goes_away_aborts_its_request_and_no_other[cancel]",),
    ),
    Mutant(
        "a reader that has found the end counts as one that has gone",
        "pagedkv/serving/stream.py",
        (("            self._abort(self._box, reason)\n", "            self._abort(self._box, \"aborted\")\n"),),
        ("test_a_reader_that_has_found_the_end_stops_its_request",),
    ),
    Mutant(
        "a request that its caller stops counts as aborted",
        SCHEDULER,
        (("            request.abort_reason = given\n", "            pass\n"),),
        ("test_an_abort_says_whether_it_stops_a_request_that_has_come_to_its_end",),
    ),
    Mutant(
        "an abort takes any reason",
        "pagedkv/scheduler/request.py",
        (("    if reason not in get_args(AbortReason):\n", "    if False:\n"),),
        ("test_an_abort_for_an_unknown_reason_is_refused_and_ends_nothing",),
    ),
    Mutant(
        "tokens pile up for a reader that does not read",
        "pagedkv/serving/mailbox.py",
        (("        elif self._unread > self._max_unread:\n", "        elif False:\n"),),
        ("test_a_reader_that_is_too_slow_is_aborted_and_told_why",),
    ),
    Mutant(
        "the thread that steps asks again and again while requests load",
        STEPPER,
        (("            self._scheduler.wait()\n", "            pass\n"),),
        ("test_a_load_is_waited_for_and_not_asked_after_again_and_again",),
    ),
    Mutant(
        "the thread that steps hears of no order while requests load",
        STEPPER,
        (("        if self._waits:\n", "        if False:\n"),),
        ("test_an_order_wakes_a_thread_that_waits_and_no_other",),
    ),
    Mutant(
        "readers hear of an end when the thread has waited for a load",
        STEPPER,
        (("        elif not self._out:\n", "        else:\n"),),
        ("test_readers_hear_of_the_end_of_others_before_the_thread_waits",),
    ),
    Mutant(
        "the time of a load is no time in the queue",
        ADMISSION,
        (("        self._runs_next = None\n        for",
          "        self._runs_next = None\n        self._running.begun[request] = None\n        for"),),
        ("test_the_time_of_a_load_is_time_in_the_queue_and_it_begins_once",),
    ),
    Mutant(
        "a step that raises fails requests that were not in it",
        "pagedkv/serving/stepper.py",
        (("            if any(branch.seq is not None and id(branch.seq) in there for branch in request.live()):\n",
          "            if True:\n"),),
        ("test_a_step_that_raises_fails_its_requests_and_no_others",),
    ),
    Mutant(
        "the inbox has no bound",
        "pagedkv/serving/async_scheduler.py",
        (("if most is not None and len(self._asked) >= most:", "if False:"),),
        ("test_refusals_come_to_the_one_who_submitted",),
    ),
    Mutant(
        "a prompt that should wait computes what another computes",
        SHARING,
        (("            return -1 if np.any(", "            return 0 if np.any("),),
        ("test_a_herd_computes_its_common_prompt_once",),
    ),
    Mutant(
        "a prompt waits for blocks that the tree refuses",
        SHARING,
        (("committed < computed // self._size:", "committed < 0:"),),
        ("test_no_prompt_waits_for_blocks_that_the_tree_refuses",),
    ),
    Mutant(
        "a prompt of the next step names blocks of this one",
        SHARING,
        (('        if self._share == "next":  # its', '        if self._share == "":  # its'),),
        ("test_plans_for_the_next_step_never_name_blocks_of_this_step",),
    ),
    Mutant(
        "prompts do not go on from what others have committed",
        SCHEDULER,
        (
            ("num_waiting:\n            running.sharing.catch_up(running.computing)\n",
             "num_waiting:\n            pass\n"),
        ),
        ("test_a_herd_computes_its_common_prompt_once",),
    ),
    Mutant(
        "requests share although they must not",
        SHARING,
        (('        if self._share == "never":\n            return\n        _, computed', "        _, computed"),),
        ("test_without_sharing_each_request_of_a_herd_computes_it",),
    ),
    Mutant(
        "a plan does not know that its first sequence follows",
        PLANNING,
        (("batch.follow.tolist() if at == 0)", "batch.follow.tolist() if at < 0)"),),
        ("test_a_follower_stands_before_a_leader_that_waits_for_its_branches",),
    ),
    Mutant(
        "admission counts common tokens for each request",
        ROOM,
        ((" and asked - self.sharing.saved_tokens(self.computing) >= num_tokens", ""),),
        ("test_blocks_of_a_common_prompt_are_taken_once",),
    ),
    Mutant(
        "blocks that prompts under way have in common are promised to each",
        ROOM,
        ((" - self.sharing.saved_blocks(self.computing)\n", "\n"),),
        ("test_blocks_of_prompts_under_way_that_share_are_promised_once",),
    ),
    Mutant(
        "admission counts common blocks for a request that begins",
        RUNNING,
        (("len(tokens), self.sharing.common_blocks(request, seq, self.computing))", "len(tokens), 0)"),),
        ("test_blocks_of_a_common_prompt_are_taken_once",),
    ),
    Mutant(
        "a request that shares all but a block is refused for the whole of its prompt",
        RUNNING,
        (("max(cached, shared)", "cached"),),
        ("test_blocks_of_a_common_prompt_are_taken_once",),
    ),
)
