"""Blocks and rows that other callers of the cache hold.

The scheduler says so, waits, and loses nothing.
"""

from __future__ import annotations

import pytest

import pagedkv as pk

from .conftest import BLOCK, greedy, prompt


def test_what_others_hold_is_told_and_nothing_is_lost(serve):
    server = serve(8)
    held = server.cache.sequence(prompt(9, 6 * BLOCK))
    with server.cache.step([held]) as step:
        step.mark_written(0)
    request = server.submit(prompt(1, 4 * BLOCK), 3)
    with pytest.raises(pk.OutOfBlocks):
        server.scheduler.schedule()
    server.scheduler.check_integrity()
    held.release()
    server.run()
    assert request.outputs[0].tolist() == greedy(request)


def test_who_expired_is_told_by_the_next_plan_where_there_was_none(serve):
    server = serve(8)
    held = server.cache.sequence(prompt(9, 6 * BLOCK))
    with server.cache.step([held]) as step:
        step.mark_written(0)
    late = server.submit(prompt(2, 5), 3, deadline_s=1.0)
    waits = server.submit(prompt(1, 4 * BLOCK), 3)
    server.now = 2.0
    with pytest.raises(pk.OutOfBlocks):
        server.scheduler.schedule()
    assert late.state == "expired"
    held.release()
    assert server.scheduler.schedule().expired == (late,)
    server.run()
    assert waits.outputs[0].tolist() == greedy(waits)


def test_what_others_take_while_it_runs_is_told_and_nothing_is_lost(serve):
    server = serve(8)
    request = server.submit(prompt(1, 6), 20)
    for _ in range(3):
        server.turn()
    held = server.cache.sequence(prompt(9, 5 * BLOCK))
    with server.cache.step([held]) as step:
        step.mark_written(0)
    with pytest.raises(pk.OutOfBlocks):
        server.run()
    server.scheduler.check_integrity()
    assert request.state == "running"
    held.release()
    server.run()
    assert request.outputs[0].tolist() == greedy(request)


def test_rows_that_others_use_are_waited_for(serve):
    server = serve(100, max_running=4, cache_options={"max_sequences": 4})
    others = [server.cache.sequence([i]) for i in range(2)]
    requests = [server.submit(prompt(i), 4) for i in range(4)]
    for _ in range(20):
        server.turn()
    assert server.max_lanes == 2
    for seq in others:
        seq.release()
    server.run()
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_when_others_hold_all_rows_that_is_said_and_nothing_is_lost(serve):
    server = serve(100, max_running=2, cache_options={"max_sequences": 2})
    others = [server.cache.sequence([i]) for i in range(2)]
    request = server.submit(prompt(1), 4)
    with pytest.raises(pk.InvalidArgument, match="others than the scheduler hold 2 of the cache's 2"):
        server.scheduler.schedule()
    others[0].release()
    assert server.scheduler.schedule()
    server.scheduler.abort(request)
    others[1].release()
    server.run()
