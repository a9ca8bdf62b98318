"""A bound on the queue: one request too many is refused, and told when to come back."""

from __future__ import annotations

import pytest

import pagedkv as pk

from .conftest import prompt


def test_one_request_too_many_is_refused_and_nothing_of_it_is_left(serve):
    server = serve(max_running=1, max_waiting=2)
    for i in range(2):
        server.submit(prompt(i), 4)
    with pytest.raises(pk.QueueFull, match="2 requests wait, and max_waiting = 2") as refused:
        server.submit(prompt(7), 4)
    assert (refused.value.waiting, refused.value.max_waiting, refused.value.retry_after_s) == (2, 2, None)
    assert refused.value.finish_reason == "refused"
    stats = server.scheduler.stats()
    assert (stats.waiting, stats.ended["refused"]) == (2, 1)
    assert len(server.run()) == 2


def test_those_that_run_or_are_suspended_do_not_count(serve):
    server = serve(12, watermark=0.0, max_waiting=6)
    requests = [server.submit(prompt(i, 4), 20) for i in range(6)]
    while not server.scheduler.stats().suspended:
        server.turn()
    room = 6 - server.scheduler.stats().waiting
    assert room > 0
    for i in range(room):
        server.submit(prompt(20 + i, 4), 2)
    with pytest.raises(pk.QueueFull):
        server.submit(prompt(40, 4), 2)
    assert len(server.run()) >= len(requests) + room


def test_a_place_in_the_queue_is_free_again_when_a_request_begins_or_is_aborted(serve):
    server = serve(max_running=1, max_waiting=1)
    server.submit(prompt(1), 2)
    server.turn()
    waits = server.submit(prompt(2), 2)
    with pytest.raises(pk.QueueFull):
        server.submit(prompt(3), 2)
    server.scheduler.abort(waits)
    server.submit(prompt(3), 2)
    server.run()


def test_the_refusal_says_how_long_the_queue_takes_at_the_rate_of_late(serve):
    server = serve(max_running=1, max_waiting=3, max_batch_tokens=64)
    for i in range(3):
        server.submit(prompt(i), 1)
    for _ in range(3):
        server.turn()
        server.now += 2.0
    for i in range(3):
        server.submit(prompt(10 + i), 1)
    with pytest.raises(pk.QueueFull, match="in 6 s at the rate of late") as refused:
        server.submit(prompt(20), 1)
    assert refused.value.retry_after_s == 6.0, "three began in 6 seconds, and three wait"
    server.run()


def test_a_request_that_can_never_run_is_refused_for_that_whatever_the_queue_has(serve):
    server = serve(8, max_waiting=1)
    server.submit(prompt(1), 2)
    with pytest.raises(pk.RequestTooLarge) as refused:
        server.submit(prompt(2, 100), 2)
    assert refused.value.finish_reason == "refused"
    assert server.scheduler.stats().ended["refused"] == 1
    server.run()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "many", True])
def test_a_bound_is_a_number_of_requests(wrong):
    with pytest.raises((pk.InvalidArgument, pk.WrongType), match="max_waiting"):
        pk.SchedulerOptions(max_waiting=wrong)
