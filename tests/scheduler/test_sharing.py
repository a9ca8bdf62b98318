"""Prompts that are computed once for all requests that come with them at once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.scheduler import Request, Scheduler, SchedulerOptions
from tests.in_blocks import in_blocks

from .conftest import BLOCK, SPEC, Server, after, chain, greedy, prompt

SHARES = ("step", "next", "never")


def herd(server: Server, size: int, prefix: int = 24, own: int = 1, max_new_tokens: int = 2) -> list[Request]:
    """Requests with one new beginning and `own` tokens of their own each."""
    return [server.submit([*prompt(1, prefix), *prompt(10 + i, own)], max_new_tokens) for i in range(size)]


def run_in_order(server: Server) -> list[int]:
    return [request.id for request in server.run()]


# ---- the cost of a herd


@pytest.mark.parametrize("share", ["step", "next"])
@pytest.mark.parametrize("most", [512, 2048, 8192, 65536])
def test_a_herd_computes_its_common_prompt_once(share, most):
    spec = pk.KVSpec(1, 1, 1, "float32", 16)
    with pk.KVCache(spec, in_blocks(6000)) as cache:
        scheduler = Scheduler(cache, SchedulerOptions(max_batch_tokens=most, share=share))
        requests = [scheduler.submit(np.r_[np.arange(2000), 5000 + i], 2) for i in range(20)]
        computed, ended = 0, []
        while scheduler.has_work:
            plan = scheduler.schedule()
            computed += plan.num_tokens
            with scheduler.step(plan) as step:
                step.mark_written(0)
                cache.check_integrity()
            rows = [cache.table.blocks(seq.row)[:125].tolist() for seq in plan.sequences if seq.num_computed > 2000]
            assert all(row == rows[0] for row in rows)
            ended += scheduler.report(plan, [1] * len(plan.lanes))
            scheduler.check_integrity()
        assert computed == 2001 + 19 + 20
        assert ended == requests
        assert cache.match(np.arange(2000)) == {"device": 2000}
        assert cache.stats().blocks["device"]["cached"] == 125
        assert scheduler.stats().shared_tokens > 0


def test_without_sharing_each_request_of_a_herd_computes_it(serve):
    server = serve(share="never", max_batch_tokens=200)
    herd(server, 8)
    server.run()
    assert server.tokens == 8 * 25 + 8
    assert server.scheduler.stats().shared_tokens == 0


def test_a_plan_says_what_it_shares(serve):
    server = serve(max_batch_tokens=200)
    herd(server, 3)
    plan = server.scheduler.schedule()
    assert (plan.num_tokens, plan.shared_tokens) == (25 + 1 + 1, 2 * 24)
    assert plan.batch.follow.tolist() == [[1, 0, 6], [2, 0, 6]]
    assert server.scheduler.stats().shared_tokens == 0, "it is not reported"
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    assert server.scheduler.stats().shared_tokens == 48
    plan = server.scheduler.schedule()
    assert plan.batch.follow is None
    server.run()


def test_blocks_of_a_common_prompt_are_taken_once(serve):
    """Room for one prompt and a block for each request is enough for all of them at once."""
    ends = {}
    for share in SHARES:
        server = serve(18, max_running=8, max_batch_tokens=200, watermark=0.0, share=share)
        requests = herd(server, 8, prefix=32, own=1, max_new_tokens=3)
        assert server.run() == requests
        ends[share] = server.steps
        if share == "step":
            assert server.max_lanes == 8
            assert server.scheduler.stats().preempted_by_recompute == 0
    assert ends["step"] == 3 <= ends["next"] < ends["never"]


def test_blocks_of_prompts_under_way_that_share_are_promised_once(serve):
    """Two prompts of a step that was taken back leave room for a third."""
    server = serve(18, max_batch_tokens=200, watermark=0.0)
    herd(server, 2, prefix=32)
    server.scheduler.cancel(server.scheduler.schedule())
    herd(server, 1, prefix=32)
    assert len(server.scheduler.schedule().sequences) == 3
    server.run()


@pytest.mark.parametrize("share", SHARES)
def test_everything_is_right_and_ends_in_order(serve, share):
    server = serve(share=share, max_batch_tokens=20)
    requests = herd(server, 8, prefix=30, own=3, max_new_tokens=5)
    assert run_in_order(server) == [request.id for request in requests]
    for request in requests:
        assert request.outputs[0].tolist() == greedy(request)


def test_a_wrong_way_to_share_is_refused():
    with pytest.raises(pk.InvalidArgument, match="share"):
        SchedulerOptions(share="always")


def test_blocks_that_two_prompts_of_a_step_share_count_as_used_twice(tmp_path):
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(40), write="reused")
    with pk.KVCache(SPEC, in_blocks(40), disk=disk) as cache:
        server = Server(cache)
        for size in (1, 2):
            server.submit([*prompt(size, 12), 1], 1)
        server.submit([*prompt(2, 12), 2], 1)
        server.run()
        while (counts := cache.stats().placement)["wanted"] or counts["in_flight"]:
            time.sleep(0.001)
        assert counts["copied"]["disk"] == 3, "the prompt that came twice"


# ---- who shares with whom


def test_nothing_crosses_a_namespace(serve):
    server = serve(max_batch_tokens=200)
    tokens = prompt(1, 21)
    for tenant in ("a", "b", "a"):
        server.submit(tokens, 1, namespace=pk.Namespace(tenant=tenant))
    plan = server.scheduler.schedule()
    assert plan.batch.follow.tolist() == [[2, 0, 5]]
    assert plan.num_tokens == 21 + 21 + 1
    with server.scheduler.step(plan) as step:
        tables = [set(row[:5].tolist()) for row in step.block_tables]
        assert tables[0] == tables[2]
        assert not tables[0] & tables[1]
        step.mark_written(0)
    server.scheduler.report(plan, [1, 1, 1])


def test_a_request_of_better_rank_leads_whoever_came_first(serve):
    server = serve(max_batch_tokens=18)
    late = server.submit([*prompt(1, 24), 1], 1, priority=0)
    first = server.submit([*prompt(1, 24), 2], 1, priority=100)
    plan = server.scheduler.schedule()
    assert [seq.tokens[-1] for seq in plan.sequences] == [2]
    server.compute(plan)
    server.scheduler.report(plan, [])
    plan = server.scheduler.schedule()
    assert [branch.request for branch in plan.lanes] == [first, late]
    assert plan.q_lens.tolist() == [7, 1]
    server.compute(plan)
    server.scheduler.report(plan, [1, 1])


def test_a_drafted_token_is_no_block_that_a_prompt_could_take(serve):
    """A draft fills a block of a request that decodes; a prompt computes these tokens itself."""
    server = serve(max_batch_tokens=60)
    first = server.submit(prompt(1, 5), 20)
    server.turn()
    tokens = first.branches[0].tokens.tolist()
    draft = []
    for _ in range(6):
        draft.append(after([*tokens, *draft]))
    server.scheduler.draft(first, draft)
    second = server.submit([*tokens, *draft, 7], 2)
    plan = server.scheduler.schedule()
    assert plan.has_drafts
    assert plan.batch.follow is None
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert second.outputs[0].tolist() == greedy(second)


def test_slots_for_lookahead_are_no_blocks_that_a_prompt_could_take(serve):
    server = serve(max_batch_tokens=60, lookahead=9)
    server.submit(prompt(1, 6), 2)
    second = server.submit([*prompt(1, 6), *prompt(2, 9)], 2)
    plan = server.scheduler.schedule()
    assert plan.batch.follow.tolist() == [[1, 0, 1]]
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert second.outputs[0].tolist() == greedy(second)


def test_a_follower_stands_before_a_leader_that_waits_for_its_branches(serve):
    """A request that comes back with branches computes all but its last token first."""
    server = serve(max_batch_tokens=60)
    mine = pk.Namespace(tenant="a")
    leader = server.submit(prompt(1, 16), 6, n=2, namespace=mine, priority=100)
    server.turn()
    server.scheduler._running.suspend(leader)
    server.cache.purge(mine)
    short = server.submit(prompt(1, 9), 3, namespace=mine)
    plan = server.scheduler.schedule()
    assert list(plan.lanes) == short.branches
    assert plan.batch.follow.tolist() == [[0, 1, 2]]
    assert plan.q_lens.tolist() == [1, 16]
    with pytest.raises(pk.InvalidArgument, match="was not committed"):
        server.scheduler.report(plan, [1])
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    assert short.outputs[0].tolist() == greedy(short)
    assert sorted(out.tolist() for out in leader.outputs) == sorted(greedy(leader, first) for first in range(2))


def test_a_prompt_that_copied_part_of_its_next_block_follows_all_the_same(serve):
    server = serve(max_batch_tokens=60)
    server.submit([*prompt(1, 4), *prompt(2, 4)], 1)  # whose second block begins as the next ones' second
    server.run()
    tokens = [*prompt(1, 4), *prompt(2, 2), *prompt(3, 12)]
    requests = [server.submit([*tokens, i], 2) for i in range(3)]
    before = server.tokens
    server.run()
    assert [request.hit_tokens["partial"] for request in requests] == [2, 2, 2]
    assert server.tokens - before == (19 - 6) + 2 * 3 + 3
    for request in requests:
        assert request.outputs[0].tolist() == greedy(request)


@pytest.mark.parametrize("kind", [{"n": 3}, {"beams": 2}])
def test_requests_with_branches_lead_and_follow(serve, kind):
    server = serve(max_batch_tokens=60)
    requests = [server.submit([*prompt(1, 12), i], 4, **(kind if i != 1 else {})) for i in range(3)]
    plan = server.scheduler.schedule()
    assert plan.num_tokens == 13 + 1 + 1
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    for request in requests:
        if request.beams == 1:
            expected = sorted(greedy(request, first) for first in range(request.n))
            assert sorted(out.tolist() for out in request.outputs) == expected


# ---- steps that fail, requests that go


@pytest.mark.parametrize("moment", ["before", "written"])
def test_a_step_that_raises_commits_nothing_for_any_sharer(serve, moment):
    server = serve(max_batch_tokens=60)
    requests = herd(server, 4, prefix=12)
    plan = server.scheduler.schedule()
    if moment == "before":
        with pytest.raises(KeyError), server.scheduler.step(plan):
            raise KeyError
    else:
        with pytest.raises(KeyError):
            server.compute(plan, KeyError)
    assert [seq.num_computed for seq in plan.sequences] == [0] * 4
    assert server.cache.match(prompt(1, 12)) == {"device": 0}
    server.scheduler.check_integrity()
    server.scheduler.abort(requests[0])  # the next one leads
    server.run()
    assert server.tokens == 13 + 1 + 1 + 3
    for request in requests[1:]:
        assert request.outputs[0].tolist() == greedy(request)


def test_a_leader_aborted_inside_its_step_is_still_computed_for_the_others(serve):
    server = serve(max_batch_tokens=60)
    requests = herd(server, 4, prefix=12)
    plan = server.scheduler.schedule()
    with server.scheduler.step(plan) as step:
        server.scheduler.abort(requests[0])
        server.write(plan, step)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.scheduler.check_integrity()
    server.run()
    assert server.tokens + plan.num_tokens == 13 + 3 + 3
    for request in requests[1:]:
        assert request.outputs[0].tolist() == greedy(request)


def test_a_leader_released_inside_the_step_ends_the_step(serve):
    """Its slots may be others' from then on: the step can neither write nor commit."""
    server = serve(max_batch_tokens=60)
    with server.cache as cache:
        seqs = [cache.sequence([*prompt(1, 12), i]) for i in range(2)]
        batch = pk.cache.sequence.Batch(seqs, np.array([seq.row for seq in seqs]), np.array([[1, 0, 3]], np.int32))
        step = cache.step(batch)
        with step:
            seqs[0].release()
            cache.check_integrity()
            kv = np.zeros((len(step.tokens), 1, 2))
            with pytest.raises(pk.StaleHandle):
                step.write(0, kv, kv)
            step.mark_written(0)
            with pytest.raises(pk.StaleHandle):
                step.__exit__(None, None, None)
        cache.check_integrity()
        assert seqs[1].num_computed == 0
        assert len(seqs[1].blocks) == 0


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("after_chunk", range(5))
def test_whenever_the_leader_goes_its_blocks_are_computed_once(serve, share, after_chunk):
    """Prompts of 5 chunks: the second one ends no later than if the first had not come."""
    alone = serve(max_batch_tokens=9, share=share)
    alone.submit([*prompt(1, 40), 2], 1)
    alone.run()
    server = serve(max_batch_tokens=9, share=share)
    first = server.submit([*prompt(1, 40), 1], 3)
    second = server.submit([*prompt(1, 40), 2], 1)
    computed: list[tuple[int, ...]] = []
    while server.scheduler.has_work:
        if server.steps == after_chunk:
            server.scheduler.abort(first)
        plan = server.scheduler.schedule()
        if not plan:
            continue
        with server.scheduler.step(plan) as step:
            server.write(plan, step)
            for seq, start, end in zip(plan.sequences, step.q_indptr[:-1], step.q_indptr[1:], strict=True):
                tokens = seq.tokens.tolist()
                computed += [tuple(tokens[: at + 1]) for at in step.positions[start:end] if at % BLOCK == BLOCK - 1]
        server.steps += 1
        server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    assert second.outputs[0].tolist() == greedy(second)
    assert server.steps <= alone.steps
    if share != "never":
        assert len(computed) == len(set(computed)), "a whole block is computed once"


@pytest.mark.parametrize("share", ["step", "next"])
def test_a_quota_or_a_purge_under_way_changes_no_token(serve, share):
    for what in ("quota", "purge"):
        server = serve(max_batch_tokens=14, share=share)
        mine = pk.Namespace(tenant="a")
        if what == "quota":
            server.cache.set_quota(mine, pk.Blocks(3))
        requests = [server.submit([*prompt(1, 30), i], 4, namespace=mine) for i in range(4)]
        for _ in range(2):
            server.turn()
        if what == "purge":
            server.cache.purge(mine)
        server.run()
        for request in requests:
            assert request.outputs[0].tolist() == greedy(request)


@pytest.mark.parametrize("host", [None, 40])
def test_a_herd_that_does_not_fit_is_suspended_and_comes_to_the_same(serve, host):
    server = serve(18, host=host, max_batch_tokens=19, watermark=0.0)
    requests = [server.submit([*prompt(1, 28), i], 16, priority=50 + 10 * i) for i in range(4)]
    server.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert server.scheduler.stats().shared_tokens > 0
    for request in requests:
        assert request.outputs[0].tolist() == greedy(request)


# ---- no later than without


def end_steps(share: str, program: list[tuple[int, list[int], int]], most: int) -> list[int]:
    """The step in which each request ends.

    `program` has the step before which each comes, its prompt, and its number of new tokens.
    """
    with pk.KVCache(SPEC, in_blocks(4000), max_sequences=64) as cache:
        server = Server(cache, SchedulerOptions(max_running=40, max_batch_tokens=most, share=share))
        coming, ends, requests = list(program), dict[Request, int](), list[Request]()
        while coming or server.scheduler.has_work:
            while coming and coming[0][0] <= server.steps:
                _, tokens, new = coming.pop(0)
                requests.append(server.submit(tokens, new))
            plan = server.scheduler.schedule()
            server.steps += 1
            if plan:
                server.compute(plan)
                tokens = [server.choose(branch) for branch in plan.lanes]
                ends |= dict.fromkeys(server.scheduler.report(plan, tokens), server.steps)
        return [ends[request] for request in requests]


@pytest.mark.parametrize("seed", range(12))
def test_no_request_ends_later_than_without_sharing(seed):
    random = np.random.default_rng(seed)
    program: list[tuple[int, list[int], int]] = []
    for at in sorted(random.integers(0, 8, 6).tolist()):
        beginning = prompt(int(random.integers(1, 4)), int(random.integers(4, 60)))
        for i in range(int(random.integers(1, 6))):
            kept = beginning[: int(random.integers(len(beginning) // 2, len(beginning) + 1))]
            program.append((at, [*kept, *prompt(100 + len(program), int(random.integers(1, 9)))], 1 + i))
    for most in (48, 200):
        never, step, later = (end_steps(share, program, most) for share in ("never", "step", "next"))
        assert all(a <= b for a, b in zip(step, never, strict=True)), (step, never)
        assert all(a <= b + len(program) for a, b in zip(later, never, strict=True)), (later, never)
        assert sum(step) <= sum(never)


# ---- engines that attend a row before all rows are written


def run_row_by_row(server: Server) -> None:
    """Write and attend one sequence after the other, in the order of the batch."""
    while server.scheduler.has_work:
        plan = server.scheduler.schedule()
        with server.scheduler.step(plan) as step:
            k, _ = server.cache.layer(0)
            for i, seq in enumerate(plan.sequences):
                wanted = chain(seq.tokens)[: step.seq_lens[i]]
                mine = slice(int(step.q_indptr[i]), int(step.q_indptr[i + 1]))
                at = np.divmod(step.slot_mapping[mine], BLOCK)
                k[at[0], at[1], :, 0] = wanted[step.positions[mine], None]
                blocks = step.block_tables[i, : -(-len(wanted) // BLOCK)]
                there = k[blocks, :, 0, 0].reshape(-1)[: len(wanted)]
                assert there.tolist() == wanted.tolist(), "attended before it was written"
            step.mark_written(0)
        server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])


def mixed(server: Server) -> None:
    """A prompt that is longer than a step, and short ones that begin as it does."""
    server.submit(prompt(1, 40), 2, priority=100)
    herd(server, 3, prefix=8)


def test_row_by_row_engines_share_from_the_next_step_on(serve):
    server = serve(max_batch_tokens=46, share="next")
    mixed(server)
    run_row_by_row(server)
    assert server.scheduler.stats().shared_tokens == 3 * 8


def test_plans_for_the_next_step_never_name_blocks_of_this_step(serve):
    server = serve(max_batch_tokens=46, share="next")
    mixed(server)
    while server.scheduler.has_work:
        plan = server.scheduler.schedule()
        assert plan.batch.follow is None
        server.compute(plan)
        server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])


def test_no_prompt_waits_for_blocks_that_the_tree_refuses(serve):
    server = serve(max_batch_tokens=14, share="next")
    mine = pk.Namespace(tenant="a")
    server.cache.set_quota(mine, pk.Blocks(1))
    requests = [server.submit([*prompt(1, 20), i], 2, namespace=mine) for i in range(2)]
    server.turn()
    plan = server.scheduler.schedule()
    assert plan.q_lens.tolist() == [7, 7], "the second one uses the rest of the step"
    server.compute(plan)
    server.scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
    server.run()
    for request in requests:
        assert request.outputs[0].tolist() == greedy(request)


def test_attention_before_the_rows_are_written_raises(serve):
    server = serve(max_batch_tokens=46)
    herd(server, 2, prefix=8)
    plan = server.scheduler.schedule()
    q: Any = np.zeros((plan.num_tokens, 1, 2), np.float32)
    with pytest.raises(pk.InvalidArgument, match="came before write"), server.scheduler.step(plan) as step:
        step.attend(0, q)
