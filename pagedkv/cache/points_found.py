"""A reopened store over groups of layers: prefixes up to where a request can go on.

The store names no points. Where all groups have their whole tails a request can go on, and of such boundaries those are
made points whose tails together cover all pages that any of them needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.chain_key import chain_key
from pagedkv._core.placement import Placement
from pagedkv.cache.records import Found, Run, whole_prefixes
from pagedkv.cache.storage import Store
from pagedkv.spec.groups import Group
from pagedkv.tiers import StoredBlock

Pages = Mapping[bytes, int]  # by the chain key of the block


class LaneStore(Store, Protocol):
    """A store with a lane of slots for each group; see :class:`pagedkv.tiers.DiskTier`."""

    def records(self, *, lane: int = 0) -> Iterable[StoredBlock]:
        """Every block that a lane holds."""

    def invalidate(self, blocks: NDArray[np.int32], *, lane: int = 0) -> None:
        """Make slots of a lane hold nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A run that ends in a point, or at the end of a stored run.

    Attributes
    ----------
    run : its blocks.
    pages : int32 [num_short, n], the page of each block by short group; -1 without one.
    is_point : whether a request can go on at its end.
    """

    run: Run
    pages: NDArray[np.int32]
    is_point: bool


def pieces_of(
    runs: Sequence[Run], stored: Sequence[Pages], groups: Sequence[Group]
) -> tuple[list[Piece], list[StoredBlock]]:
    """Cut runs where a request can go on.

    Parameters
    ----------
    runs : each after the run that it continues.
    stored : by short group, its pages.
    groups : the short groups.

    Returns
    -------
    pieces : each after the one that it continues; each leads to a point.
    useless : blocks behind the last point of their prefix.
    """
    step = min((group.window for group in groups if group.window), default=0)
    chunks = [group.chunk for group in groups if group.chunk is not None and group.chunk > 1]
    ends: list[tuple[int, NDArray[np.int64], int]] = []  # by run: blocks of its path, stretches' beginnings, last piece
    pieces: list[Piece] = []
    for run in runs:
        depth, since, parent = ends[run.parent] if run.parent >= 0 else (0, np.zeros(len(groups), np.int64), -1)
        pages = np.array([[kept.get(block.record.key, -1) for block in run.found] for kept in stored], np.int32)
        boundaries = depth + 1 + np.arange(len(run.found))
        begins = np.maximum.accumulate(np.where(pages < 0, boundaries, since[:, None]), axis=1)
        needs = np.array([[group.need(k) for k in boundaries.tolist()] for group in groups], np.int64)
        can: NDArray[np.bool_] = np.all(begins <= boundaries - needs, axis=0)
        chosen = can & ~(np.append(can[1:], False) & np.insert(can[:-1], 0, False))
        if step:
            chosen |= can & (boundaries % step == 0)
        for chunk in chunks:
            chosen |= can & (boundaries % chunk == chunk - 1)
        first = 0
        for last in (*np.flatnonzero(chosen).tolist(), len(run.found) - 1):
            if last >= first:
                part = Run(run.namespace, parent, run.found[first : last + 1])
                parent = len(pieces)
                pieces.append(Piece(part, pages[:, first : last + 1], bool(chosen[last])))
                first = last + 1
        ends.append((depth + len(run.found), begins[:, -1], parent))
    return _leading_to_points(pieces)


def _leading_to_points(pieces: Sequence[Piece]) -> tuple[list[Piece], list[StoredBlock]]:
    """The pieces that lead to a point, and the blocks of the others."""
    leads = [piece.is_point for piece in pieces]
    for number in range(len(pieces) - 1, -1, -1):
        parent = pieces[number].run.parent
        if leads[number] and parent >= 0:
            leads[parent] = True
    number_of = np.append(np.cumsum(leads) - 1, -1)  # the last one is of no piece
    kept, useless = [], []
    for piece, is_kept in zip(pieces, leads, strict=True):
        if is_kept:
            run = Run(piece.run.namespace, int(number_of[piece.run.parent]), piece.run.found)
            kept.append(Piece(run, piece.pages, piece.is_point))
        else:
            useless += piece.run.found
    return kept, useless


def restore_points(
    placement: Placement, store: LaneStore, groups: Sequence[Group], tier: int, root_of: Callable[[bytes], int]
) -> Found:
    """Insert a reopened store's prefixes and their tails into the empty tree.

    All other blocks and pages are freed.

    Parameters
    ----------
    placement : with pools in extents in `tier`, from which nothing was given out.
    store : the tier of that number.
    groups : group 0 first; lane g of the store has the pages of group g.
    root_of : digest of a namespace -> its root.
    """
    runs, orphans = whole_prefixes(store.records(), store.secret)
    found = [_pages_in(store, lane) for lane in range(1, len(groups))]
    pieces, behind = pieces_of(runs, [pages for pages, _ in found], groups[1:])
    useless = [[*(block for blocks in orphans.values() for block in blocks), *(each.block for each in behind)]]
    for lane, (pages, wrong) in enumerate(found):
        used = {page for piece in pieces for page in piece.pages[lane].tolist()}
        useless.append(wrong + sorted(set(pages.values()) - used))
    for lane, blocks in enumerate(useless):
        if blocks:
            store.invalidate(np.array(blocks, np.int32), lane=lane)
    counts = {reason: len(blocks) for reason, blocks in orphans.items()} | {"no_tail": len(behind)}
    if not pieces:
        return Found(0, 0, counts)
    kept = _insert(placement, pieces, tier, root_of)
    followed = {piece.run.parent for piece in pieces}
    return Found(kept, sum(number not in followed for number in range(len(pieces))), counts)


def _pages_in(store: LaneStore, lane: int) -> tuple[dict[bytes, int], list[int]]:
    """The pages of a lane by their blocks' chain keys, and those with a wrong or doubled key."""
    pages: dict[bytes, int] = {}
    wrong = []
    for found in store.records(lane=lane):
        record = found.record
        right = record.key == chain_key(store.secret, record.namespace, record.parent, record.tokens)
        if right and record.key not in pages:
            pages[record.key] = found.block
        else:
            wrong.append(found.block)
    return pages, wrong


def _insert(placement: Placement, pieces: Sequence[Piece], tier: int, root_of: Callable[[bytes], int]) -> int:
    """Give the core all pieces, and take back the rest; the blocks that it has taken."""
    pool = placement.pools[tier]
    assert pool is not None
    extents = pool.extents
    assert extents is not None
    blocks = np.concatenate([piece.run.blocks for piece in pieces])
    pages = np.concatenate([piece.pages for piece in pieces], axis=1)
    extents.claim(0, blocks)
    for lane, row in enumerate(pages, start=1):
        extents.claim(lane, row[row >= 0])
    lengths = np.array([len(piece.run.found) for piece in pieces], np.int64)
    first = np.concatenate(([0], np.cumsum(lengths)))
    roots = {digest: root_of(digest) for digest in {piece.run.namespace for piece in pieces}}
    done = placement.restore_forest(
        np.concatenate([piece.run.tokens for piece in pieces]),
        blocks,
        first,
        np.array([piece.run.parent for piece in pieces], np.int32),
        np.array([roots[piece.run.namespace] for piece in pieces], np.int64),
        tier,
        list(pages),
        np.array([piece.is_point for piece in pieces], np.bool_),
    )
    place = np.arange(first[-1]) - np.repeat(first[:-1], lengths)
    pool.free(blocks[place >= np.repeat(done, lengths)])
    is_left = np.repeat(done < lengths, lengths)
    for lane, row in enumerate(pages, start=1):
        extents.pools[lane].free(row[is_left & (row >= 0)])
    return int(done.sum())
