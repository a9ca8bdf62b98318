"""Parallel samples and beams: forks of one prompt, through suspension and to their ends."""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.scheduler import expand_beams

from .conftest import after, chain, greedy, prompt


def test_parallel_samples_share_the_prompt_and_go_their_own_ways(serve):
    server = serve(100)
    request = server.submit(prompt(1, 14), 6, n=4)
    server.turn()
    assert server.cache.stats().computed_tokens == 14, "the prompt is computed once"
    blocks = [branch.seq.blocks.tolist() for branch in request.branches]
    assert all(row[:3] == blocks[0][:3] for row in blocks)
    server.run()
    assert [out.tolist() for out in request.outputs] == [greedy(request, first) for first in range(4)]


def test_samples_whose_first_token_stops_them_are_done_at_once(serve):
    server = serve(100)
    stop = after(prompt(1, 14), 2)
    request = server.submit(prompt(1, 14), 6, n=4, stop_tokens=[stop])
    server.turn()
    assert [branch.done for branch in request.branches].count(True) == 1
    server.run()
    assert sorted(out.tolist() for out in request.outputs) == sorted(greedy(request, first) for first in range(4))


def test_samples_of_one_token_are_all_there_after_one_report(serve):
    server = serve(100)
    request = server.submit(prompt(1, 14), 1, n=3)
    assert server.turn() == [request]
    assert [out.tolist() for out in request.outputs] == [[after(prompt(1, 14), i)] for i in range(3)]


@pytest.mark.parametrize("host", [None, 60], ids=["recompute", "swap"])
@pytest.mark.parametrize("branches", [{"n": 3}, {"beams": 3}], ids=["samples", "beams"])
def test_branches_that_were_suspended_come_back_and_share_again(serve, host, branches):
    server = serve(18, host=host, watermark=0.0)
    first = server.submit(prompt(1, 9), 40)
    request = server.submit(prompt(2, 13), 14, **branches)
    expected = [greedy(request, i) for i in range(3)]
    server.run()
    assert request.num_preemptions > 0
    assert first.num_preemptions == 0
    assert sorted(out.tolist() for out in request.outputs) == sorted(expected)
    assert first.outputs[0].tolist() == greedy(first)


@pytest.mark.parametrize("share", ["never", "next", "step"])  # without sharing, only their order saves the work
def test_branches_come_back_one_after_the_other_so_that_their_prompt_is_computed_once(serve, share):
    server = serve(100, max_batch_tokens=64, share=share)
    request = server.submit(prompt(1, 17), 8, n=3)
    for _ in range(3):
        server.turn()
    server.scheduler._running.suspend(request)  # what a lack of blocks does, with all blocks still cached or not
    server.cache.placement.clear()
    before = server.cache.stats().computed_tokens
    for _ in range(4):
        server.turn()
    again = server.cache.stats().computed_tokens - before
    assert again <= 17 + 3 * (4 + 3), "16 of the prompt once, and each branch's own tail"
    server.run()
    assert [out.tolist() for out in request.outputs] == [greedy(request, first) for first in range(3)]


def test_a_beam_search_finds_what_a_search_without_a_cache_finds(serve):
    width, length, stop = 3, 7, 11

    def log_probs(tokens):
        return np.log(np.random.default_rng(int(chain(tokens)[-1])).dirichlet(np.ones(50)))

    beams, finished = [(0.0, prompt(1, 6))], []
    for step in range(length):
        tokens, scores = expand_beams([b[0] for b in beams], [log_probs(b[1]) for b in beams], width, (stop,))
        pairs = [
            (score, [*beam[1], token])
            for beam, ts, ss in zip(beams, tokens, scores, strict=True)
            for token, score in zip(ts, ss, strict=True)
        ]
        finished += [pair for pair in pairs if pair[1][-1] == stop or step == length - 1]
        beams = [pair for pair in pairs if pair[1][-1] != stop]

    server = serve(100)
    request = server.submit(prompt(1, 6), length, beams=width, stop_tokens=[stop])
    scores = {tuple(prompt(1, 6)): 0.0}
    while not request.ended:
        plan = server.scheduler.schedule()
        server.compute(plan)
        lanes = [tuple(branch.tokens.tolist()) for branch in plan.lanes]
        entries, sums = expand_beams([scores[t] for t in lanes], [log_probs(t) for t in lanes], width, (stop,))
        for t, ts, ss in zip(lanes, entries, sums, strict=True):
            scores.update({(*t, token): score for token, score in zip(ts, ss, strict=True)})
        server.scheduler.report(plan, entries)
        server.scheduler.check_integrity()
    assert server.cache.table.num_rows == 0
    assert sorted(tuple(branch.tokens.tolist()) for branch in request.branches) == sorted(tuple(t) for _, t in finished)


@pytest.mark.parametrize("device", [60, 20])
@pytest.mark.parametrize("length", range(5, 10))
def test_beams_stay_in_step_when_steps_are_never_reported(serve, length, device):
    server = serve(device, max_running=4, max_batch_tokens=6)
    request = server.submit(prompt(1, length), 14, beams=3)
    other = server.submit(prompt(2, length), 30)
    for turn in range(200):
        if not server.scheduler.has_work:
            break
        if turn % 4 == 1:  # seldom enough that what was cut back is computed in between
            plan = server.scheduler.schedule()
            if plan:
                server.compute(plan)
                server.scheduler.cancel(plan)
                server.scheduler.check_integrity()
        server.turn()
        assert len({branch.num_output for branch in request.live()}) <= 1
    assert sorted(out.tolist() for out in request.outputs) == sorted(greedy(request, first) for first in range(3))
    assert other.outputs[0].tolist() == greedy(other)


def test_a_request_all_of_whose_beams_are_dropped_is_finished(serve):
    server = serve()
    request = server.submit(prompt(1, 6), 9, beams=2)
    server.turn()
    plan = server.scheduler.schedule()
    server.compute(plan)
    assert server.scheduler.report(plan, [[], []]) == [request]
    assert request.outputs == []
    server.run()


@pytest.mark.parametrize("entries", [[[1, 2], [3, 4]], [[1], [2], [3]], [[1.5], [2]], [[1]], [["x"], [1]]], ids=repr)
def test_beams_that_do_not_fit_change_nothing(serve, entries):
    server = serve()
    request = server.submit(prompt(1, 6), 5, beams=3)
    server.turn()
    plan = server.scheduler.schedule()
    server.compute(plan)
    if entries == [[1], [2], [3]]:
        entries = [[1], [2], [3, 4]]
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        server.scheduler.report(plan, entries)
    server.scheduler.check_integrity()
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert [out.tolist() for out in request.outputs] == [greedy(request, first) for first in range(3)]


def test_the_wrong_number_of_first_tokens_is_refused(serve):
    server = serve()
    server.submit(prompt(1, 6), 5, n=3)
    plan = server.scheduler.schedule()
    server.compute(plan)
    for wrong in ([[1, 2]], [[1, 2, 3, 4]], [7], [[]]):
        with pytest.raises(pk.InvalidArgument, match="wants 3 first tokens"):
            server.scheduler.report(plan, wrong)
    server.scheduler.report(plan, [[1, 2, 3]])
    server.scheduler.check_integrity()


def test_forks_without_rows_are_refused_before_anything_changes(serve):
    server = serve(60, max_running=3, cache_options={"max_sequences": 3})
    request = server.submit(prompt(1, 6), 5, n=3)
    plan = server.scheduler.schedule()
    others = [server.cache.sequence([1]), server.cache.sequence([2])]
    server.compute(plan)
    with pytest.raises(pk.InvalidArgument, match="max_sequences"):
        server.scheduler.report(plan, [[1, 2, 3]])
    server.scheduler.check_integrity()
    for seq in others:
        seq.release()
    server.run()
    assert len(request.outputs) == 3


def full_of_beams(serve, num_requests=1, max_new_tokens=5):
    """Requests with as many beams as the cache has sequences, all of them running."""
    width = 4 // num_requests
    server = serve(64, max_running=4, max_batch_tokens=64, cache_options={"max_sequences": 4})
    requests = [server.submit(prompt(i, 10), max_new_tokens, beams=width) for i in range(num_requests)]
    server.turn()
    assert server.cache.table.num_rows == 4
    return server, requests


def reported(server, entries):
    plan = server.scheduler.schedule()
    server.compute(plan)
    ended = server.scheduler.report(plan, entries)
    server.scheduler.check_integrity()
    return ended


def test_a_beam_forks_into_the_sequence_of_one_that_the_same_report_drops(serve):
    server, (request,) = full_of_beams(serve)
    kept, given = request.branches[0].tokens.tolist(), [[1, 2], [3], [4], []]
    reported(server, given)
    assert len(request.live()) == 4
    going_on = [branch.tokens.tolist() for branch in request.live()]
    assert [*kept, 1] in going_on
    assert [*kept, 2] in going_on
    for entries in ([[], [5, 6], [7, 8], []], [[], [], [], [9, 10, 11, 12]]):
        reported(server, entries)
    assert server.cache.table.num_rows == 4
    reported(server, [[1], [2], [3], [4]])
    assert request.state == "finished"


def test_a_beam_forks_into_the_sequence_that_another_request_drops_later_in_the_report(serve):
    server, (first, second) = full_of_beams(serve, 2)
    reported(server, [[1], [], [5], [6]])
    plan = server.scheduler.schedule()
    server.compute(plan)
    with server.cache.sequence([1]):  # now all four are taken
        server.scheduler.report(plan, [[1, 2], [5], []])
    assert (len(first.live()), len(second.live())) == (2, 1)
    server.run()


def test_forks_beyond_what_the_report_drops_are_refused_before_anything_changes(serve):
    server, (request,) = full_of_beams(serve)
    reported(server, [[1], [2], [], []])
    others = [server.cache.sequence([i]) for i in range(2)]
    plan = server.scheduler.schedule()
    server.compute(plan)
    with pytest.raises(pk.InvalidArgument, match="2 sequences more are needed"):
        server.scheduler.report(plan, [[1, 2], [3, 4]])
    with pytest.raises(pk.InvalidArgument, match="1 sequences more are needed"):
        server.scheduler.report(plan, [[1, 2, 3], []])
    server.scheduler.check_integrity()
    server.scheduler.report(plan, [[1, 2], []])
    for seq in others:
        seq.release()
    server.run()
    assert len(request.outputs) == 2


def test_expanding_beams_keeps_the_best_and_orders_them():
    tokens, scores = expand_beams([0.0, -1.0], np.log([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]), 2)
    assert tokens == [[0, 1], []]
    assert scores[0] == pytest.approx([np.log(0.5), np.log(0.3)])
    tokens, _ = expand_beams([0.0, -1.0], np.log([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]), 2, stop_tokens=(0,))
    assert tokens == [[0, 1], [1]], "a stopping token takes no place"


@pytest.mark.parametrize(
    ("scores", "log_probs"),
    [([0.0], [[np.nan, 0.0]]), (0.0, [0.0]), ([], np.zeros((0, 3))), ([0.0, 1.0], np.zeros((3, 4)))],
)
def test_expanding_what_is_not_beams_is_refused(scores, log_probs):
    with pytest.raises(pk.InvalidArgument):
        expand_beams(scores, log_probs, 2)
