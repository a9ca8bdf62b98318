"""Fine calls that need a cache of their own.

Closing, learning, and a scheduler in the middle of its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from tests.cache.conftest import BLOCK, SPEC, Toy, prompt

WAIT_S = 60.0  # the proof's watchdog, not a claim
LOAD = {  # fine options of a load
    "session": None, "deadline_s": None, "on_trial": False, "trace": None, "await_remote_s": 0.0,
}  # fmt: skip


def load_and_open(load: pk.Load, toy: Toy) -> None:
    """Let a load that a call began come to its end, and use what it brought."""
    with load:
        load.wait(WAIT_S)
        load.done()
        with load.sequence() as seq:
            toy.run(seq)
            toy.check(seq)


def close(folder: Path) -> Callable[..., None]:
    """A call that closes a cache over a disk, which the next one opens again."""

    def call(**options: Any) -> None:
        disk = pk.Disk(folder / "closing", pk.Blocks(16), admission="all", on_mismatch="discard")
        with pk.KVCache(SPEC, pk.Blocks(24), disk=disk, threads=1) as cache:
            Toy(cache).use(prompt(1))
            cache.close(**options)

    return call


def learned(name: str) -> Callable[..., Any]:
    """A call of a cache that learns when prefixes return."""

    def call(*arguments: Any, **options: Any) -> Any:
        with pk.KVCache(SPEC, pk.Blocks(8), pk.Blocks(16), policy="hazard", threads=1) as cache:
            toy = Toy(cache)
            for start in (1, 2, 3):
                toy.use(prompt(start, 3 * BLOCK))
            made = getattr(cache, name)(*arguments, **options)
            if name == "prefetch_likely":
                for one in made:
                    one.wait(WAIT_S)
            toy.use(prompt(1, 3 * BLOCK))
            cache.check_integrity()
            return made

    return call


def in_a_scheduler(name: str) -> Callable[..., object]:
    """A call of a scheduler that has planned a step; its two requests end after it."""

    def call(*arguments: Any, **options: Any) -> None:
        with pk.KVCache(SPEC, pk.Blocks(24)) as cache:
            scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=4, max_batch_tokens=64))
            one, other = (scheduler.submit(prompt(start, 9), 3) for start in (1, 2))
            plan = scheduler.schedule()
            ours = {"THE REQUEST": one, "THE PLAN": plan, "THE BRANCH": one.branches[0]}
            with _computed(scheduler, plan):
                pass
            given = [ours.get(item, item) if isinstance(item, str) else item for item in arguments]
            cancelled = None
            try:
                getattr(scheduler, name)(*given, **options)
                cancelled = plan if name == "cancel" else None
            finally:
                _to_the_end(scheduler, plan, cancelled)
                assert other.finish_reason == "length", f"a bystander ended with {other.finish_reason}"
                scheduler.check_integrity()
                cache.check_integrity()

    return call


@contextmanager
def _computed(scheduler: pk.Scheduler, plan: pk.Plan) -> Iterator[pk.Step]:
    with scheduler.step(plan) as step:
        for layer in range(SPEC.num_layers):
            step.mark_written(layer)
        yield step


def _to_the_end(scheduler: pk.Scheduler, plan: pk.Plan, cancelled: pk.Plan | None) -> None:
    """Report the plan that is under way, unless the call did, and run until nothing is left."""
    for _ in range(100):
        if plan.told is None and plan is not cancelled:
            scheduler.report(plan, np.full(len(plan.lanes), 7, np.int32))
        if not scheduler.has_work:
            return
        plan = scheduler.schedule()
        with _computed(scheduler, plan):
            pass
    raise AssertionError("the scheduler does not come to an end")
