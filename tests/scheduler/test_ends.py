"""Requests that end early: aborts, deadlines, a closed cache."""

from __future__ import annotations

import pytest

import pagedkv as pk

from .conftest import greedy, prompt


def test_an_abort_ends_a_request_wherever_it_is(serve):
    server = serve(12, watermark=0.0)
    requests = [server.submit(prompt(i, 4), 20) for i in range(6)]
    while not server.scheduler.stats().suspended:
        server.turn()
    by_state = {request.state: request for request in requests}
    assert {"running", "suspended"} <= by_state.keys()
    made = {state: request.outputs[0].tolist() for state, request in by_state.items()}
    for state, request in by_state.items():
        server.scheduler.abort(request)
        server.scheduler.check_integrity()
        assert request.state == "aborted"
        assert request.outputs[0].tolist() == made[state], "what was generated can still be read"
        server.scheduler.abort(request)
    server.run()
    done = [request for request in requests if request.state == "finished"]
    assert len(done) == len(requests) - len(by_state)
    assert [request.outputs[0].tolist() for request in done] == [greedy(request) for request in done]


def test_an_abort_inside_a_step_leaves_the_others_alone(serve):
    server = serve()
    first, second = server.submit(prompt(1), 5), server.submit(prompt(2), 5)
    server.turn()
    plan = server.scheduler.schedule()
    with server.scheduler.step(plan) as step:
        server.write(plan, step)
        server.scheduler.abort(first)
        assert first.state == "aborted"
    assert server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes]) == []
    server.scheduler.check_integrity()
    assert server.run() == [second]
    assert second.outputs[0].tolist() == greedy(second)


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(serve):
    server = serve(max_running=1)
    runs, waits, in_time = (server.submit(prompt(i), 50, deadline_s=d) for i, d in ((1, 5.0), (2, 5.0), (3, 1000.0)))
    server.turn()
    server.now = 5.0
    assert server.turn()[:2] == [runs, waits]
    assert (runs.state, waits.state) == ("expired", "expired")
    assert 1 <= len(runs.outputs[0]) < 50
    assert server.run() == [in_time]
    assert server.scheduler.stats().expired == 2


def test_deadlines_of_requests_that_have_ended_are_forgotten(serve):
    server = serve(60)
    for i in range(3000):
        server.scheduler.abort(server.submit([i], 2, deadline_s=1e6))
    assert len(server.scheduler._deadlines) <= 1024
    last = server.submit([7], 200, deadline_s=5.0)
    server.turn()
    server.now = 6.0
    assert server.run() == [last]
    assert last.state == "expired"


def test_a_closed_cache_is_said_to_be_closed(serve):
    server = serve()
    server.submit(prompt(1), 4)
    server.turn()
    server.cache.close()
    with pytest.raises(pk.ClosedError):
        server.submit(prompt(2), 4)
    with pytest.raises(pk.ClosedError):
        server.turn()
