"""Many requests at once.

A pagedkv.Scheduler says what each step computes, and this loop computes it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import pagedkv as pk
from examples.llama_numpy.generation import check_prompt, most_tokens
from examples.llama_numpy.model import Llama
from examples.llama_numpy.sampling import Sampling, check_finite
from examples.llama_numpy.weights import Floats
from pagedkv.scheduler import Branch, Request

Choose = Callable[[Branch, Floats], int]  # whose token it is, and its logits [vocab_size]


@dataclass(frozen=True, slots=True)
class Served:
    """What serving has come to.

    Attributes
    ----------
    requests : all of them, ended.
    hit_tokens : prompt tokens that were cached when their request first began, by tier.
    swapped, recomputed : suspensions, by what was to become of the suspended request's KV.
    steps : run.
    computed_tokens : that the steps computed; what was lost to a suspension counts again.
    new_tokens : generated.
    seconds : all of it took.
    """

    requests: list[Request]
    hit_tokens: dict[str, int]
    swapped: int
    recomputed: int
    steps: int
    computed_tokens: int
    new_tokens: int
    seconds: float


def steps(model: Llama, scheduler: pk.Scheduler, choose: Choose) -> Iterator[list[Request]]:
    """Run steps until a scheduler has no work.

    After each, yield the requests that ended with it.

    A step that raises, in `choose` or anywhere else, commits nothing, and the scheduler's requests can go on.

    Parameters
    ----------
    model : Llama
    scheduler : over a cache of the model's KVSpec; its requests have one branch each.
    choose : gives the next token of a branch; called inside the step that computed the logits.

    Raises
    ------
    NumericsError
        Logits are not numbers.
    OutOfBlocks
        Others hold the blocks that the scheduler needs.
    """
    while scheduler.has_work:
        plan = scheduler.schedule()
        if not plan:  # all that is left loads, or deadlines have passed
            scheduler.wait()
            yield list(plan.expired)
            continue
        try:
            with scheduler.step(plan) as step:
                logits = model.forward(step, plan.last_tokens)
                check_finite(logits)
                tokens = [choose(branch, row) for branch, row in zip(plan.lanes, logits, strict=True)]
        except BaseException:
            scheduler.cancel(plan)
            raise
        yield [*plan.expired, *scheduler.report(plan, tokens)]


def submit(
    model: Llama, scheduler: pk.Scheduler, prompt: Sequence[int], *, max_tokens: int, stop_ids: Collection[int] = ()
) -> Request:
    """Queue a prompt's request.

    It generates fewer than `max_tokens` where the model's context ends.

    Raises
    ------
    PromptError
        The prompt is empty, has unknown tokens or is too long for the model.
    RequestTooLarge
        It does not fit into the cache, even alone.
    """
    tokens = check_prompt(model, prompt)
    return scheduler.submit(tokens, most_tokens(model, tokens, max_tokens), stop_tokens=stop_ids)


def serve(
    model: Llama,
    scheduler: pk.Scheduler,
    requests: Sequence[Request],
    *,
    sampling: Sampling | None = None,
    on_answer: Callable[[Request], object] = lambda request: None,
) -> Served:
    """Answer all of a scheduler's requests, as many at once as its options and its cache let.

    Each is drawn from as if it were served alone, whatever else runs and however often it is suspended.

    Parameters
    ----------
    model, scheduler : as :func:`steps`.
    requests : those of the scheduler.
    sampling : default: the most likely token.
    on_answer : told each request when it is finished. If it raises, the others are aborted and everything is released.

    Raises
    ------
    NumericsError, OutOfBlocks
        As :func:`steps`.
    """
    sampling, cache = sampling or Sampling(), scheduler.cache
    draws = {request: sampling.generator(0) for request in requests}
    before, began, num_steps = cache.stats().computed_tokens, time.perf_counter(), 0
    try:
        for ended in steps(model, scheduler, lambda branch, row: sampling.choose(row, draws[branch.request])):
            num_steps += 1
            for request in ended:
                on_answer(request)
    finally:
        for request in requests:
            scheduler.abort(request)  # nothing, if it has ended
    seconds, stats = time.perf_counter() - began, scheduler.stats()
    hits: Counter[str] = Counter()
    for request in requests:
        hits.update(request.hit_tokens)
    return Served(
        requests=list(requests),
        hit_tokens=dict(hits),
        swapped=stats.preempted_by_swap,
        recomputed=stats.preempted_by_recompute,
        steps=num_steps,
        computed_tokens=cache.stats().computed_tokens - before,
        new_tokens=sum(len(request.outputs[0]) for request in requests),
        seconds=seconds,
    )
