"""Requests, options and handles that a scheduler refuses."""

from __future__ import annotations

import pytest

import pagedkv as pk
from pagedkv.scheduler import SchedulerOptions

from .conftest import prompt


def test_tokens_below_0_are_refused_with_their_place(serve):
    server = serve()
    request = server.submit(prompt(1), 6)
    for use, words in (
        (lambda: server.submit([5, -7], 4), r"prompt\[1\] = -7 is no token"),
        (lambda: server.submit([5], 4, stop_tokens=[-1]), r"stop_tokens\[0\] = -1 is no token"),
        (lambda: server.scheduler.draft(request, [3, -2]), r"draft\[1\] = -2 is no token"),
    ):
        with pytest.raises(pk.InvalidArgument, match=words):
            use()
    server.run()


@pytest.mark.parametrize(
    ("wrong", "options"),
    [
        (([],), {}), ((None,), {}), (([1.5],), {}), (([2**31],), {}), (([1], 0), {}), (([1], -1), {}), (([1], 1.5), {}),
        (([1, -2],), {}), (([1], 2), {"stop_tokens": [3, -1]}),
        (([1], 2**30), {}), (([1], 2), {"priority": 101}), (([1], 2), {"priority": -1}), (([1], 2), {"priority": "7"}),
        (([1], 2), {"n": 0}), (([1], 2), {"beams": 0}), (([1], 2), {"n": 2, "beams": 2}), (([1], 2), {"tenant": 7}),
        (([1], 2), {"namespace": "x"}), (([1], 2), {"stop_tokens": [1.5]}), (([1], 2), {"deadline_s": -1}),
        (([1], 2), {"deadline_s": float("nan")}), (([1], 2), {"deadline_s": "soon"}), (([1], True), {}),
    ],
    ids=repr,
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused_and_not_queued(serve, wrong, options):
    server = serve()
    arguments = wrong if len(wrong) == 2 else (*wrong, 4)
    with pytest.raises((pk.WrongType, pk.InvalidArgument)):
        server.scheduler.submit(*arguments, **options)
    assert not server.scheduler.has_work


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_running": 0}, {"max_running": 8, "max_batch_tokens": 8}, {"order": "random"}, {"order": 3},
        {"admission": "all"}, {"watermark": -0.1}, {"watermark": 1.0}, {"watermark": "1%"}, {"watermark": float("nan")},
        {"window": 0}, {"lookahead": -1}, {"priority_tokens": -1}, {"max_running": 2.0},
    ],
    ids=repr,
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises((pk.WrongType, pk.InvalidArgument)):
        SchedulerOptions(**wrong)


def test_a_scheduler_needs_a_cache_with_room_for_its_sequences(serve):
    with pytest.raises(pk.WrongType, match="KVCache"):
        pk.Scheduler("cache")  # type: ignore[arg-type]
    with pytest.raises(pk.InvalidArgument, match="max_sequences"):
        serve(10, max_running=9, cache_options={"max_sequences": 8})
    with pytest.raises(pk.WrongType, match="SchedulerOptions"):
        pk.Scheduler(serve().cache, {"max_running": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "error"), [(None, pk.WrongType), (0, pk.WrongType), ("length", pk.InvalidArgument)], ids=repr
)
def test_an_abort_for_an_unknown_reason_is_refused_and_ends_nothing(serve, reason, error):
    server = serve()
    request = server.submit(prompt(1), 4)
    with pytest.raises(error, match="reason"):
        server.scheduler.abort(request, reason)
    assert server.run() == [request]


def test_requests_and_branches_of_others_are_refused(serve):
    mine, other = serve(), serve()
    request = other.submit(prompt(1), 4)
    with pytest.raises(pk.InvalidArgument, match="another scheduler"):
        mine.scheduler.abort(request)
    for wrong in (None, 3, "request"):
        with pytest.raises(pk.WrongType):
            mine.scheduler.abort(wrong)
        with pytest.raises(pk.WrongType):
            mine.scheduler.draft(wrong, [1])
        with pytest.raises(pk.WrongType):
            mine.scheduler.report(wrong, [1])
    for of in (request, request.branches[0]):
        with pytest.raises(pk.InvalidArgument, match="another scheduler"):
            mine.scheduler.draft(of, [1])
    other.run()
