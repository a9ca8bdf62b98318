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


def opened_by_group(block_size: int, num_groups: int, extents: Mapping[str, int]) -> str:
    """Of the first frame of a cache by groups of layers."""
    sizes = ", ".join(f"{counted(count, 'extent')} on the {tier}" for tier, count in extents.items())
    return f"The recording begins. Blocks of {counted(block_size, 'token')}, {num_groups} groups of layers: {sizes}."


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
    copies = pairs(arrays.copies)
    having = {block.block: block for block in now.tiers["device"]}
    fresh = sorted(having.keys() - before.held().keys() - {target for _, target in copies})
    parts = [f"A step over {listed(names)} computes {counted(len(arrays.tokens), 'token')}."]
    if fresh:
        parts.append(_sentence(f"{blocks(fresh)} {'is' if len(fresh) == 1 else 'are'} new."))
    for source, target in copies:
        writer = listed(having[target].sequences) if target in having else "a sequence"
        parts.append(f"Block {source} is shared, so {writer} will write to a copy of it, block {target}.")
    for group, part in enumerate(arrays.groups, start=1):
        pages = {held.page: held for held in now.groups.pages["device"] if held.group == group and held.sequences}
        copied = pairs(part.copies)
        new = sorted(pages.keys() - before.held_pages(group).keys() - {target for _, target in copied})
        if new:
            parts.append(_sentence(f"{named(new, group)} {'is' if len(new) == 1 else 'are'} new."))
        for source, target in copied:
            writer = listed(pages[target].sequences) if target in pages else "a sequence"
            shared = f"Page {source} of group {group} is shared"
            parts.append(f"{shared}, so {writer} will write to a copy of it, page {target}.")
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
    by_way: dict[tuple[str, str, int], list[Move]] = {}
    for move in moves:
        by_way.setdefault((move.source, move.destination, move.group), []).append(move)
    parts = [
        f"{_sentence(source)} {named((m.block for m in some), group)} {'is' if len(some) == 1 else 'are'} being copied "
        f"to {target} {named((m.to for m in some), 0, 'page' if group else 'block')}."
        for (source, target, group), some in by_way.items()
    ]
    return " ".join([*([f"Dropped: {_places(lost)}."] if (lost := gone(before, now)) else []), *parts])


def of_moves_ended(moves: Sequence[Move], arrived: int, arrived_pages: int) -> str:
    """Copies between tiers are over."""
    wanted = Counter(bool(move.group) for move in moves)
    if (arrived, arrived_pages) != (wanted[False], wanted[True]):
        came = f"{arrived}" if not wanted[True] else _blocks_and_pages(arrived, arrived_pages) or "none"
        return f"Of {_blocks_and_pages(wanted[False], wanted[True])} that were to be copied, {came} arrived."
    places = []
    for tier in dict.fromkeys(move.destination for move in moves):
        there = Counter(bool(move.group) for move in moves if move.destination == tier)
        places.append(f"{_blocks_and_pages(there[False], there[True])} on the {tier}")
    return f"Arrived: {listed(places)}."


def of_drop(before: Frame, now: Snapshot, what: str) -> str:
    """Blocks were dropped."""
    why = {"make_room": "Room is made", "purge": "A namespace is purged", "flush": "The cache is flushed"}[what]
    return f"{why}. Dropped: {_places(gone(before, now))}."


def of_groups(before: Frame, now: Snapshot, is_told: bool) -> str:
    """Tell of changes in short groups, with a space before; `is_told`: leave lost pages out."""
    parts = []
    lost = {place: ids for place, ids in gone(before, now).items() if place[1]}
    if lost and not is_told:
        parts.append(f" Let go: {_places(lost)}.")
    was, there = (Counter(point.num_blocks for point in points) for points in (before.points, now.groups.points))
    for words, depths in (("New", there - was), ("Gone", was - there)):
        if depths:
            behind = listed([counted(depth, "block") for depth in sorted(depths.elements())])
            parts.append(f" {words}: {'a point' if depths.total() == 1 else 'points'} after {behind}.")
    return "".join(parts)


def gone(before: Frame, now: Snapshot) -> dict[tuple[str, int], list[int]]:
    """By tier and group, blocks and pages that are free now or hold something else."""
    left: dict[tuple[str, int], list[int]] = {}
    for tier, held in now.tiers.items():
        content = {block.block: block.tokens for block in held}
        for block in before.tiers.get(tier, ()):
            if content.get(block.block, (None,))[: len(block.tokens)] != block.tokens:
                left.setdefault((tier, 0), []).append(block.block)
    for tier, pages in now.groups.pages.items():
        there = {(held.group, held.page): (held.logical, *held.tokens) for held in pages}
        for page in before.pages.get(tier, ()):
            if there.get((page.group, page.page), (None,))[: 1 + len(page.tokens)] != (page.logical, *page.tokens):
                left.setdefault((tier, page.group), []).append(page.page)
    return left


def pairs(copies: Any) -> list[tuple[int, int]]:
    """Source and target of each copy."""
    return [(int(source), int(target)) for source, target in copies]


def _places(ids: Mapping[tuple[str, int], list[int]]) -> str:
    return listed([f"{tier} {named(some, group)}" for (tier, group), some in ids.items()])


def _blocks_and_pages(num_blocks: int, num_pages: int) -> str:
    both = ((num_blocks, "block"), (num_pages, "page"))
    return " and ".join(counted(number, noun) for number, noun in both if number)


def blocks(ids: Iterable[int]) -> str:
    """Of group 0, as `named`."""
    return named(ids, 0)


def named(ids: Iterable[int], group: int, noun: str = "") -> str:
    """``block 3``, ``blocks 3, 4 and 7``, ``blocks 0 to 9``, ``pages 3 and 4 of group 1``."""
    noun = noun or ("page" if group else "block")
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][-1] + 1 == i:
            runs[-1].append(i)
        else:
            runs.append([i])
    words = [w for run in runs for w in ([f"{run[0]} to {run[-1]}"] if len(run) > 3 else map(str, run))]
    return f"{noun if sum(map(len, runs)) == 1 else f'{noun}s'} {listed(words)}{f' of group {group}' if group else ''}"


def listed(words: Sequence[str]) -> str:
    """``A``, ``A and B``, ``A, B and C``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "no sequence"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def counted(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
