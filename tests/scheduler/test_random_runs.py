"""Long random runs at capacity: everything can happen, and every request ends.

Nothing is ever wrong.

After every step the books of the scheduler and of the cache are checked, every KV that is read back is compared, and
every output is what the request would have come to alone. No request starves: its turn can only pass to requests
that come before its rank is behind (the bound of ``queue.py``), and each run ends with nothing left.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedkv as pk
from pagedkv.scheduler import Request, SchedulerOptions
from pagedkv.scheduler.queue import by_key, by_rank
from tests.in_blocks import in_blocks
from tests.slices import one_in

from .conftest import SPEC, Server, greedy


class Interruption(Exception):
    """What a step's body raises."""


class Run:
    """Random requests, aborts, drafts, failing steps and outsiders over one server."""

    def __init__(self, seed: int, device: int, host: int | None, options: dict[str, Any]) -> None:
        cache = pk.KVCache(SPEC, in_blocks(device), in_blocks(host), max_sequences=options["max_running"] + 2)
        self.begin(seed, Server(cache, SchedulerOptions(**options)))

    def begin(self, seed: int, server: Server) -> None:
        """Start with nothing submitted."""
        self.random, self.server = Random(seed), server
        self.cache, self.scheduler = server.cache, server.scheduler
        self.requests: list[Request] = []
        self.outsider: pk.Sequence | None = None
        self.is_out = False  # a plan that was not reported
        self.refused = 0

    def submit(self) -> None:
        random = self.random
        shared = random.choice([0, 0, 6, 13, 22])
        tokens = [*range(shared), *(random.randrange(3) for _ in range(random.randint(1, 14)))]
        kind = random.choice([{}, {}, {}, {"n": random.randint(2, 3)}, {"beams": random.randint(2, 3)}])
        try:
            request = self.scheduler.submit(
                tokens, random.randint(1, 18), tenant=random.choice("abc"), priority=random.choice([0, 50, 50, 100]),
                stop_tokens=random.sample(range(50), random.choice([0, 0, 1, 5])),
                deadline_s=random.choice([None, None, None, 30.0]), **kind,
            )  # fmt: skip
        except pk.RequestTooLarge:
            self.refused += 1
            return
        self.requests.append(request)

    def disturb(self) -> None:
        random = self.random
        live = [request for request in self.requests if not request.ended]
        what = random.random()
        if what < 0.04 and live:
            self.scheduler.abort(random.choice(live))
        elif what < 0.25 and live and not self.is_out:
            request = random.choice(live)
            if request.beams == 1:
                for branch in request.live():
                    good = greedy_after(branch)[: random.randint(0, 5)]
                    bad = [random.randrange(50) for _ in range(random.randint(0, 3))]
                    self.scheduler.draft(branch, [*good, *bad])
        elif what < 0.28 and self.outsider is None and self.cache.table.num_rows < self.cache.max_sequences:
            try:
                self.outsider = self.cache.sequence([7] * random.randint(1, 12))
                with self.cache.step([self.outsider]) as step:
                    for layer in range(self.cache.spec.num_layers):
                        step.mark_written(layer)
            except pk.OutOfBlocks:
                self.let_outsider_go()
        elif what < 0.5:
            self.let_outsider_go()

    def let_outsider_go(self) -> None:
        if self.outsider is not None:
            self.outsider.release()
            self.outsider = None

    def step(self) -> None:
        server, scheduler, random = self.server, self.scheduler, self.random
        server.now += 1.0
        ranks = {r: r.rank for r in scheduler._queue.first(10**6)}
        begun = {r for r in self.requests if r.admitted}
        try:
            plan = scheduler.schedule()
        except pk.OutOfBlocks:
            assert self.outsider is not None, "only others can be in the way"
            scheduler.check_integrity()
            self.let_outsider_go()
            return
        self.check_turns(ranks, [r for r in self.requests if r.admitted and r not in begun], bool(plan.expired))
        self.is_out = bool(plan)
        if not plan:
            scheduler.wait()
            return
        mishap = random.random()
        try:
            with scheduler.step(plan) as step:
                if mishap < 0.03:
                    raise Interruption
                server.write(plan, step)
                if mishap < 0.06:
                    raise Interruption
                if mishap > 0.98:
                    scheduler.abort(random.choice(plan.lanes or [self]).request if plan.lanes else self.requests[0])
        except (Interruption, pk.OutOfBlocks):
            scheduler.check_integrity()
            return
        if 0.06 < mishap < 0.09:
            return
        scheduler.report(plan, [server.choose(branch) for branch in plan.lanes])
        self.is_out = False
        scheduler.check_integrity()

    def check_turns(self, ranks: dict[Request, float], begun: list[Request], expired: bool) -> None:
        """Check that no request that began passed one of a better rank.

        None began that came too late to pass a waiting one. Requests that do not fit beside what the outsider holds do
        not count.
        """
        aside = self.scheduler._queue.aside
        if self.scheduler.options.order != "first_come":
            return
        self.scheduler._queue.first(10**6)  # ranks after what was charged meanwhile
        waiting = [r for r in ranks if r.state == "waiting"]
        assert all(r.overtaken <= self.scheduler.options.window for r in waiting)
        waiting = [r for r in waiting if r not in aside and not r.admitted]  # nor do those whose loads were given up
        if len(begun) == 1 and not expired:
            for first in {r.tenant: r for r in sorted(waiting, key=by_key, reverse=True)}.values():
                if first.overtaken:
                    continue  # it has something to load, and no room for it yet
                if first.tenant != begun[0].tenant:
                    assert by_rank(begun[0]) <= (ranks[first], first.id)
                else:
                    assert by_key(begun[0]) <= by_key(first)
        head_start = 2 * 100 * self.scheduler.options.priority_tokens  # its own tenant's first, and those past that
        for request in [r for r in waiting if not r.overtaken]:
            bound = max(ranks[request], request.rank) + head_start
            assert all(r.arrived <= bound for r in begun), "passed by a request that came beyond the bound"

    def check_outputs(self) -> None:
        for request in self.requests:
            assert request.ended
            if request.state == "finished" and request.beams == 1:
                expected = sorted(greedy(request, first) for first in range(request.n))
                assert sorted(out.tolist() for out in request.outputs) == expected
        assert self.cache.table.num_rows == 0
        while self.cache.moves.run_moves():  # demotions hold their blocks until they are over
            pass
        until = time.monotonic() + 60
        while any(counts["live"] for counts in self.cache.stats().blocks.values()):  # copies to a disk are under way
            assert time.monotonic() < until
            time.sleep(0.001)


def greedy_after(branch: Any) -> list[int]:
    """What the model would add to a branch."""
    probe = type("probe", (), {})()
    probe.prompt, probe.max_new_tokens, probe.stop_tokens = branch.tokens, 6, ()
    return greedy(probe)


def play(seed: int, steps: int, device: int, host: int | None, **options: Any) -> Run:
    return finished(Run(seed, device, host, options), steps)


def finished(run: Run, steps: int) -> Run:
    """Play so many steps with new requests, and then until every one has ended."""
    try:
        for _ in range(steps):
            while run.scheduler.stats().waiting < 5 and run.random.random() < 0.6:
                run.submit()
            run.disturb()
            run.step()
        run.let_outsider_go()
        for _ in range(4000):  # no request comes any more: every one ends
            if not run.scheduler.has_work:
                break
            run.step()
        assert not run.scheduler.has_work, run.scheduler.stats()
        run.check_outputs()
    finally:
        run.cache.close()
    return run


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    device=st.integers(9, 40),
    host=st.sampled_from([None, 10, 60]),
    max_running=st.integers(1, 6),
    spare_tokens=st.integers(1, 20),
    order=st.sampled_from(["first_come", "longest_prefix"]),
    admission=st.sampled_from(["prompt", "prompt", "worst_case"]),
    watermark=st.sampled_from([0.0, 0.1]),
    lookahead=st.sampled_from([0, 0, 3]),
    priority_tokens=st.sampled_from([0, 1, 50]),
)
def test_whatever_happens_everybody_ends_and_nothing_is_wrong(
    seed, device, host, max_running, spare_tokens, order, admission, watermark, lookahead, priority_tokens
):
    play(
        seed, 60, device, host, max_running=max_running, max_batch_tokens=max_running + spare_tokens, order=order,
        admission=admission, watermark=watermark, lookahead=lookahead, priority_tokens=priority_tokens, window=3,
    )  # fmt: skip


@pytest.mark.parametrize("seed", one_in(4, range(4)))
@pytest.mark.parametrize("host", [None, 40], ids=["recompute", "swap"])
def test_a_long_run_at_capacity_starves_nobody(seed, host):
    run = play(
        seed, 700, 18, host, max_running=4, max_batch_tokens=11, watermark=0.0, priority_tokens=5, lookahead=seed % 2
    )
    stats = run.scheduler.stats()
    assert stats.preempted_by_swap + stats.preempted_by_recompute > 20, "it has to be tight"
    assert stats.finished > 50
    assert run.refused > 0
