"""A caller that streams: each plan says which tokens its report gave each branch.

Each branch says why it ended.
"""

from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.scheduler.reporting import Reporter

from .conftest import after, followed, greedy, prompt


def outputs(request):
    return {branch: branch.output.tolist() for branch in request.branches}


def check(server, *requests):
    """What was told is what there is; of no branch twice, and of none that is not there."""
    streams = followed(server.plans)
    for request in requests:
        for branch, output in outputs(request).items():
            assert streams.get(branch, []) == output
    assert server.scheduler.stats().new_tokens == sum(
        len(new.tokens) for plan in server.plans for new in plan.new_tokens
    )


def test_a_step_says_which_tokens_it_gave_whom(serve):
    server = serve(max_batch_tokens=100)
    a, b = server.submit(prompt(1), 3), server.submit(prompt(2), 5)
    server.turn()
    told = server.plans[-1].new_tokens
    assert [(new.branch, new.parent, new.tokens.tolist()) for new in told] == [
        (request.branches[0], request.branches[0], greedy(request)[:1]) for request in (a, b)
    ]
    assert told[0].tokens.dtype == np.int32
    server.run()
    check(server, a, b)


def test_a_plan_that_was_not_reported_has_no_new_tokens(serve):
    server = serve()
    server.submit(prompt(1), 3)
    plan = server.scheduler.schedule()
    assert plan.new_tokens == []
    with pytest.raises(ValueError, match="body"):
        server.compute(plan, ValueError("body"))
    again = server.scheduler.schedule()
    assert (plan.new_tokens, again.new_tokens) == ([], [])


def test_a_report_that_is_refused_tells_nothing(serve):
    server = serve()
    server.submit(prompt(1), 3)
    plan = server.scheduler.schedule()
    server.compute(plan)
    with pytest.raises(pk.InvalidArgument, match="is no token"):
        server.scheduler.report(plan, [-3])
    assert plan.new_tokens == []
    server.scheduler.report(plan, [7])
    assert [new.tokens.tolist() for new in plan.new_tokens] == [[7]]


@pytest.mark.parametrize("host", [None, 60], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("branches", [{}, {"n": 3}, {"beams": 3}], ids=["one", "samples", "beams"])
def test_after_a_suspension_no_token_is_told_twice(serve, host, branches):
    server = serve(18, host=host, watermark=0.0)
    first, second = server.submit(prompt(1, 9), 40), server.submit(prompt(2, 13), 14, **branches)
    third = server.submit(prompt(3, 21), 20)
    server.run()
    assert second.num_preemptions + third.num_preemptions > 0
    check(server, first, second, third)


def test_samples_come_in_the_order_of_their_first_tokens_also_where_one_stops_at_once(serve):
    server = serve(100)
    firsts = [after(prompt(1, 14), which) for which in range(4)]
    request = server.submit(prompt(1, 14), 6, n=4, stop_tokens=[firsts[1]])
    server.turn()
    told = server.plans[-1].new_tokens
    assert [new.tokens.tolist() for new in told] == [[token] for token in firsts]
    assert [new.branch.finish_reason for new in told] == [None, "stop", None, None]
    assert len({new.branch for new in told}) == 4
    server.run()
    check(server, request)
    assert [len(outputs(request)[new.branch]) for new in told][1] == 1


def test_a_beam_that_forks_names_the_one_that_it_came_from(serve):
    server = serve(100)
    request = server.submit(prompt(1), 4, beams=2)

    def report(entries):
        plan = server.scheduler.schedule()
        server.compute(plan)
        server.scheduler.report(plan, entries)
        server.plans.append(plan)
        return plan

    report([[1, 2]])
    first = request.branches[0]
    told = report([[3, 4], []]).new_tokens  # the first forks, the second is dropped
    assert [(new.tokens.tolist(), new.parent) for new in told] == [([3], first), ([4], first)]
    assert told[0].branch is first
    report([[5], [6]])
    report([[7], [8]])
    assert sorted(outputs(request).values()) == [[1, 3, 5, 7], [1, 4, 6, 8]]
    assert request.finish_reason == "length"
    check(server, request)


def test_of_a_draft_only_what_was_accepted_is_told_and_nothing_behind_a_stop_token(serve):
    server = serve()
    full = greedy(server.submit(prompt(1, 6), 12))
    request = server.submit(prompt(1, 6), 12, stop_tokens=[full[5]])
    stop_at = full.index(full[5])
    for _ in range(40):
        if request.ended:
            break
        live = request.live()
        if len(live) == 1 and live[0].num_output:
            made = live[0].num_output
            server.scheduler.draft(request, [*full[made : made + 2], 49])
        server.turn()
    assert request.finish_reason == "stop"
    assert followed(server.plans)[request.branches[0]] == full[: stop_at + 1]
    assert any(len(new.tokens) == 3 for plan in server.plans for new in plan.new_tokens)
    check(server, request)


def test_why_a_request_ended(serve):
    server = serve(max_running=3)
    cut = server.submit(prompt(1), 4)
    stopped = server.submit(prompt(2), 9, stop_tokens=[after(prompt(2))])
    aborted = server.submit(prompt(3), 9)
    late = server.submit(prompt(4), 9, deadline_s=1.0)
    assert [request.finish_reason for request in (cut, stopped, aborted, late)] == [None] * 4
    server.turn()
    server.turn()
    server.scheduler.abort(aborted)
    server.now = 2.0
    server.run()
    reasons = ["length", "stop", "aborted", "deadline"]
    assert [request.finish_reason for request in (cut, stopped, aborted, late)] == reasons
    assert [request.branches[0].finish_reason for request in (cut, stopped, aborted, late)] == reasons
    assert server.scheduler.stats().ended == {"length": 1, "stop": 1, "aborted": 1, "deadline": 1, "refused": 0}
    assert server.scheduler.stats().finished == 2


def test_an_abort_says_whether_it_stops_a_request_that_has_come_to_its_end(serve):
    server = serve(100, max_running=4)
    waits, runs, both = server.submit(prompt(1), 9), server.submit(prompt(2), 9), server.submit(prompt(3, 14), 6, n=2)
    server.scheduler.abort(waits, "stop")
    server.turn()
    server.turn()
    server.scheduler.abort(both, reason="stop")
    plan = server.scheduler.schedule()
    server.scheduler.abort(runs, reason="stop")
    assert runs.finish_reason == "stop"
    server.scheduler.abort(runs)
    server.scheduler.cancel(plan)
    for request in (waits, runs, both):
        assert (request.state, request.finish_reason) == ("aborted", "stop"), "the reason that came first"
        assert {branch.finish_reason for branch in request.branches} == {"stop"}
    assert server.scheduler.stats().ended == {"length": 0, "stop": 3, "aborted": 0, "deadline": 0, "refused": 0}
    check(server, waits, runs, both)


def test_a_stop_token_that_is_also_the_last_one_allowed_stops(serve):
    server = serve()
    request = server.submit(prompt(1), 1, stop_tokens=[after(prompt(1))])
    server.run()
    assert request.finish_reason == "stop"


def test_branches_end_for_their_own_reasons(serve):
    server = serve(100)
    request = server.submit(prompt(1, 14), 6, n=2, stop_tokens=[after(prompt(1, 14), 1)])
    server.turn()
    server.turn()
    server.scheduler.abort(request)
    server.turn()
    assert sorted(branch.finish_reason for branch in request.branches) == ["aborted", "stop"]
    assert request.finish_reason == "aborted"


def test_an_abort_inside_a_step_is_told_with_the_token_of_that_step(serve):
    server = serve()
    request = server.submit(prompt(1), 5)
    plan = server.scheduler.schedule()
    server.compute(plan)
    server.scheduler.abort(request)
    assert (request.finish_reason, request.branches[0].finish_reason) == ("aborted", None)
    server.scheduler.report(plan, [7])
    server.plans.append(plan)
    assert (request.outputs[0].tolist(), request.branches[0].finish_reason) == ([7], "aborted")
    check(server, request)


@pytest.mark.parametrize("branches", [{}, {"n": 2}], ids=["one token each", "several"])
def test_a_report_that_is_interrupted_before_it_counts_tells_nothing(serve, branches):
    """The last line of a report is where it begins to count."""
    server = serve(100, max_batch_tokens=64)
    request = server.submit(prompt(1), 5, **branches)
    plan = server.scheduler.schedule()
    server.compute(plan)
    entries = [server.choose(branch) for branch in plan.lanes]
    lines, first = inspect.getsourcelines(Reporter.apply)
    last = first + lines.index("        self.before = None\n")

    def line(frame, event, argument):
        if frame.f_code is Reporter.apply.__code__ and event == "line" and frame.f_lineno == last:
            raise KeyboardInterrupt
        return line

    sys.settrace(line)
    try:
        with pytest.raises(KeyboardInterrupt):
            server.scheduler.report(plan, entries)
    finally:
        sys.settrace(None)
    server.plans.append(plan)
    server.run()
    assert plan.new_tokens == []
    check(server, request)
