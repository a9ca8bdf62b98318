"""What to do after a replay: which policy, which size, and which tier is large enough.

In points of block hit rate, from further replays of the same trace with the policy of reference: LRU, or the first
policy replayed where LRU was not among them. A sweep has its sizes already, and needs none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagedkv.lab.replay.capacity import MAX_BLOCKS, TIER_NAMES, Capacity
from pagedkv.lab.replay.options import Options
from pagedkv.lab.replay.progress import Progress
from pagedkv.lab.replay.references import BOUNDS, References
from pagedkv.lab.replay.result import Result
from pagedkv.lab.replay.run import replay
from pagedkv.lab.replay.trace import Trace
from pagedkv.spec.sizes import format_size

NOTHING = 0.1  # points: a gain below this is none


@dataclass(frozen=True, slots=True, eq=False)
class Advice:
    """Sentences, and the replays that were made for them."""

    sentences: list[str]
    replays: list[Result]


def advise(
    trace: Trace, results: Sequence[Result], options: Options, references: References, progress: Progress
) -> Advice:
    """Sum up results, and replay what is missing for that.

    The further replays move no bytes, whatever engine the results are of.
    """
    by_size: dict[tuple[int, int, int], list[Result]] = {}
    for r in results:
        by_size.setdefault(r.capacity.blocks, []).append(r)
    policies = [r.policy for r in results if r.policy not in BOUNDS]
    reference = "lru" if "lru" in policies or not policies else policies[0]
    if len(by_size) > 1:
        return Advice(_of_sweep(trace, list(by_size.values()), references, reference), [])
    block_bytes = trace.block_size * options.bytes_per_token
    more = _More(trace, reference, replace(options, engine="sim"), references, progress)
    for r in results:
        if r.policy == reference and r.engine == "sim":
            more.known[r.capacity.blocks] = r
    size = results[0].capacity
    sentences = [
        _of_policies(results, references, size) if options.layers is None else _of_layers(results, references, size),
        _of_doubling(more, size),
        _of_enough(more, size, block_bytes),
    ]
    return Advice(sentences, more.made)


class _More:
    """Further replays of the policy of reference, each size once."""

    def __init__(
        self, trace: Trace, policy: str, options: Options, references: References, progress: Progress
    ) -> None:
        self.trace, self.policy, self.references = trace, policy, references
        if policy != "hazard":
            options = replace(options, hazard_stake=None)
        self._options, self._progress = options, progress
        self.known: dict[tuple[int, int, int], Result] = {}
        self.made: list[Result] = []

    def points(self, size: Capacity) -> float:
        """Hit rate at a size, in points."""
        if size.blocks not in self.known:
            (result,) = replay(
                self.trace,
                [self.policy],
                Capacity(*size.blocks),
                options=self._options,
                progress=self._progress,
                references=self.references,
            )
            self.known[size.blocks] = result
            self.made.append(result)
        return 100 * self.known[size.blocks].block_hit_rate


def _of_policies(results: Sequence[Result], references: References, size: Capacity) -> str:
    accesses = results[0].block_accesses
    rates = {r.policy: 100 * r.block_hit_rate for r in results if r.policy not in BOUNDS}
    bound = 100 * references.total("min", size) / accesses
    if not rates:
        return f"Policy: none was replayed; one that knows the future (min) hits {bound:.1f} % of the blocks."
    best = max(rates, key=lambda name: rates[name])
    others = [name for name in rates if name != best]
    second = max(others, key=lambda name: rates[name]) if others else best
    other = "lru" if "lru" in others else second
    gain = rates[best] - rates[other]
    if not others:
        line = f"Policy: {best} hits {rates[best]:.1f} % of the blocks"
    elif gain >= NOTHING:
        line = f"Policy: {best} hits {rates[best]:.1f} % of the blocks, {gain:.1f} points more than {other}"
    else:
        same = "lru" if "lru" in rates else best
        line = f"Policy: none of these is worth more than {same}, which hits {rates[same]:.1f} % of the blocks"
    return f"{line}; one that knows the future (min) would hit {bound:.1f} %."


def _of_layers(results: Sequence[Result], references: References, size: Capacity) -> str:
    """The gain of layers that keep only tokens that they can still read."""
    accesses = results[0].block_accesses
    kept = 100 * references.total("lru", size) / accesses
    rates = [100 * r.block_hit_rate for r in results if r.policy not in BOUNDS]
    if not rates:
        return f"Layers: all tokens of every layer, on one tier of all this memory, hit {kept:.1f} % of the blocks."
    return (
        f"Layers: with the tokens that each can still read {rates[0]:.1f} % of the blocks are hit; with all tokens of "
        f"every layer, on one tier of all this memory, {kept:.1f} %."
    )


def _of_doubling(more: _More, size: Capacity) -> str:
    gains = [
        f"the {name} {'nothing' if abs(gain) < NOTHING else f'{gain:+.1f} points'}"
        for name, gain in _gains_of_doubling(more, size).items()
    ]
    return f"Size: with {more.policy}, doubling is worth: {', '.join(gains)}."


def _gains_of_doubling(more: _More, size: Capacity) -> dict[str, float]:
    """Points by tier, of the tiers that can be doubled."""
    return {
        name: more.points(_with(size, at, 2 * blocks)) - more.points(size)
        for at, (name, blocks) in enumerate(zip(TIER_NAMES, size.blocks, strict=True))
        if 0 < blocks <= MAX_BLOCKS // 2
    }


def _with(size: Capacity, tier: int, blocks: int) -> Capacity:
    """The same tiers, but for the size of one."""
    device, host, disk = (blocks if at == tier else n for at, n in enumerate(size.blocks))
    return Capacity(device, host, disk)


def _of_enough(more: _More, size: Capacity, block_bytes: int) -> str:
    """The smallest size of the coldest tier beyond which it has nothing more to win."""
    coldest = max(at for at, blocks in enumerate(size.blocks) if blocks)
    name, now, rest = TIER_NAMES[coldest], size.blocks[coldest], sum(size.blocks[:coldest])

    def points(blocks: int) -> float:
        return more.points(_with(size, coldest, blocks))

    most_useful = max(now, more.trace.num_unique)
    most = points(most_useful)  # below the bound where prompts are longer than the device
    if points(now) >= most - NOTHING:
        line = f"Enough: a larger {name} tier is worth nothing; an endless one hits {most:.1f} %, as this one does"
        gains = _gains_of_doubling(more, size)
        gain, other = max(((gains[tier], tier) for tier in gains if tier != name), default=(0.0, ""))
        return f"{line}{f'. Twice the {other} is worth {gain:+.1f} points' if gain >= NOTHING else ''}."
    least = _enough_on_one_tier(more.trace, more.references, size)
    enough = next(n for n in (max(now, least - rest), max(now, least), most_useful) if points(n) >= most - NOTHING)
    return (
        f"Enough: a {name} tier of {enough:,} blocks ({format_size(enough * block_bytes)}) hits "
        f"{points(enough):.1f} %, and an endless one {most:.1f} %; a larger one is worth nothing."
    )


def _enough_on_one_tier(trace: Trace, references: References, size: Capacity) -> int:
    """Blocks of one tier with which LRU hits all but nothing of what it ever can; by bisection."""
    most = 100 * references.total("infinite", size) / trace.num_accesses
    low, high = size.total, trace.num_unique
    while low < high:
        middle = (low + high) // 2
        there = references.total("lru", Capacity(size.device, 0, max(0, middle - size.device)))
        if 100 * there / trace.num_accesses >= most - NOTHING:
            high = middle
        else:
            low = middle + 1
    return low


def _of_sweep(trace: Trace, sizes: list[list[Result]], references: References, reference: str) -> list[str]:
    """Sizes in the order of their blocks, each with the results there."""
    sizes = sorted(sizes, key=lambda there: there[0].capacity.total)
    sentences = []
    wins: dict[str, int] = {}
    for there in sizes:
        rates = {r.policy: r.block_hit_rate for r in there if r.policy not in BOUNDS}
        if rates:
            best = max(rates, key=lambda name: rates[name])
            wins[best] = wins.get(best, 0) + 1
    if wins:
        most_often = ", ".join(f"{name} at {count}" for name, count in sorted(wins.items(), key=lambda x: -x[1]))
        sentences.append(f"Policy: of {len(sizes)} sizes, most is hit by {most_often}.")
    found = [(there[0].capacity.total, r) for there in sizes for r in there if r.policy == reference]
    if len(found) > 1:
        steps = [
            (100 * (b.block_hit_rate - a.block_hit_rate), m, n)
            for (m, a), (n, b) in itertools.pairwise(found)
        ]
        gain, m, n = max(steps)
        sentences.append(
            f"Size: with {reference}, the step that is worth most is from {m:,} to {n:,} blocks: {gain:+.1f} points."
        )
    if found:
        most = 100 * references.total("infinite", sizes[-1][0].capacity) / trace.num_accesses
        enough = [total for total, r in found if 100 * r.block_hit_rate >= most - NOTHING]
        last = 100 * found[-1][1].block_hit_rate
        sentences.append(
            f"Enough: more than {enough[0]:,} blocks is worth nothing; an endless cache hits {most:.1f} %."
            if enough
            else f"Enough: none of these sizes is; the largest hits {last:.1f} %, an endless cache {most:.1f} %."
        )
    return sentences
