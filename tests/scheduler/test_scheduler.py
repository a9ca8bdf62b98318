"""Requests from their queue to their last token: batches, chunks, namespaces."""

from __future__ import annotations

import pytest

import pagedkv as pk
from pagedkv.scheduler import SchedulerOptions

from .conftest import Server, greedy, prompt


def test_one_request_generates_what_its_model_says(serve):
    server = serve()
    request = server.submit(prompt(1), 6)
    assert server.run() == [request]
    assert [out.tolist() for out in request.outputs] == [greedy(request)]
    assert request.state == "finished"
    assert server.scheduler.stats().finished == 1


def test_nothing_to_do_is_an_empty_plan(serve):
    server = serve()
    assert not server.scheduler.schedule()
    assert not server.scheduler.has_work
    assert server.run() == []


def test_a_stop_token_ends_a_request_and_is_part_of_its_output(serve):
    server = serve()
    full = greedy(server.submit(prompt(1), 8))
    for stops in ([full[3]], [999, full[3], 998], [full[0]]):
        request = server.submit(prompt(1), 8, stop_tokens=stops)
        server.run()
        first = min(full.index(token) for token in stops if token in full)
        assert request.outputs[0].tolist() == full[: first + 1]


def test_many_requests_run_at_once_and_come_to_what_each_comes_to_alone(serve):
    server = serve(200)
    requests = [server.submit(prompt(i, 5 + i), 6) for i in range(8)]
    server.run()
    assert server.max_lanes == 8
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_prompts_are_computed_in_chunks_beside_those_that_decode(serve):
    server = serve(200, max_running=4, max_batch_tokens=10)
    first = server.submit(prompt(1, 4), 20)
    server.turn()
    long = server.submit(prompt(2, 35), 3)
    mixed = []
    while long.state != "finished":
        plan = server.scheduler.schedule()
        mixed.append((plan.num_tokens, len(plan.batch)))
        server.compute(plan)
        server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    assert mixed[:4] == [(10, 2)] * 3 + [(9, 2)], "9 tokens of the prompt beside the one that decodes, then the rest"
    assert first.outputs[0].tolist() == greedy(first)[: len(first.outputs[0])]
    server.run()


def test_a_step_never_has_more_tokens_than_allowed(serve):
    server = serve(400, max_running=6, max_batch_tokens=13)
    for i in range(12):
        server.submit(prompt(i, 1 + 7 * i % 40), 5)
    while server.scheduler.has_work:
        plan = server.scheduler.schedule()
        assert plan.num_tokens <= 13
        assert len(plan.batch) <= 6
        server.compute(plan)
        server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])


def test_a_second_request_finds_what_the_first_has_computed(serve):
    server = serve()
    server.submit(prompt(1, 20), 2)
    server.run()
    request = server.submit(prompt(1, 20), 2)
    server.run()
    assert request.hit_tokens["device"] == 16
    assert request.outputs[0].tolist() == greedy(request)


def test_last_tokens_say_whose_logits_are_wanted(serve):
    server = serve(200, max_running=4, max_batch_tokens=12)
    server.submit(prompt(1, 3), 9)
    server.turn()
    server.submit(prompt(2, 5), 9)
    server.submit(prompt(3, 30), 9)
    plan = server.scheduler.schedule()
    with server.scheduler.step(plan) as step:
        server.write(plan, step)
        assert plan.q_lens.tolist() == [1, 5, 6]
        assert plan.last_tokens.tolist() == [0, 5]
        assert step.tokens[plan.last_tokens].tolist() == [branch.tokens[-1] for branch in plan.lanes]
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()


def test_namespaces_are_kept_apart(serve):
    server = serve(100)
    spaces = [pk.Namespace(tenant="a"), pk.Namespace(tenant="b"), None]
    requests = [server.submit(prompt(1, 20), 3, namespace=space) for space in spaces]
    server.run()
    assert all(sum(request.hit_tokens.values()) == 0 for request in requests)
    again = server.submit(prompt(1, 20), 3, namespace=spaces[0])
    server.run()
    assert again.hit_tokens["device"] == 16


def test_the_toy_tells_a_wrong_cache():
    cache = pk.KVCache(pk.KVSpec(1, 1, 2, "float32", 4), pk.Blocks(20))
    server = Server(cache, SchedulerOptions(max_running=2, max_batch_tokens=8))
    server.submit(prompt(1, 6), 4)
    server.turn()
    cache.device_arena[:] = 1
    with pytest.raises(AssertionError, match="not what was computed"):
        server.turn()
