"""One look at the books of short groups: pages and their holders, points, extents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedkv._core.block_pool import ExtentPool
from pagedkv._core.placement import Placement
from pagedkv._core.tier import TIER_NAMES
from pagedkv.lab.recording.groups import HeldPage, Moving, Point
from pagedkv.lab.recording.model import Move, SequenceState
from pagedkv.spec.groups import Group

FREE, HOLE = -1, -1  # an extent that no group has; a block without a page

Nodes = Mapping[int, dict[str, Any]]
Place = tuple[str, int, int]  # tier, group, page


@dataclass(frozen=True, slots=True)
class GroupBooks:
    """Pages by tier, points, and the owner of each extent by tier.

    All are empty without groups of layers.
    """

    pages: Mapping[str, tuple[HeldPage, ...]] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    extents: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    """Holders and contents of pages."""

    contents: dict[Place, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # logical block and tokens
    holders: dict[Place, list[str]] = field(default_factory=dict)
    in_tree: set[Place] = field(default_factory=set)
    points: Counter[Place] = field(default_factory=Counter)
    moves: Counter[Place] = field(default_factory=Counter)
    moving: dict[Place, Moving] = field(default_factory=dict)


def extents_of(placement: Placement) -> dict[str, ExtentPool]:
    """The extents of each tier; empty without groups of layers."""
    found = {TIER_NAMES[i]: pool.extents for i, pool in enumerate(placement.pools) if pool is not None}
    return {tier: extents for tier, extents in found.items() if extents is not None}


def look(
    placement: Placement,
    groups: Sequence[Group],
    nodes: Nodes,
    sequences: Iterable[SequenceState],
    moves: Iterable[tuple[Move, bool]],
) -> GroupBooks | None:
    """Look at the books; None where they changed meanwhile.

    Parameters
    ----------
    nodes : of `placement`, as its ``dump`` gives them.
    sequences : with their tables.
    moves : in flight now, and whether each leaves its source.
    """
    block_size, seen = placement.tree.block_size, _Seen()
    for seq in sequences:
        for group, table in enumerate(seq.tables, start=1):
            for logical, page in enumerate(table.pages, start=table.first):
                place = ("device", group, page)
                seen.holders.setdefault(place, []).append(seq.name)
                written = seq.tokens[logical * block_size : min((logical + 1) * block_size, seq.computed)]
                if len(written) >= len(seen.contents.get(place, (0, ()))[1]):
                    seen.contents[place] = logical, written
    points = list(_look_at_tree(groups, nodes, block_size, seen))
    if None in points:
        return None
    for move, leaves in moves:
        if move.group:
            source, target = (move.source, move.group, move.block), (move.destination, move.group, move.to)
            seen.moves.update((source, target))
            seen.moving[target] = "in"
            if leaves:
                seen.moving[source] = "out"
            if source in seen.contents:
                seen.contents.setdefault(target, seen.contents[source])
    pages: dict[str, tuple[HeldPage, ...]] = {}
    extents: dict[str, tuple[int, ...]] = {}
    for tier, shared in extents_of(placement).items():
        pages[tier] = tuple(
            _held(seen, (tier, group, page), references)
            for group, pool in enumerate(shared.pools)
            if group
            for page, references in sorted(pool.dump()["refs"].items())
        )
        extents[tier] = tuple(shared.owners())
    found = sorted((point for point in points if point is not None), key=lambda point: (point.num_blocks, point.block))
    books = GroupBooks(pages, tuple(found), extents)
    return books if _agrees(books, seen, extents_of(placement)) else None


def _look_at_tree(groups: Sequence[Group], nodes: Nodes, block_size: int, seen: _Seen) -> Iterator[Point | None]:
    """The points; None for one whose tail is not there."""
    for n, node in nodes.items():
        for (tier, group), pages in node["pages"].items():
            for i, page in enumerate(pages):
                if page != HOLE:
                    place = (TIER_NAMES[tier], group, page)
                    seen.in_tree.add(place)
                    tokens = node["tokens"][i * block_size : (i + 1) * block_size]
                    seen.contents[place] = node["depth"] + i, tokens
        if node["point"]:
            num_blocks = node["depth"] + len(node["tokens"]) // block_size
            tails = [
                (TIER_NAMES[tier], g, page)
                for tier in node["point"]
                for g, group in enumerate(groups)
                if g
                for page in _tail(nodes, n, tier, g, num_blocks - group.need(num_blocks))
            ]
            seen.points.update(tails)
            if not node["ids"] or any(page == HOLE for _, _, page in tails):
                yield None
            else:
                hottest = min(node["ids"])
                tiers = tuple(TIER_NAMES[tier] for tier in node["point"])
                yield Point(num_blocks, TIER_NAMES[hottest], node["ids"][hottest][-1], tiers)


def _tail(nodes: Nodes, n: int, tier: int, group: int, first: int) -> Iterator[int]:
    """Pages of the path to the end of node n from block `first` on, the last ones first."""
    while n in nodes:
        node = nodes[n]
        yield from reversed(node["pages"][tier, group][max(0, first - node["depth"]) :])
        if node["depth"] <= first:
            return
        n = node["parent"]


def _held(seen: _Seen, place: Place, references: int) -> HeldPage:
    _, group, page = place
    sequences, points = tuple(seen.holders.get(place, ())), seen.points[place]
    moves = min(
        seen.moves[place], max(0, references - len(sequences) - points)
    )  # others are over; a hook hears it soon
    logical, tokens = seen.contents.get(place, (HOLE, ()))
    moving: Moving = seen.moving.get(place, "") if moves else ""
    return HeldPage(
        group, page, references, place in seen.in_tree, sequences, points, moves, moving, logical, tokens
    )  # fmt: skip


def _agrees(books: GroupBooks, seen: _Seen, extents: Mapping[str, ExtentPool]) -> bool:
    """Whether no page has fewer references than holders seen, and its group has its extent."""
    owned = {(tier, held.group, held.page) for tier, pages in books.pages.items() for held in pages}
    if not (seen.in_tree | seen.holders.keys()) <= owned or any(h.others < 0 for p in books.pages.values() for h in p):
        return False
    return all(
        books.extents[tier][held.page // extents[tier].per_extent[held.group]] == held.group
        for tier, pages in books.pages.items()
        for held in pages
    )
