"""Drafted tokens and lookahead: what is right is kept, what is wrong is computed again."""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk

from .conftest import BLOCK, after, greedy, prompt


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
