"""What happened between two frames, in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedkv.lab.recording.model import Frame, Move
from pagedkv.lab.recording.snapshot import Snapshot
from pagedkv.observe.hooks import Span


def opened(block_size: int, tiers: dict[str, int]) -> str:
    """Of the first frame."""
    sizes = ", ".join(f"{count} on the {tier}" for tier, count in tiers.items())
    return f"The recording begins. Blocks of {counted(block_size, 'token')}: {sizes}."


def of_sequence(name: str, span: Span) -> str:
    """A prompt became a sequence."""
    told = {k.removeprefix("hit_tokens_"): v for k, v in span.attributes.items() if k.startswith("hit_tokens_")}
    hits = {tier: count for tier, count in told.items() if count}
    tokens, cached = span.attributes["tokens"], sum(hits.values())
    if not cached:
        return f"{name} opens with a prompt of {counted(tokens, 'token')}. None of it is cached."
    origins = ", ".join(
        f"{count} out of a block that begins alike" if tier == "partial" else f"{count} from the {tier}"
        for tier, count in hits.items()
    )
    return f"{name} opens with a prompt of {counted(tokens, 'token')}. {cached} are cached: {origins}."


def of_fork(parent: str, names: Sequence[str], num_blocks: int) -> str:
    """A sequence was forked."""
    shares = "shares" if len(names) == 1 else "share"
    return f"{parent} is forked: {listed(names)} {shares} its {counted(num_blocks, 'block')}, and nothing is copied."


def of_allocate(before: Frame, now: Snapshot, arrays: Any, names: Sequence[str]) -> str:
    """A step has its blocks."""
    copies = [(int(source), int(target)) for source, target in arrays.copies]
    having = {block.block: block for block in now.tiers["device"]}
    fresh = sorted(having.keys() - before.held().keys() - {target for _, target in copies})
    parts = [f"A step over {listed(names)} computes {counted(len(arrays.tokens), 'token')}."]
    if fresh:
        parts.append(_sentence(f"{blocks(fresh)} {'is' if len(fresh) == 1 else 'are'} new."))
    for source, target in copies:
        writer = listed(having[target].sequences) if target in having else "a sequence"
        parts.append(f"Block {source} is shared, so {writer} will write to a copy of it, block {target}.")
    return " ".join(parts)


def of_step(before: Frame, now: Snapshot, span: Span) -> str:
    """A step is over."""
    if span.error is not None:
        return f"The step raised {type(span.error).__name__}: nothing is committed."
    had = {block.block for block in before.tiers["device"] if block.in_tree}
    joined = [block.block for block in now.tiers["device"] if block.in_tree and block.block not in had]
    parts = ["The step is committed."]
    if joined:
        verb = "is full and joins" if len(joined) == 1 else "are full and join"
        parts.append(_sentence(f"{blocks(joined)} {verb} the prefix tree."))
    tables = {sequence.name: sequence.blocks for sequence in before.sequences}
    for sequence in now.sequences:
        for old, new in zip(tables.get(sequence.name, ()), sequence.blocks, strict=False):
            if old != new:
                parts.append(f"The tree has the tokens of block {old} in block {new}, which {sequence.name} takes.")
    return " ".join(parts)


def of_moves_begun(before: Frame, now: Snapshot, moves: Sequence[Move]) -> str:
    """Copies between tiers begin."""
    by_way: dict[tuple[str, str], list[Move]] = {}
    for move in moves:
        by_way.setdefault((move.source, move.destination), []).append(move)
    parts = [
        f"{_sentence(source)} {blocks(m.block for m in some)} {'is' if len(some) == 1 else 'are'} being copied to "
        f"{target} {blocks(m.to for m in some)}."
        for (source, target), some in by_way.items()
    ]
    return " ".join([*([f"Dropped: {_places(lost)}."] if (lost := gone(before, now)) else []), *parts])


def of_moves_ended(moves: Sequence[Move], arrived: int) -> str:
    """Copies between tiers are over."""
    if arrived < len(moves):
        return f"Of {counted(len(moves), 'block')} that were to be copied, {arrived} arrived."
    targets = Counter(move.destination for move in moves)
    places = [f"{counted(count, 'block')} on the {tier}" for tier, count in targets.items()]
    return f"Arrived: {listed(places)}."


def of_drop(before: Frame, now: Snapshot, what: str) -> str:
    """Blocks were dropped."""
    why = {"make_room": "Room is made", "purge": "A namespace is purged", "flush": "The cache is flushed"}[what]
    return f"{why}. Dropped: {_places(gone(before, now))}."


def gone(before: Frame, now: Snapshot) -> dict[str, list[int]]:
    """Blocks that were owned, and now are free or hold something else, by tier."""
    left: dict[str, list[int]] = {}
    for tier, held in now.tiers.items():
        content = {block.block: block.tokens for block in held}
        for block in before.tiers.get(tier, ()):
            if content.get(block.block, (None,))[: len(block.tokens)] != block.tokens:
                left.setdefault(tier, []).append(block.block)
    return left


def _places(ids: Mapping[str, list[int]]) -> str:
    return listed([f"{tier} {blocks(some)}" for tier, some in ids.items()])


def blocks(ids: Iterable[int]) -> str:
    """``block 3``, ``blocks 3, 4 and 7``, ``blocks 0 to 9 and 12``."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][-1] + 1 == i:
            runs[-1].append(i)
        else:
            runs.append([i])
    words = [w for run in runs for w in ([f"{run[0]} to {run[-1]}"] if len(run) > 3 else map(str, run))]
    return f"{'block' if sum(map(len, runs)) == 1 else 'blocks'} {listed(words)}"


def listed(words: Sequence[str]) -> str:
    """``A``, ``A and B``, ``A, B and C``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "no sequence"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def counted(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
