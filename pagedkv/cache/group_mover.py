"""Moves pages of groups of layers between two memories in extents.

A move names its group as its lane. The pages of each lane are rows of their tier's memory, so to a :class:`Mover` every
lane of a tier is a tier of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.spec.groups import GroupLayout
from pagedkv.tiers import DirectionStats, Mover, OpenTier, Ticket
from pagedkv.tiers.memory import ArenaTier
from pagedkv.tiers.mover.mover import LANE


class GroupMover:
    """Threads that move pages: a Carrier (:class:`pagedkv.cache.storage.Carrier`).

    Parameters
    ----------
    tiers : by number, their arenas uint8 [num_extents, extent_bytes] in CPU memory.
    layout : of the pages in an extent.
    threads : worker threads.

    Attributes
    ----------
    lane_bytes : bytes that the move of a page takes, by its group.
    """

    is_synchronous = False

    def __init__(self, tiers: Mapping[int, OpenTier], layout: GroupLayout, threads: int) -> None:
        self.lane_bytes = np.array(layout.strides, np.int64)
        lanes: dict[int, OpenTier] = {}
        for number, tier in tiers.items():
            assert isinstance(tier, ArenaTier)
            for lane, (count, stride) in enumerate(zip(layout.per_extent, layout.strides, strict=True)):
                lanes[number + LANE * lane] = ArenaTier(tier.name, tier.arena.reshape(-1, stride), None)
                assert len(tier.arena) * count == lanes[number + LANE * lane].num_blocks
        self._mover = Mover(lanes, threads=threads)

    @property
    def block_bytes(self) -> int:
        """Bytes of a page of the group that sees everything."""
        return int(self.lane_bytes[0])

    def submit(self, moves: NDArray[np.void], **options: Any) -> Ticket:
        """Begin moves; `options` as :meth:`Mover.submit`."""
        told = moves.copy()
        told["src_tier"] += LANE * told["lane"]
        told["dst_tier"] += LANE * told["lane"]
        return self._mover.submit(told, **options)

    def watch(self, ticket: Ticket) -> float:
        """As :meth:`Mover.watch`."""
        return self._mover.watch(ticket)

    def stats(self) -> dict[tuple[int, int], DirectionStats]:
        """Counters by (source tier, destination tier), of the pages of all groups."""
        added: dict[tuple[int, int], DirectionStats] = {}
        for (src, dst), counts in self._mover.stats().items():
            total = added.setdefault((src % LANE, dst % LANE), DirectionStats())
            for field in fields(DirectionStats):
                setattr(total, field.name, getattr(total, field.name) + getattr(counts, field.name))
        return added

    def close(self) -> None:
        """As :meth:`Mover.close`."""
        self._mover.close()
