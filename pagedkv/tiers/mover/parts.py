"""Cutting a batch of moves into parts: what one thread does at a time, in one direction.

A part is large enough that Python's share is small, and small enough that threads share one transfer and that a
cancel takes effect soon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.tiers.base import OpenTier, is_store

LEAST_PART_BYTES, MOST_PART_BYTES = 4 << 20, 64 << 20
MOST_STORED_BYTES = 8 << 20  # of a part to or from a store: two threads at a disk of 2 MB/s do not hang
FIELDS = ("transfer", "src_tier", "dst_tier", "src_block", "dst_block")


def check_moves(moves: Any, tiers: Mapping[int, OpenTier]) -> NDArray[np.void]:
    """Return `moves` if all can be carried out together.

    Each must name tiers and blocks that exist; no block is written twice or is both ends.

    Raises
    ------
    WrongType
        Not a one-dimensional structured array with the fields of a Move.
    InvalidArgument
        A tier or block that does not exist, a direction that no tier can serve, or a clash.
    """
    if not isinstance(moves, np.ndarray) or moves.ndim != 1 or moves.dtype.names is None:
        raise WrongType("moves must be a one-dimensional structured array, as take_moves() returns")
    missing = [name for name in FIELDS if name not in moves.dtype.names or moves.dtype[name].kind not in "iu"]
    if missing:
        raise WrongType(f"moves lack the field {missing[0]!r} of integers")
    for src, dst in directions(moves):
        for number in (src, dst):
            if number not in tiers:
                raise InvalidArgument(f"a move names tier {number}, this mover has tiers {sorted(tiers)}")
        if tiers[src].block_bytes != tiers[dst].block_bytes:
            raise InvalidArgument(f"a move from tier {src} to {dst}, whose blocks have different sizes")
        if is_store(tiers[src]) and is_store(tiers[dst]):
            raise InvalidArgument(f"a move from {tiers[src].name!r} to {tiers[dst].name!r}: one end must be in memory")
    for end in ("src", "dst"):
        for number in np.unique(moves[f"{end}_tier"]).tolist():
            blocks = moves[f"{end}_block"][moves[f"{end}_tier"] == number]
            tier = tiers[number]
            if blocks.min() < 0 or blocks.max() >= tier.num_blocks:
                raise InvalidArgument(
                    f"a move names a block outside [0, {tier.num_blocks}) of tier {tier.name!r} as its {end}"
                )
    sources = places(moves, "src")
    targets = places(moves, "dst")
    if np.unique(targets).size != targets.size:
        raise InvalidArgument("two moves have the same destination")
    if np.isin(targets, sources).any():
        raise InvalidArgument("a block is the source of one move and the destination of another in the same batch")
    return moves


def places(moves: NDArray[np.void], end: str) -> NDArray[np.int64]:
    """One number per (tier, block) of the given end."""
    tier = moves[f"{end}_tier"].astype(np.int64) << 32
    return tier | moves[f"{end}_block"].astype(np.int64)


def directions(moves: NDArray[np.void]) -> list[tuple[int, int]]:
    """The pairs (source tier, destination tier) that occur."""
    pairs = {(int(src), int(dst)) for src, dst in zip(moves["src_tier"].tolist(), moves["dst_tier"].tolist())}
    return sorted(pairs)


def stored_moves(moves: NDArray[np.void], tiers: Mapping[int, OpenTier]) -> NDArray[np.intp]:
    """Indices of the moves to or from a tier that needs records."""
    stores = [number for number, tier in tiers.items() if is_store(tier)]
    return np.flatnonzero(np.isin(moves["src_tier"], stores) | np.isin(moves["dst_tier"], stores))


def cut(
    moves: NDArray[np.void], tiers: Mapping[int, OpenTier], threads: int
) -> Iterator[tuple[int, int, NDArray[np.intp]]]:
    """Cut moves into parts; within a direction the order stays.

    Yields ``(source tier, destination tier, indices of moves)``.

    Each part is half of a thread's fair share of the rest (guided self-scheduling, Polychronopoulos and Kuck
    1987): few parts, because handing one over costs up to 0.2 ms, and small ones last, so that threads end together.
    """
    for src, dst in directions(moves):
        chosen = np.flatnonzero((moves["src_tier"] == src) & (moves["dst_tier"] == dst))
        block_bytes = tiers[src].block_bytes
        stored = is_store(tiers[src]) or is_store(tiers[dst])
        most_bytes = min(MOST_STORED_BYTES, MOST_PART_BYTES) if stored else MOST_PART_BYTES
        least, most = max(1, LEAST_PART_BYTES // block_bytes), max(1, most_bytes // block_bytes)
        start = 0
        while start < chosen.size:
            size = max(least, min(most, (chosen.size - start) // (2 * threads)))
            yield src, dst, chosen[start : start + size]
            start += size
