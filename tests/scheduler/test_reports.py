"""Steps that raise, and reports: which plan they are for, and what tokens they may hold."""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk

from .conftest import after, greedy, prompt


@pytest.mark.parametrize("when", ["first", "prompt", "decode"])
def test_an_exception_inside_the_step_commits_nothing_and_the_requests_go_on(serve, when):
    server = serve(60, max_batch_tokens=12)
    requests = [server.submit(prompt(i, 14), 6) for i in range(3)]
    for _ in range({"first": 0, "prompt": 1, "decode": 6}[when]):
        server.turn()
    for _ in range(3):
        plan = server.scheduler.schedule()
        with pytest.raises(ZeroDivisionError):
            server.compute(plan, then=ZeroDivisionError)
        server.scheduler.check_integrity()
        with pytest.raises(pk.InvalidArgument, match="was not committed"):
            server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_a_step_that_was_committed_and_never_reported_is_made_good(serve):
    server = serve(100)
    requests = [server.submit(prompt(i, 4 + i), 9) for i in range(5)]
    for _ in range(8):
        server.turn()
        server.compute(server.scheduler.schedule())
    server.run()
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_a_report_counts_once_and_only_for_the_last_plan(serve):
    server = serve()
    server.submit(prompt(1), 5)
    old = server.scheduler.schedule()
    plan = server.scheduler.schedule()
    for use in (lambda: server.scheduler.report(old, [1]), lambda: server.scheduler.step(old)):
        with pytest.raises(pk.InvalidArgument, match="not the last one"):
            use()
    server.compute(plan)
    entries = [server.choose(branch) for branch in plan.lanes]
    server.scheduler.report(plan, entries)
    with pytest.raises(pk.InvalidArgument, match="was reported"):
        server.scheduler.report(plan, entries)
    server.run()


@pytest.mark.parametrize(
    "tokens",
    [[], [1, 2], None, "7", [1.5], [float("nan")], [2**31], [-1], [[-1]], [[1, 2]], [[]], [[[1]]], [[1, [2]]], [True],
     {7}, {7: 7}, 7, np.array(7), np.array([[1, 2]]), np.array([-7])],
    ids=repr,
)  # fmt: skip
def test_a_report_of_what_are_no_tokens_changes_nothing(serve, tokens):
    server = serve()
    request = server.submit(prompt(1), 5)
    server.turn()
    plan = server.scheduler.schedule()
    server.compute(plan)
    with pytest.raises((pk.WrongType, pk.InvalidArgument)):
        server.scheduler.report(plan, tokens)
    server.scheduler.check_integrity()
    assert len(request.outputs[0]) == 1
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert request.outputs[0].tolist() == greedy(request)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [list, np.array, lambda t: [[x] for x in t], lambda t: np.array(t)[:, None], lambda t: [np.array([x]) for x in t]],
)
def test_a_token_may_be_reported_as_itself_or_as_an_array_of_one(serve, wrap, drafted):
    server = serve()
    requests = [server.submit(prompt(i, 6), 6) for i in range(3)]
    while server.scheduler.has_work:
        if drafted and server.scheduler.stats().running:
            server.scheduler.draft(requests[0], [49])
        plan = server.scheduler.schedule()
        server.compute(plan)
        server.scheduler.report(plan, wrap([after(branch.tokens) for branch in plan.lanes]))
        server.scheduler.check_integrity()
        drafted = False
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_what_is_wrong_with_a_report_is_said_of_its_lane_and_request(serve):
    server = serve()
    server.submit(prompt(9, 3), 1)
    requests = [server.submit(prompt(i, 3), 6) for i in range(3)]
    server.turn()
    for drafts in (False, True):
        if drafts:
            server.scheduler.draft(requests[0], [1])
        plan = server.scheduler.schedule()
        server.compute(plan)
        for wrong, words in (
            ([1, 2, -3], "lane 2 (request 3): -3 is no token: they are 0 or more"),
            ([1, 2.5, 3], "lane 1 (request 2): "),
            ([1, 2, [3, 4]], "lane 2 (request 3) wants 1 token, got 2"),
            ([1, [], 3], "lane 1 (request 2) wants 1 token, got 0"),
            ([1, 2], "3 lanes want an entry each, got 2"),
            ({1, 2, 3}, "a report is one entry per lane, in their order, not set"),
        ):
            with pytest.raises((pk.InvalidArgument, pk.WrongType)) as caught:
                server.scheduler.report(plan, wrong)
            assert words in str(caught.value)
        server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
