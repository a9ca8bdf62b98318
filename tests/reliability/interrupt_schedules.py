"""Schedulers to be interrupted.

Each goes on afterwards, and every request ends with the oracle's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.scheduler.plan import Plan
from pagedkv.scheduler.request import Branch, Request
from tests.reliability.interrupt_scenes import SCENES, A, Act, B, Scene
from tests.reliability.interrupt_world import World, Wrong

WAYS = 4  # what a branch goes on with is the oracle's token or one of the next few
TURNS = 300  # a request that has not ended by then is starved


def oracle(tokens: Any) -> int:
    """The token after these."""
    return 1 + int(np.asarray(tokens, np.int64).sum() * 31 + len(tokens) * 7) % 50 * WAYS


class Turns:
    """A scheduler and its caller's loop. It can be left at any moment and gone on with.

    Parameters
    ----------
    world : World
    namespace : of all requests.
    drafts : whether each turn proposes tokens.
    """

    def __init__(self, world: World, namespace: pk.Namespace | None, *, drafts: bool = False, **options: Any) -> None:
        self.world, self.namespace, self.drafts = world, namespace, drafts
        given = {"max_running": 6, "max_batch_tokens": 8, "watermark": 0.0} | options
        self._now = 0.0
        self.scheduler = pk.Scheduler(world.cache, pk.SchedulerOptions(**given), clock=self._clock)
        self.requests: list[Request] = []

    def _clock(self) -> float:
        self.world.callbacks("scheduler clock")
        self._now += 0.01
        return self._now

    def submit(self, num_tokens: int, max_new_tokens: int, **options: Any) -> Request:
        """A request with a prompt that no other has."""
        prompt = self.world.prompt(num_tokens // self.world.block)[:num_tokens]
        request = self.scheduler.submit(prompt, max_new_tokens, namespace=self.namespace, **options)
        self.requests.append(request)
        return request

    def turn(self) -> None:
        """One step."""
        scheduler = self.scheduler
        if self.drafts:
            for request in self.requests:
                for branch in request.live():
                    guess = oracle(branch.tokens)
                    with suppress(pk.InvalidArgument):  # a plan that was interrupted may be out
                        scheduler.draft(branch, [guess, guess + 1])
        plan = scheduler.schedule()
        if not plan:
            scheduler.wait()
            return
        with scheduler.step(plan) as step:
            self.world.write(step, [(seq, self.namespace) for seq in plan.sequences])
        scheduler.report(plan, [self._next(plan, lane, number) for number, lane in enumerate(plan.lanes)])

    def _next(self, plan: Plan, lane: Branch, number: int) -> int | list[int]:
        request, tokens = lane.request, lane.tokens
        first = oracle(tokens)
        if request.beams > 1:
            live = len(request.live())
            return [first, first + 1] if live < request.beams and lane is request.live()[0] else [first]
        if request.n > 1 and not lane.num_output:
            return [first + i for i in range(request.n)]
        if number < len(plan.num_drafts) and plan.num_drafts[number]:
            accepted = [first]
            return [*accepted, oracle([*tokens.tolist(), first])][: request.max_new_tokens - lane.num_output]
        return first

    def run(self) -> None:
        """Until every request has ended."""
        for _ in range(TURNS):
            if not self.scheduler.has_work:
                self.check()
                return
            self.turn()
        raise Wrong(f"starved: {self.scheduler.stats()}")

    def check(self) -> None:
        """Every output is the oracle's."""
        for request in self.requests:
            for branch in request.branches:
                tokens = branch.tokens.tolist()
                for at in range(len(request.prompt), len(tokens)):
                    if not 0 <= tokens[at] - oracle(tokens[:at]) < WAYS:
                        raise Wrong(f"token {at} of {request} is {tokens[at]}, and not {oracle(tokens[:at])}")
            if request.state == "finished":
                longest = max(branch.num_output for branch in request.branches)
                if longest != request.max_new_tokens:
                    raise Wrong(f"{request} ended with {longest} of {request.max_new_tokens} tokens")

    def stop(self) -> None:
        """Abort what is left."""
        for request in self.requests:
            self.scheduler.abort(request)
        if self.scheduler.has_work:
            for _ in range(TURNS):
                self.turn()
                if not self.scheduler.has_work:
                    break


def add(name: str, prepare: Callable[[World], tuple[Turns, Callable[[], object]]]) -> None:
    """A scene whose call submits something and runs until all has ended."""

    def make(world: World) -> Act:
        turns, submit = prepare(world)

        def call() -> None:
            submit()
            turns.run()

        return Act(call, turns.stop, busy=True)

    SCENES.append(Scene(f"scheduler: {name}", make, lambda world: not world.setup.kernels and world.block == 4))


def _simple(world: World) -> tuple[Turns, Callable[[], object]]:
    turns = Turns(world, A)
    return turns, lambda: (turns.submit(10, 3), turns.submit(5, 2, tenant="other", priority=60))


def _samples(world: World) -> tuple[Turns, Callable[[], object]]:
    turns = Turns(world, B, admission="worst_case", order="longest_prefix")
    return turns, lambda: turns.submit(9, 4, n=3)


def _beams(world: World) -> tuple[Turns, Callable[[], object]]:
    turns = Turns(world, A)
    return turns, lambda: turns.submit(7, 4, beams=3)


def _drafts(world: World) -> tuple[Turns, Callable[[], object]]:
    turns = Turns(world, B, drafts=True, lookahead=2)
    return turns, lambda: turns.submit(6, 6)


def _pressure(world: World) -> tuple[Turns, Callable[[], object]]:
    turns = Turns(world, A)

    def submit() -> None:
        turns.submit(13, 8, n=2)
        turns.submit(13, 8)
        turns.turn()
        turns.turn()
        turns.submit(13, 8, priority=100)

    return turns, submit


def _ends(world: World) -> tuple[Turns, Callable[[], object]]:
    turns = Turns(world, B)

    def submit() -> None:
        scheduler = turns.scheduler
        scheduler.set_weight("other", 2.0)
        late, unwanted = turns.submit(9, 3, deadline_s=0.001), turns.submit(9, 3)
        turns.submit(5, 2, tenant="other", stop_tokens=[3])
        turns.turn()
        plan = scheduler.schedule()
        if plan:
            scheduler.cancel(plan)
        scheduler.abort(unwanted)
        scheduler.stats(), repr(late), repr(plan)

    return turns, submit


def _mended(world: World) -> tuple[Turns, Callable[[], object]]:
    turns = Turns(world, A)

    def submit() -> None:
        scheduler = turns.scheduler
        turns.submit(9, 4, n=2), turns.submit(7, 3, beams=2), turns.submit(5, 3)
        for _ in range(3):
            turns.turn()
            scheduler.torn = True  # as if the turn had been interrupted
        scheduler.schedule()
        scheduler.torn = True

    return turns, submit


for _name, _prepare in (
    ("two requests", _simple), ("parallel samples", _samples), ("beams", _beams), ("drafts", _drafts),
    ("suspensions", _pressure), ("deadlines, aborts and plans taken back", _ends), ("calls that are mended", _mended),
):  # fmt: skip
    add(_name, _prepare)
