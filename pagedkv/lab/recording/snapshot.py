"""One look at a cache's books: every owned block of every tier, and its owners.

Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pagedkv._core.block_table import BlockTable
from pagedkv._core.no_token import NO_TOKEN
from pagedkv._core.placement import Placement
from pagedkv._core.tier import TIER_NAMES
from pagedkv.errors import StaleHandle
from pagedkv.lab.recording.model import HeldBlock, Move, Moving, SequenceState

ATTEMPTS = 5  # at books that other threads change meanwhile


@dataclass(frozen=True, slots=True)
class Known:
    """A sequence that the recorder has heard of: its row in the block table, and its names."""

    row: int
    name: str
    parent: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot: live sequences, and the owned blocks by tier."""

    sequences: tuple[SequenceState, ...]
    tiers: Mapping[str, tuple[HeldBlock, ...]]


def take(
    placement: Placement, table: BlockTable, known: Iterable[Known], moves: Iterable[tuple[Move, bool]]
) -> Snapshot | None:
    """Look at the books; None if other threads changed them during each of a few looks.

    Parameters
    ----------
    known : sequences to look for; those released since are left out.
    moves : in flight now, and whether each leaves its source.
    """
    known, moves = list(known), list(moves)
    for _ in range(ATTEMPTS):
        found = _look(placement, table, known, moves)
        if found is not None:
            return found
    return None


def _look(
    placement: Placement, table: BlockTable, known: list[Known], moves: list[tuple[Move, bool]]
) -> Snapshot | None:
    block_size = placement.tree.block_size
    sequences: list[SequenceState] = []
    for one in known:
        try:
            tokens, blocks = table.tokens(one.row).tolist(), table.blocks(one.row).tolist()
            computed = table.info(one.row).num_computed
        except StaleHandle:
            continue
        sequences.append(SequenceState(one.name, one.parent, tuple(tokens), computed, tuple(blocks)))
    contents: dict[tuple[str, int], tuple[int, ...]] = {}
    holders: dict[int, list[str]] = {}
    for seq in sequences:
        for i, block in enumerate(seq.blocks):
            holders.setdefault(block, []).append(seq.name)
            written = seq.tokens[i * block_size : min((i + 1) * block_size, seq.computed)]
            contents["device", block] = max(contents.get(("device", block), ()), written, key=len)
    in_tree: set[tuple[str, int]] = set()
    for node in placement.dump().values():
        for tier, ids in node["ids"].items():
            for i, block in enumerate(ids):
                place = (TIER_NAMES[tier], block)
                in_tree.add(place)
                tokens = node["tokens"][i * block_size : (i + 1) * block_size]
                contents[place] = tuple(token for token in tokens if token != NO_TOKEN)
    moving: dict[tuple[str, int], Moving] = {}
    for move, leaves in moves:
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
    return Snapshot(tuple(sequences), tiers) if _agrees(tiers, holders, in_tree) else None


def _agrees(
    tiers: Mapping[str, tuple[HeldBlock, ...]], holders: Mapping[int, list[str]], in_tree: set[tuple[str, int]]
) -> bool:
    """Whether no block has fewer references than owners seen.

    Otherwise the cache changed while it was read.
    """
    owned = {(tier, block.block) for tier, blocks in tiers.items() for block in blocks}
    wanted = in_tree | {("device", block) for block in holders}
    return wanted <= owned and all(block.others >= 0 for blocks in tiers.values() for block in blocks)
