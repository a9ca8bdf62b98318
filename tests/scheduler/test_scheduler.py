"""Requests from their queue to their last token: batches, chunks, suspensions, ends."""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.scheduler import SchedulerOptions

from .conftest import BLOCK, Server, after, greedy, prompt


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


# ---- too few blocks


@pytest.mark.parametrize("host", [None, 100], ids=["recompute", "swap"])
def test_when_blocks_run_out_the_last_is_suspended_and_comes_to_the_same(serve, host):
    server = serve(12, host=host, watermark=0.0)
    requests = [server.submit(prompt(i, 4), 20) for i in range(4)]
    server.run()
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]
    stats = server.scheduler.stats()
    assert stats.preempted_by_swap + stats.preempted_by_recompute > 0
    assert requests[0].num_preemptions == 0, "the first of them never gives way"
    assert {request.preempted_by for request in requests} <= ({None, "swap"} if host else {None, "recompute"})


def test_swapped_blocks_come_back_from_the_host(serve):
    server = serve(12, host=100, watermark=0.0)
    for i in range(4):
        server.submit(prompt(i, 4), 20)
    server.run()
    moved = server.cache.stats().moved_bytes
    assert moved.get("device_to_host", 0) > 0
    assert moved.get("host_to_device", 0) > 0


def test_measured_costs_decide_between_swapping_and_computing_again(serve):
    for load_s, how in ((1e-6, "swap"), (10.0, "recompute")):
        server = serve(12, host=100, watermark=0.0)
        server.cache.costs.observe_prefill(1000, 1.0)
        server.cache.costs.observe_load(1, server.cache.spec.block_bytes, load_s)
        requests = [server.submit(prompt(i, 4), 20) for i in range(4)]
        while not server.scheduler.stats().suspended:
            server.turn()
        assert {request.preempted_by for request in requests if request.state == "suspended"} == {how}
        server.run()
        assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_with_worst_case_admission_nobody_is_ever_suspended(serve):
    server = serve(12, admission="worst_case")
    requests = [server.submit(prompt(i, 4), 20) for i in range(6)]
    server.run()
    stats = server.scheduler.stats()
    assert stats.preempted_by_swap == stats.preempted_by_recompute == 0
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_the_watermark_leaves_room_for_those_that_run(serve):
    preemptions = []
    for watermark in (0.0, 0.5):
        server = serve(20, watermark=watermark)
        for i in range(6):
            server.submit(prompt(i, 8), 12)
        server.run()
        stats = server.scheduler.stats()
        preemptions.append(stats.preempted_by_swap + stats.preempted_by_recompute)
    assert preemptions[1] < preemptions[0]


def test_a_request_of_exactly_the_device_runs_and_one_token_more_is_refused(serve):
    server = serve(5)
    fits = server.submit(prompt(1, 9), 5 * BLOCK - 9 + 1)
    other = server.submit(prompt(2, 4), 2)
    server.run()
    assert fits.outputs[0].tolist() == greedy(fits)
    assert other.outputs[0].tolist() == greedy(other)
    with pytest.raises(pk.RequestTooLarge, match=r"6 blocks on the device, and there are 5 in all") as caught:
        server.submit(prompt(1, 9), 5 * BLOCK - 9 + 2)
    assert (caught.value.asked, caught.value.capacity) == (6, 5)
    assert not server.scheduler.has_work


@pytest.mark.parametrize(("n", "beams"), [(9, 1), (1, 9)])
def test_more_branches_than_may_run_are_refused(serve, n, beams):
    server = serve(400)
    with pytest.raises(pk.RequestTooLarge, match="9 sequences"):
        server.submit(prompt(1), 4, n=n, beams=beams)


@pytest.mark.parametrize("branches", [{"n": 3}, {"beams": 3}], ids=["samples", "beams"])
def test_branches_of_exactly_the_device_run(serve, branches):
    need = 9 // BLOCK + 3 * (-(-(9 + 12 - 1) // BLOCK) - 9 // BLOCK + 1)
    server = serve(need)
    request = server.submit(prompt(1, 9), 12, **branches)
    other = server.submit(prompt(2, 9), 12)
    server.run()
    assert [len(out) for out in request.outputs] == [12] * 3
    assert other.outputs[0].tolist() == greedy(other)
    with pytest.raises(pk.RequestTooLarge):
        serve(need - 1).submit(prompt(1, 9), 12, **branches)


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


# ---- ends


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


# ---- steps that go wrong


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


def test_a_closed_cache_is_said_to_be_closed(serve):
    server = serve()
    server.submit(prompt(1), 4)
    server.turn()
    server.cache.close()
    with pytest.raises(pk.ClosedError):
        server.submit(prompt(2), 4)
    with pytest.raises(pk.ClosedError):
        server.turn()


def test_namespaces_are_kept_apart(serve):
    server = serve(100)
    spaces = [pk.Namespace(tenant="a"), pk.Namespace(tenant="b"), None]
    requests = [server.submit(prompt(1, 20), 3, namespace=space) for space in spaces]
    server.run()
    assert all(sum(request.hit_tokens.values()) == 0 for request in requests)
    again = server.submit(prompt(1, 20), 3, namespace=spaces[0])
    server.run()
    assert again.hit_tokens["device"] == 16


# ---- drafts


@pytest.mark.parametrize("right", range(5))
def test_a_draft_is_kept_as_far_as_it_is_right(serve, right):
    server = serve()
    request = server.submit(prompt(1, 6), 30)
    server.turn()
    while not request.ended:
        before, wanted = len(request.outputs[0]), list[int]()
        for i in range(4):
            token = after([*request.branches[0].tokens.tolist(), *wanted])
            wanted.append(token if i < right else (token + 1) % 50)
        server.scheduler.draft(request, wanted)
        server.turn()
        if request.ended or server.scheduler.stats().sequences == 0:
            break
        assert len(request.outputs[0]) - before in (right + 1, 1, 0), "1 or 0: what was cut back is computed again"
    assert request.outputs[0].tolist() == greedy(request)


def test_right_drafts_make_fewer_steps(serve):
    server = serve()
    request = server.submit(prompt(1, 6), 31)
    server.turn()
    steps = 0
    while not request.ended:
        tokens, wanted = request.branches[0].tokens.tolist(), []
        for _ in range(5):
            wanted.append(after([*tokens, *wanted]))
        server.scheduler.draft(request, wanted)
        server.turn()
        steps += 1
    assert steps == 5
    assert request.outputs[0].tolist() == greedy(request)


def test_a_stop_token_inside_a_draft_ends_the_request_there(serve):
    server = serve()
    full = greedy(server.submit(prompt(1, 6), 12))
    server.run()
    stop = full[3]
    request = server.submit(prompt(1, 6), 12, stop_tokens=[stop])
    server.turn()
    if not request.ended:
        server.scheduler.draft(request, full[1:7])
        server.run()
    assert request.outputs[0].tolist() == full[: full.index(stop) + 1]


def test_a_draft_of_a_step_that_raised_is_forgotten(serve):
    server = serve()
    request = server.submit(prompt(1, 6), 12)
    server.turn()
    for right in (True, False):
        full = greedy(request)
        server.scheduler.draft(request, full[1:5] if right else [1, 1, 1, 1])
        plan = server.scheduler.schedule()
        assert plan.num_drafts.tolist() == [4]
        with pytest.raises(ZeroDivisionError):
            server.compute(plan, then=ZeroDivisionError)
        server.scheduler.cancel(plan)
        with pytest.raises(pk.InvalidArgument):
            server.scheduler.cancel(plan)
    plan = server.scheduler.schedule()
    assert plan.num_drafts.tolist() == [0]
    server.run()
    assert request.outputs[0].tolist() == greedy(request)


def test_drafts_survive_a_schedule_that_raises(serve):
    server = serve(10)
    request = server.submit(prompt(1, 2 * BLOCK), 20)
    server.turn()
    full = greedy(request)
    server.scheduler.draft(request, full[1:7])
    held = server.cache.sequence(prompt(9, 8 * BLOCK))
    with server.cache.step([held]) as step:
        step.mark_written(0)
    server.scheduler.check_integrity()
    for _ in range(2):
        with pytest.raises(pk.OutOfBlocks):
            server.scheduler.schedule()
        server.scheduler.check_integrity()
    held.release()
    plan = server.scheduler.schedule()
    assert plan.num_drafts.tolist() == [6]
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    assert request.outputs[0].tolist() == full[:8], "all of the draft was right"
    server.run()
    assert request.outputs[0].tolist() == full


def test_a_draft_of_a_step_that_was_never_reported_is_forgotten(serve):
    server = serve()
    request = server.submit(prompt(1, 6), 14)
    server.turn()
    for k in (1, 4, 6):
        server.scheduler.draft(request, [3] * k)
        plan = server.scheduler.schedule()
        server.compute(plan)
        server.scheduler.cancel(plan)
        server.scheduler.check_integrity()
    server.run()
    assert request.outputs[0].tolist() == greedy(request)


def test_a_report_that_contradicts_its_draft_changes_nothing(serve):
    server = serve()
    request = server.submit(prompt(1, 6), 12)
    server.turn()
    server.scheduler.draft(request, greedy(request)[1:4])
    plan = server.scheduler.schedule()
    server.compute(plan)
    for wrong in ([[]], [[49, 48, 1]], [[1] * 5], [[*greedy(request)[1:4], 1, 2]], 7, [[1.5]]):
        with pytest.raises((pk.InvalidArgument, pk.WrongType)):
            server.scheduler.report(plan, wrong)
        server.scheduler.check_integrity()
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert request.outputs[0].tolist() == greedy(request)


def test_a_draft_is_for_a_branch_that_lives_and_between_report_and_schedule(serve):
    server = serve()
    request = server.submit(prompt(1, 6), 12)
    server.scheduler.draft(request, [1])
    server.turn()
    assert request.outputs[0].tolist() == greedy(request)[:1], "its prompt was computed, and no draft"
    plan = server.scheduler.schedule()
    with pytest.raises(pk.InvalidArgument, match="a plan is out"):
        server.scheduler.draft(request, [1])
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    with pytest.raises(pk.WrongType):
        server.scheduler.draft(request, [1.5])
    server.run()
    with pytest.raises(pk.InvalidArgument, match="it has ended"):
        server.scheduler.draft(request.branches[0], [1])


def test_lookahead_gives_slots_beyond_the_tokens(serve):
    server = serve(60, lookahead=5)
    request = server.submit(prompt(1, 7), 6)
    server.turn()
    plan = server.scheduler.schedule()
    with server.scheduler.step(plan) as step:
        server.write(plan, step)
        assert np.count_nonzero(step.block_tables[0] >= 0) * BLOCK >= int(step.seq_lens[0]) + 5
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert request.outputs[0].tolist() == greedy(request)


def test_the_toy_tells_a_wrong_cache():
    cache = pk.KVCache(pk.KVSpec(1, 1, 2, "float32", 4), pk.Blocks(20))
    server = Server(cache, SchedulerOptions(max_running=2, max_batch_tokens=8))
    server.submit(prompt(1, 6), 4)
    server.turn()
    cache.device_arena[:] = 1
    with pytest.raises(AssertionError, match="not what was computed"):
        server.turn()


def test_with_room_for_one_prompt_the_second_waits_until_the_first_has_its_blocks(serve):
    server = serve(13, max_batch_tokens=64, watermark=0.0)
    requests = [server.submit(prompt(i, 8 * BLOCK), 3) for i in range(2)]
    server.turn()
    assert [request.state for request in requests] == ["running", "waiting"], "8 of 13 blocks are spoken for"
    server.run()
    assert [request.num_preemptions for request in requests] == [0, 0]
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]


def test_an_opening_that_finds_no_room_counts_no_prompt_and_no_hit(serve):
    server = serve(4, max_running=8)
    shared = prompt(1, BLOCK)
    rest = ((2, BLOCK - 1), (3, BLOCK + 1), (4, 1))
    requests = [server.submit([*shared, *prompt(i, n)], 1 if i == 4 else 3) for i, n in rest]
    server.run()
    stats = server.cache.stats()
    assert server.scheduler.stats().preempted_by_recompute == 0
    assert stats.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert sum(stats.hit_tokens.values()) == sum(sum(request.hit_tokens.values()) for request in requests) > 0
