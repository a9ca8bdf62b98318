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
        (("        if worst > self._running.capacity:\n", "        if worst > self._running.capacity + 1:\n"),),
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
        (("beyond = 0 if alone else promised + self._watermark", "beyond = 0 if alone else self._watermark"),),
        ("test_with_room_for_one_prompt_the_second_waits_until_the_first_has_its_blocks",),
    ),
    Mutant(
        "admission does not count what began in the same step",
        ADMISSION,
        (("else promised + took", "else promised"),),
        ("test_with_room_for_one_prompt_the_second_waits_until_the_first_has_its_blocks",),
    ),
    Mutant(
        "the watermark is not left free",
        RUNNING,
        (("promised + self._watermark", "promised"),),
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
        (("if self.cache.table.info(plan.batch.rows[0])[1] != plan.expected:", "if plan.expected < 0:"),),
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
        LANES,
        (("(last <= self._now)", "(last < self._now)"),),
        ("test_one_request_generates_what_its_model_says",),
    ),
)
