"""A toy server: its next token follows from all tokens before it.

It compares every KV that it reads back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.scheduler import Branch, Plan, Request, Scheduler, SchedulerOptions
from tests import toy
from tests.in_blocks import in_blocks

SPEC = pk.KVSpec(1, 1, 2, "float32", 4, model="toy")
BLOCK = SPEC.block_size
VOCABULARY = 50


def chain(tokens: Any) -> NDArray[np.float32]:
    """Return a number per token that follows from all tokens up to it.

    float32 [num_tokens], exact in float32.
    """
    return (toy.chain(tokens) % toy.EXACT["float32"]).astype(np.float32)


def after(tokens: Any, which: int = 0) -> int:
    """The token that follows these; `which`: the first, second, ... choice."""
    return int(chain([*np.asarray(tokens).tolist(), 7])[-1] + which) % VOCABULARY


def greedy(request: Request, first: int = 0) -> list[int]:
    """What a branch of this request must come to, computed without a cache."""
    tokens = request.prompt.tolist()
    out: list[int] = []
    while len(out) < request.max_new_tokens:
        out.append(after([*tokens, *out], first if not out else 0))
        if out[-1] in request.stop_tokens:
            break
    return out


class Server:
    """A scheduler, its cache, and the toy model."""

    def __init__(self, cache: pk.KVCache, options: SchedulerOptions | None = None) -> None:
        self.cache = cache
        self.now = 0.0
        self.scheduler = Scheduler(cache, options, clock=lambda: self.now)
        self.steps = self.tokens = self.max_lanes = 0
        self.plans: list[Plan] = []

    def choose(self, branch: Branch) -> Any:
        """The entry of a lane's report."""
        return entry(branch)

    def submit(self, prompt: Any, max_new_tokens: int = 4, **options: Any) -> Request:
        return self.scheduler.submit(prompt, max_new_tokens, **options)

    def compute(self, plan: Plan, then: type[Exception] | None = None) -> None:
        """Run the step of a plan, and first compare what was in the cache.

        Its body may raise in the end.
        """
        with self.scheduler.step(plan) as step:
            self.write(plan, step)
            if then is not None:
                raise then

    def write(self, plan: Plan, step: pk.Step) -> None:
        starts = step.positions[step.q_indptr[:-1]].tolist()
        for seq, start, q_len in zip(plan.sequences, starts, plan.q_lens.tolist(), strict=True):
            wanted, done = chain(seq.tokens), seq.num_computed
            k, _ = seq.gather()
            assert k[0, :, 0, 0].tolist() == wanted[:done].tolist(), "what is cached is not what was computed"
            assert done <= start
            assert start + q_len <= len(wanted)
        values = [
            chain(seq.tokens)[start : start + q_len]
            for seq, start, q_len in zip(plan.sequences, starts, plan.q_lens.tolist(), strict=True)
        ]
        kv = np.repeat(np.concatenate(values)[:, None, None], 2, axis=2)
        step.write(0, kv, kv)
        k, _ = self.cache.layer(0)
        for seq, length, blocks in zip(plan.sequences, step.seq_lens.tolist(), step.block_tables, strict=True):
            there = k[blocks[: -(-length // BLOCK)], :, 0, 0].reshape(-1)[:length]
            assert there.tolist() == chain(seq.tokens)[:length].tolist(), "other KV is attended than was computed"

    def turn(self) -> list[Request]:
        """One step, from its plan to its report; the requests that ended."""
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        ended = list(plan.expired)
        if plan:
            self.compute(plan)
            self.steps += 1
            self.tokens += plan.num_tokens
            self.max_lanes = max(self.max_lanes, len(plan.lanes))
            ended += self.scheduler.report(plan, [self.choose(branch) for branch in plan.lanes])
        else:
            self.scheduler.wait()
        self.scheduler.check_integrity()
        return ended

    def run(self, most: int = 5000) -> list[Request]:
        """Until nothing is left; the requests in the order they ended."""
        ended = []
        for _ in range(most):
            if not self.scheduler.has_work:
                assert self.cache.table.num_rows == 0
                return ended
            ended += self.turn()
        raise AssertionError(f"still at work after {most} steps: {self.scheduler.stats()}")


def entry(branch: Branch) -> Any:
    """A lane's report by the toy model: greedy tokens, the right ones of a draft, or beams."""
    request, tokens = branch.request, branch.tokens
    if request.beams > 1:
        live = len(request.live())
        return [after(tokens, i) for i in range(request.beams if live == 1 else 1)]
    if request.n > 1 and branch.num_output == 0:
        return [after(tokens, i) for i in range(request.n)]
    accepted: list[int] = []
    for token in branch.draft.tolist():
        if token != after([*tokens, *accepted]):
            break
        accepted.append(token)
    return [*accepted, after([*tokens, *accepted])] if len(branch.draft) else after(tokens)


def prompt(start: int, num_tokens: int = 10) -> list[int]:
    """Tokens that no prompt with another start shares."""
    return [1000 * start + i for i in range(num_tokens)]


def followed(plans: Iterable[Plan]) -> dict[Branch, list[int]]:
    """What a caller that looks at nothing but ``plan.new_tokens`` knows of every branch."""
    known: dict[Branch, list[int]] = {}
    for plan in plans:
        before = {new.parent: known.get(new.parent, []) for new in plan.new_tokens}
        for new in plan.new_tokens:
            known[new.branch] = before[new.parent] + new.tokens.tolist()
    return known


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Opens servers: ``serve(device, host=, max_running=, ...)``."""
    opened: list[pk.KVCache] = []

    def open_it(device: int = 64, *, host: int | None = None, cache_options: Any = None, **options: Any) -> Server:
        cache = pk.KVCache(SPEC, in_blocks(device), in_blocks(host), **(cache_options or {}))
        opened.append(cache)
        options.setdefault("max_running", 8)
        options.setdefault("max_batch_tokens", 16)
        return Server(cache, SchedulerOptions(**options))

    yield open_it
    for cache in opened:
        cache.check_integrity()
        cache.close()
