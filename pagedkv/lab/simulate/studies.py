"""Measurements of one thing at a time, over the lengths of a workload's requests.

Real blocks, real forks, no model.

``waste``     slots held by a request's blocks that hold no token, by block size, and of contiguous regions beside
``prefix``    blocks that N requests over one prefix hold, against what they would hold each for itself
``beams``     blocks that beam search holds, against a copy for each beam
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.cache.cache import KVCache
from pagedkv.errors import InvalidArgument
from pagedkv.lab.simulate.contiguous import region_length
from pagedkv.lab.simulate.hardware import Hardware
from pagedkv.lab.simulate.table import Row
from pagedkv.lab.simulate.virtual import virtual_cache
from pagedkv.lab.simulate.workload import Workload
from pagedkv.scheduler import Branch, Request, Scheduler, SchedulerOptions, expand_beams

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
SHARERS = (2, 5, 10, 20, 50)
WIDTHS = (2, 4, 6, 8)
PREFIX_TOKENS = 256
CHOICES = 64  # likely next tokens of a beam
LONGEST_BEAM = 256  # tokens: beam search is for short outputs


@dataclass(frozen=True, slots=True)
class Study:
    """The measurements.

    Attributes
    ----------
    rows : the table.
    x, curves, x_label, y_label : the plot: values by the name of their line.
    """

    rows: list[Row]
    x: Sequence[float]
    curves: dict[str, list[float]]
    x_label: str
    y_label: str


def waste(workload: Workload, longest: int | None, requests: int) -> Study:
    """Each request alone, at its final length: what part of what it holds is empty."""
    lengths = [workload.num_tokens(i) for i in range(min(requests, len(workload)))]
    longest = max(prompt + output for prompt, output in lengths) if longest is None else longest
    lengths = [(prompt, output) for prompt, output in lengths if prompt + output <= longest]
    used = sum(prompt + output for prompt, output in lengths)
    rows: list[Row] = []
    for reserve in ("max", "pow2"):
        held = sum(region_length(reserve, prompt, output, longest) for prompt, output in lengths)
        rows.append(_waste_row(f"contiguous, {reserve}", used, held, len(lengths)))
    measured = []
    for block_size in BLOCK_SIZES:
        held = _held_alone(lengths, block_size) * block_size
        measured.append(100 * (1 - used / held))
        rows.append(_waste_row(f"blocks of {block_size}", used, held, len(lengths)))
    return Study(rows, BLOCK_SIZES, {"blocks": measured}, "block size, tokens", "slots without a token, %")


def _held_alone(lengths: Sequence[tuple[int, int]], block_size: int) -> int:
    """Blocks that requests of these lengths hold in the end.

    Each is opened in a cache and counted there.
    """
    most = -(-max(prompt + output for prompt, output in lengths) // block_size)
    cache = _cache(most, block_size)
    held = 0
    for i, (prompt, output) in enumerate(lengths):
        with cache.sequence(np.full(prompt + output, i, np.int32)) as seq:
            with cache.step([seq]) as step:
                step.mark_written(0)
            held += len(seq.blocks)
    cache.close()
    return held


def _waste_row(name: str, used: int, held: int, count: int) -> Row:
    return {
        "allocation": name, "requests": f"{count:,}", "tokens": f"{used:,}", "slots": f"{held:,}",
        "utilisation %": f"{100 * used / held:.1f}", "waste %": f"{100 * (1 - used / held):.1f}",
    }  # fmt: skip


def prefix(workload: Workload, block_size: int) -> Study:
    """N requests over one prefix of 256 tokens.

    Each has a prompt and output of the trace for itself behind it.
    """
    rows: list[Row] = []
    saved: dict[str, list[float]] = {"of the prefix": [], "of all blocks": []}
    if len(workload) < max(SHARERS):
        raise InvalidArgument(f"the workload has {len(workload)} requests; {max(SHARERS)} are needed")
    for sharers in SHARERS:
        own = [sum(workload.num_tokens(i)) for i in range(sharers)]
        apart = sum(-(-(PREFIX_TOKENS + length) // block_size) for length in own)
        cache = _cache(apart + sharers, block_size, sharers)
        seqs = []
        for i, length in enumerate(own):
            tokens = np.concatenate((np.arange(PREFIX_TOKENS), np.full(length, -1 - i))).astype(np.int32)
            seqs.append(cache.sequence(tokens))
            with cache.step(seqs[-1:]) as step:
                step.mark_written(0)
        held = cache.stats().blocks["device"]["live"]
        whole = PREFIX_TOKENS // block_size
        saved["of all blocks"].append(100 * (1 - held / apart))
        saved["of the prefix"].append(100 * (apart - held) / (sharers * whole))
        rows.append(
            {
                "requests": f"{sharers}", "blocks each for itself": f"{apart:,}", "blocks held": f"{held:,}",
                "saved of the prefix %": f"{saved['of the prefix'][-1]:.1f}",
                "saved of all %": f"{saved['of all blocks'][-1]:.1f}",
            }
        )  # fmt: skip
        for seq in seqs:
            seq.release()
        cache.close()
    return Study(rows, SHARERS, saved, "requests over one prefix", "blocks saved, %")


def beams(workload: Workload, block_size: int, requests: int, spread: float) -> Study:
    """Requests run as beam searches, one after the other, with random log-probabilities.

    Each beam has 64 likely next tokens, whose log-probabilities are a softmax over normal numbers of this spread: the
    larger, the surer the model is, and the more often beams descend from different parents.
    """
    rows: list[Row] = []
    saved: dict[str, list[float]] = {"of all blocks": [], "of those beyond the prompt": []}
    count = min(requests, len(workload))
    for width in WIDTHS:
        random = np.random.default_rng(width)
        sums = np.zeros(4, np.int64)
        for i in range(count):
            prompt, output = workload.num_tokens(i)
            sums += _search(prompt, min(output, LONGEST_BEAM), width, block_size, spread, random)
        apart, held, shared, steps = sums.tolist()
        if not steps:
            raise InvalidArgument("no request of the workload generates a second token: nothing to search")
        saved["of all blocks"].append(100 * (1 - held / apart))
        saved["of those beyond the prompt"].append(100 * (1 - (held - shared) / (apart - width * shared)))
        rows.append(
            {
                "beams": f"{width}", "requests": f"{count}", "steps": f"{steps:,}",
                "blocks, a copy each": f"{apart / steps:,.1f}", "blocks held": f"{held / steps:,.1f}",
                "saved %": f"{saved['of all blocks'][-1]:.1f}",
                "saved beyond the prompt %": f"{saved['of those beyond the prompt'][-1]:.1f}",
            }
        )  # fmt: skip
    return Study(rows, WIDTHS, saved, "beams", "blocks saved, %")


def _search(
    prompt: int, output: int, width: int, block_size: int, spread: float, random: np.random.Generator
) -> tuple[int, int, int, int]:
    """One beam search; summed over its steps.

    Blocks with a copy for each beam, blocks held, the prompt's whole blocks among them; and the steps.
    """
    cache = _cache(width * (-(-(prompt + output) // block_size) + 2), block_size, 2 * width + 2)
    options = SchedulerOptions(max_running=width, max_batch_tokens=prompt + width + 1, watermark=0.0)
    scheduler = Scheduler(cache, options)
    request = scheduler.submit(np.arange(prompt, dtype=np.int32), output, beams=width)
    scores: dict[Branch, float] = {}
    apart = held = steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        with scheduler.step(plan) as step:
            step.mark_written(0)
        if plan.from_prompt:
            apart += sum(len(seq.blocks) for seq in plan.sequences)
            held += cache.stats().blocks["device"]["live"]
            steps += 1
        if not plan.lanes:
            scheduler.report(plan, [])
            continue
        logits = random.normal(0.0, spread, (len(plan.lanes), CHOICES))
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        entries, kept = expand_beams([scores.get(branch, 0.0) for branch in plan.lanes], log_probs, width)
        lanes = list(plan.lanes)
        scheduler.report(plan, entries)
        scores = _scores(request, lanes, entries, kept)
    cache.close()
    return apart, held, steps * (prompt // block_size), steps


def _scores(
    request: Request, lanes: Sequence[Branch], entries: Sequence[list[int]], kept: Sequence[list[float]]
) -> dict[Branch, float]:
    """Each running branch's score.

    A parent's first token goes on in place, the others in the forks, in order.
    """
    found: dict[Branch, float] = {}
    forks = iter([branch for branch in request.live() if branch not in lanes])
    for branch, tokens, values in zip(lanes, entries, kept, strict=True):
        for k, _ in enumerate(tokens):
            if request.ended:
                return {}
            found[branch if k == 0 else next(forks)] = values[k]
    return found


def _cache(blocks: int, block_size: int, max_sequences: int = 4) -> KVCache:
    return virtual_cache([blocks, 0, 0], block_size, Hardware(), max_sequences)[0]


STUDIES: dict[str, Callable[..., Study]] = {"waste": waste, "prefix": prefix, "beams": beams}
