"""Beam search: each step keeps the most likely continuations.

A beam that splits is forked, a beaten one released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from examples.llama_numpy.errors import PromptError
from examples.llama_numpy.generation import Speed, check_capacity, check_prompt, most_tokens
from examples.llama_numpy.model import Llama
from examples.llama_numpy.sampling import check_finite, log_softmax

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt.

    Attributes
    ----------
    tokens : a final stop token included.
    log_prob : natural logarithm of its probability, given the prompt.
    ended : whether it goes on no further.
    """

    tokens: tuple[int, ...] = ()
    log_prob: float = 0.0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The beams, the best first; where the prompt's cached tokens were found; how fast it went."""

    beams: list[Beam]
    hit_tokens: dict[str, int]
    speed: Speed


OnBeams = Callable[[list[Beam]], object]


def beam_search(
    model: Llama,
    cache: pk.KVCache,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    chunk: int | None = None,
    on_beams: OnBeams | None = None,
) -> BeamResult:
    """Continue a prompt, keeping the `width` most likely continuations at each step.

    Ended ones are among them.

    Parameters
    ----------
    model, cache, prompt, stop_ids, chunk : as :func:`examples.llama_numpy.generation.generate`.
    width : beams kept.
    max_tokens : of each beam at most; fewer where the model's context ends.
    on_beams : told the beams, the best first, inside the step that chose them; if it raises, nothing of that step is
        committed and everything is released.

    Raises
    ------
    PromptError, NumericsError, OutOfBlocks
        As :func:`examples.llama_numpy.generation.generate`.
    """
    tokens = check_prompt(model, prompt)
    if width < 1 or max_tokens < 1 or (chunk is not None and chunk < 1):
        raise PromptError("width, max_tokens and chunk must be at least 1")
    check_capacity(model, cache, [tokens], max_tokens, width, copied=width // 2)
    max_tokens = most_tokens(model, tokens, max_tokens)
    speed = Speed()
    with ExitStack() as releases:
        seq = releases.enter_context(cache.sequence(tokens))
        hits = dict(seq.hit_tokens)
        beams, seqs = [Beam()], [seq]  # a sequence for each beam that goes on, in their order
        while seqs:
            began = time.perf_counter()
            pending = seqs[0].num_tokens - seqs[0].num_computed  # of later beams 1
            num_new = min(pending, chunk or pending)
            with cache.step(seqs, q_lens=[num_new] * len(seqs)) as step:
                logits = model.forward(step)
                check_finite(logits)
                is_prompt = not beams[0].tokens
                if num_new == pending:
                    beams, parents = _expand(beams, logits, width, max_tokens, stop_ids)
                    if on_beams is not None:
                        on_beams(beams)
            speed.add(num_new * len(seqs), time.perf_counter() - began, is_prompt=is_prompt)
            if num_new == pending:
                seqs = _follow(seqs, beams, parents, releases)
    return BeamResult(beams, hits, speed)


def _expand(
    beams: list[Beam], logits: NDArray[np.float32], width: int, max_tokens: int, stop_ids: Collection[int]
) -> tuple[list[Beam], list[int]]:
    """The best of the ended beams and of all continuations of the others.

    With the place of each one's parent.
    """
    live = [beam for beam in beams if not beam.ended]
    totals = np.array([beam.log_prob for beam in live])[:, None] + log_softmax(logits)
    found = [(beam, NO_PARENT) for beam in beams if beam.ended]
    best = np.argsort(-totals, axis=None, kind="stable")[:width]
    for parent, token in zip(*(places.tolist() for places in np.unravel_index(best, totals.shape)), strict=True):
        tokens = (*live[parent].tokens, token)
        ended = token in stop_ids or len(tokens) == max_tokens
        found.append((Beam(tokens, float(totals[parent, token]), ended), parent))
    found.sort(key=lambda pair: -pair[0].log_prob)  # of equals the one that ended first
    kept = found[:width]
    return [beam for beam, _ in kept], [parent for _, parent in kept]


def _follow(seqs: list[pk.Sequence], beams: list[Beam], parents: list[int], releases: ExitStack) -> list[pk.Sequence]:
    """Sequences of the beams that go on: one child takes its parent's, the others a fork.

    The rest is released.
    """
    going = [(beam, parent) for beam, parent in zip(beams, parents, strict=True) if not beam.ended]
    numbers = [parent for _, parent in going]
    spare = {
        parent: [seqs[parent], *map(releases.enter_context, seqs[parent].fork(numbers.count(parent) - 1))]
        for parent in set(numbers)
    }
    for place, seq in enumerate(seqs):
        if place not in spare:
            seq.release()
    children = []
    for beam, parent in going:
        child = spare[parent].pop()
        child.append(beam.tokens[-1])
        children.append(child)
    return children
