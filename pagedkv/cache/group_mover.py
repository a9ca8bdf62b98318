"""Moves pages of groups of layers between memories in extents and a disk with lanes.

A move names its group as its lane. The pages of each lane are rows of their tier's memory, or slots of a lane on disk,
so to a :class:`Mover` every lane of a tier is a tier of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.spec.groups import GroupLayout
from pagedkv.tiers import DeviceTier, DirectionStats, DiskTier, Mover, Name, OpenTier, Record, Ticket
from pagedkv.tiers.device import DeviceLane
from pagedkv.tiers.memory import ArenaTier
from pagedkv.tiers.mover.hangs import LANE


class GroupMover:
    """Threads that move pages: a Carrier (:class:`pagedkv.cache.storage.Carrier`).

    Parameters
    ----------
    tiers : by number, their arenas uint8 [num_extents, extent_bytes], and perhaps a disk.
    layout : of the pages in an extent of memory.
    threads : worker threads.
    describe : names the blocks of moves to or from the disk.

    Attributes
    ----------
    lane_bytes : bytes that the move of a page takes, by its group.
    write_bytes : the same of a write to the disk, header and all.
    """

    is_synchronous = False

    def __init__(
        self,
        tiers: Mapping[int, OpenTier],
        layout: GroupLayout,
        threads: int,
        describe: Callable[[NDArray[np.void]], list[Record | Name]] | None = None,
    ) -> None:
        self.lane_bytes = self.write_bytes = np.array([group.page_bytes for group in layout.groups], np.int64)
        lanes: dict[int, OpenTier] = {}
        for number, tier in tiers.items():
            if isinstance(tier, DiskTier):
                self.write_bytes = np.array(tier.lane_write_bytes, np.int64)
            for lane, (stride, size) in enumerate(zip(layout.strides, self.lane_bytes.tolist(), strict=True)):
                if isinstance(tier, ArenaTier):
                    pages = tier.arena.reshape(-1, stride)[:, :size]
                    lanes[number + LANE * lane] = (
                        DeviceLane(tier, pages)
                        if isinstance(tier, DeviceTier)
                        else ArenaTier(tier.name, pages, tier.gpu, tier.piece_bytes)
                    )
                else:
                    assert isinstance(tier, DiskTier)
                    lanes[number + LANE * lane] = tier.lane(lane)
        self._mover = Mover(lanes, threads=threads, describe=describe)

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
