"""Whose turn it is: first come, priorities, tenants, cached prefixes.

The turn of every request comes.
"""

from __future__ import annotations

from random import Random

import pytest

import pagedkv as pk

from .conftest import greedy, prompt


def begin_order(server, requests):
    """Requests in the order they were admitted."""
    order = []
    while server.scheduler.has_work:
        server.turn()
        order += sorted((r for r in requests if r.admitted and r not in order), key=lambda r: r.id)
    return order


def test_without_priorities_the_first_to_come_is_the_first_to_begin(serve):
    server = serve(200, max_running=1)
    requests = [server.submit(prompt(i, 30 - i), 4) for i in range(6)]
    assert begin_order(server, requests) == requests


def test_a_higher_priority_begins_first(serve):
    server = serve(200, max_running=1)
    requests = [server.submit(prompt(i, 5), 4, priority=p) for i, p in enumerate((10, 90, 50, 90))]
    assert [r.id for r in begin_order(server, requests)] == [1, 3, 2, 0]


def test_the_lowest_priority_is_suspended_first(serve):
    server = serve(14, watermark=0.0)
    requests = [server.submit(prompt(i, 4), 24, priority=p) for i, p in enumerate((40, 10, 90))]
    while not server.scheduler.stats().suspended:
        server.turn()
    assert [r.id for r in requests if r.state == "suspended"] == [1]
    server.run()
    assert requests[2].num_preemptions == 0
    assert [r.outputs[0].tolist() for r in requests] == [greedy(r) for r in requests]


def test_a_higher_priority_takes_the_place_of_a_lower_one_that_runs(serve):
    server = serve(200, max_running=1)
    low = server.submit(prompt(1, 5), 20, priority=10)
    for _ in range(3):
        server.turn()
    high = server.submit(prompt(2, 5), 4, priority=90)
    equal = server.submit(prompt(3, 5), 4, priority=10)
    ended = server.run()
    assert ended == [high, low, equal]
    assert low.num_preemptions == 1
    assert low.outputs[0].tolist() == greedy(low)


def test_a_low_priority_gets_its_turn_under_an_endless_stream_of_high_ones(serve):
    server = serve(60, max_running=2, priority_tokens=10)
    low = server.submit(prompt(0, 5), 4, priority=0)
    tokens = number = 0
    while not low.ended:
        while server.scheduler.stats().waiting < 4:
            number += 1
            server.submit(prompt(number, 5), 4, priority=100)
        server.turn()
        assert server.tokens < 2 * (100 * 10 + 6 * 9), "a head start of 100 levels of 10 tokens, and those under way"
        tokens += 1
    assert low.state == "finished"
    server.run()


@pytest.mark.parametrize(("weight", "low", "high"), [(1.0, 0.4, 0.6), (3.0, 0.65, 0.85)])
def test_tenants_get_their_shares_whatever_they_ask_for(serve, weight, low, high):
    server = serve(200, max_running=4, priority_tokens=0)
    server.scheduler.set_weight("a", weight)
    random, done = Random(1), {"a": 0, "b": 0}
    number = 0
    for _ in range(400):
        waiting = [r.tenant for r in server.scheduler._queue.first(1000)]
        while waiting.count("a") < 3:
            number += 1
            waiting.append(server.submit(prompt(number, 8), 6, tenant="a").tenant)
        while waiting.count("b") < 40:
            number += 1
            tokens = prompt(number, random.randint(4, 12))
            waiting.append(server.submit(tokens, 50, tenant="b", stop_tokens=range(9)).tenant)
        for request in server.turn():
            done[request.tenant] += len(request.prompt) + len(request.outputs[0])
    assert low < done["a"] / (done["a"] + done["b"]) < high, done


def test_a_tenant_who_was_away_has_no_arrears(serve):
    server = serve(200, max_running=1)
    for i in range(10):
        server.submit(prompt(i, 5), 4, tenant="a")
    server.run()
    both = [server.submit(prompt(20 + i, 5), 4, tenant="ab"[i % 2]) for i in range(8)]
    order = [r.tenant for r in begin_order(server, both)]
    assert order[:6].count("b") <= 4, "a and b take turns: b is not served for the time it was away"


def test_a_crowd_of_tenants_of_one_request_each_starves_nobody(serve):
    server = serve(60, max_running=2)
    regular = [server.submit(prompt(i, 5), 4, tenant="regular") for i in range(5)]
    number = 100
    while not all(r.ended for r in regular):
        while server.scheduler.stats().waiting < 6:
            number += 1
            server.submit(prompt(number, 5), 4, tenant=f"guest {number}")
        server.turn()
        assert server.steps < 2000
    server.run()
    assert len(server.scheduler._queue._tenants) < 200, "guests without work and debts are forgotten"


def test_the_longest_cached_prefix_may_go_first(serve):
    for order, expected in (("first_come", [1, 2, 3]), ("longest_prefix", [3, 2, 1])):
        server = serve(200, max_running=1, order=order)
        server.submit(prompt(7, 41), 1)
        server.run()
        requests = [server.submit([*prompt(7, 41)[:cached], *prompt(20 + cached, 5)], 2) for cached in (0, 16, 40)]
        assert [r.id for r in begin_order(server, requests)] == expected


def test_nobody_is_overtaken_more_often_than_the_window(serve):
    server = serve(200, max_running=1, order="longest_prefix", window=4)
    server.submit(prompt(7, 41), 1)
    server.run()
    stranger = server.submit(prompt(99, 9), 2)
    overtook, number = 0, 0
    while not stranger.admitted:
        while server.scheduler.stats().waiting < 8:
            number += 1
            server.submit([*prompt(7, 41)[:40], number], 2)
        overtook += sum(r.id > stranger.id for r in server.turn())
        assert overtook <= 5
    assert stranger.overtaken == 4
    server.run()


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), 1e9, "2", True, None])
def test_a_weight_that_is_none_is_refused(serve, wrong):
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        serve().scheduler.set_weight("a", wrong)


def test_beams_are_charged_for_every_sequence_they_run(serve):
    """Those that were dropped on the way were computed, too."""
    server = serve(300, max_running=8, priority_tokens=0)
    served, number = {"plain": 0, "beams": 0}, 0
    for _ in range(400):
        waiting = [r.tenant for r in server.scheduler._queue.first(1000)]
        for tenant, beams in (("plain", 1), ("beams", 4)):
            for _ in range(4 - waiting.count(tenant)):
                number += 1
                server.submit(prompt(number, 8), 16, tenant=tenant, beams=beams)
        for request in server.turn():
            width = 4 if request.tenant == "beams" else 1
            served[request.tenant] += len(request.prompt) + width * max(len(tokens) for tokens in request.outputs)
    share = served["plain"] / sum(served.values())
    assert 0.4 < share < 0.6, served
