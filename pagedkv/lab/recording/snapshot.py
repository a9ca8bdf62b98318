"""One look at a cache's books: every owned block of every tier, and its owners.

Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pagedkv._core.block_table import BlockTable
from pagedkv._core.no_token import NO_TOKEN
from pagedkv._core.placement import Placement
from pagedkv._core.tier import TIER_NAMES
from pagedkv.errors import StaleHandle
from pagedkv.lab.recording.group_snapshot import GroupBooks, look
from pagedkv.lab.recording.groups import Moving, PageTable
from pagedkv.lab.recording.model import HeldBlock, Move, SequenceState
from pagedkv.spec.groups import Group

ATTEMPTS = 5  # at books that other threads change meanwhile


@dataclass(frozen=True, slots=True)
class Known:
    """A sequence that the recorder has heard of: its row in the block table, and its names."""

    row: int
    name: str
    parent: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot: live sequences, the owned blocks by tier, and the books of short groups."""

    sequences: tuple[SequenceState, ...]
    tiers: Mapping[str, tuple[HeldBlock, ...]]
    groups: GroupBooks


def take(
    placement: Placement,
    table: BlockTable,
    groups: Sequence[Group],
    known: Iterable[Known],
    moves: Iterable[tuple[Move, bool]],
) -> Snapshot | None:
    """Look at the books; None if other threads changed them during each of a few looks.

    Parameters
    ----------
    groups : of layers, as many as `placement` has.
    known : sequences to look for; those released since are left out.
    moves : in flight now, and whether each leaves its source.
    """
    known, moves = list(known), list(moves)
    for _ in range(ATTEMPTS):
        found = _look(placement, table, groups, known, moves)
        if found is not None:
            return found
    return None


def _look(
    placement: Placement,
    table: BlockTable,
    groups: Sequence[Group],
    known: list[Known],
    moves: list[tuple[Move, bool]],
) -> Snapshot | None:
    block_size = placement.tree.block_size
    sequences: list[SequenceState] = []
    for one in known:
        try:
            tokens, blocks = table.tokens(one.row).tolist(), table.blocks(one.row).tolist()
            computed = table.info(one.row).num_computed
            short = [table.pages(one.row, group) for group in range(1, len(groups))]
        except StaleHandle:
            continue
        tables = tuple(PageTable(first, tuple(pages.tolist())) for first, pages in short)
        sequences.append(SequenceState(one.name, one.parent, tuple(tokens), computed, tuple(blocks), tables))
    contents: dict[tuple[str, int], tuple[int, ...]] = {}
    holders: dict[int, list[str]] = {}
    for seq in sequences:
        for i, block in enumerate(seq.blocks):
            holders.setdefault(block, []).append(seq.name)
            written = seq.tokens[i * block_size : min((i + 1) * block_size, seq.computed)]
            contents["device", block] = max(contents.get(("device", block), ()), written, key=len)
    in_tree: set[tuple[str, int]] = set()
    nodes = placement.dump()
    for node in nodes.values():
        for tier, ids in node["ids"].items():
            for i, block in enumerate(ids):
                place = (TIER_NAMES[tier], block)
                in_tree.add(place)
                tokens = node["tokens"][i * block_size : (i + 1) * block_size]
                contents[place] = tuple(token for token in tokens if token != NO_TOKEN)
    moving: dict[tuple[str, int], Moving] = {}
    for move, leaves in moves:
        if move.group:
            continue
        if leaves:
            moving[move.source, move.block] = "out"
        moving[move.destination, move.to] = "in"
        contents.setdefault((move.destination, move.to), contents.get((move.source, move.block), ()))
    tiers: dict[str, tuple[HeldBlock, ...]] = {}
    for number, pool in enumerate(placement.pools):
        if pool is None:
            continue
        tier = TIER_NAMES[number]
        tiers[tier] = tuple(
            HeldBlock(
                block, references, (tier, block) in in_tree,
                tuple(holders.get(block, ())) if number == 0 else (),
                moving.get((tier, block), ""), contents.get((tier, block), ()),
            )
            for block, references in sorted(pool.dump()["refs"].items())
        )  # fmt: skip
    if not _agrees(tiers, holders, in_tree):
        return None
    books = look(placement, groups, nodes, sequences, moves) if len(groups) > 1 else GroupBooks()
    return None if books is None else Snapshot(tuple(sequences), tiers, books)


def _agrees(
    tiers: Mapping[str, tuple[HeldBlock, ...]], holders: Mapping[int, list[str]], in_tree: set[tuple[str, int]]
) -> bool:
    """Whether no block has fewer references than owners seen.

    Otherwise the cache changed while it was read.
    """
    owned = {(tier, block.block) for tier, blocks in tiers.items() for block in blocks}
    wanted = in_tree | {("device", block) for block in holders}
    return wanted <= owned and all(block.others >= 0 for blocks in tiers.values() for block in blocks)
