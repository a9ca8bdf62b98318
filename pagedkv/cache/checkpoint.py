"""Copies the blocks of memory that the disk lacks.

A checkpoint does so, and a cache that closes.

The blocks used last come first, and of a prompt those nearest its beginning. Every beginning of that order is of use
without the rest, so a checkpoint can end at any moment.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from pagedkv._core.placement import Placement
from pagedkv._core.tier import TIER_NAMES, Tier
from pagedkv.cache.admission import Admission
from pagedkv.cache.moves import Moves
from pagedkv.cache.storage import Store

STEP_BLOCKS = 64  # copied before the clock, the budget and the disk's health are looked at again


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a checkpoint.

    Attributes
    ----------
    blocks : copied to the disk now.
    lacking : that memory holds and the disk still lacks.
    seconds : that it took.
    is_cut : whether time, the write budget or the disk ended it before all was looked at, so not only room was missing.
    """

    blocks: int
    lacking: int
    seconds: float
    is_cut: bool


class Checkpoint:
    """Copies blocks to the disk, and demotes none.

    Parameters
    ----------
    placement : Placement
    moves : Moves
    admission : whose write budget it keeps to.
    store : the disk tier.
    """

    def __init__(self, placement: Placement, moves: Moves, admission: Admission, store: Store) -> None:
        self._placement, self._moves, self._admission, self._store = placement, moves, admission, store

    def write(self, within_s: float = math.inf) -> Written:
        """Copy what finds room.

        It ends early where the write budget is used up, where the time is over, and where the disk fails or hangs. The
        time is looked at between every 64 blocks.
        """
        placement, began = self._placement, time.monotonic()
        copied = self._copied()
        nodes, _ = placement.uncopied(Tier.DISK)
        at, refused = 0, self._refused()
        while at < len(nodes) and self._store.state == "ok" and time.monotonic() - began < within_s:
            started, done = self._step(nodes[at:])
            at += done
            if self._refused() > refused:
                break
            if not started and not done and not self._moves.run_moves():
                at += 1  # nothing is under way that it could wait for: it was let go of meanwhile
        _, lacking = placement.uncopied(Tier.DISK)
        return Written(self._copied() - copied, int(lacking.sum()), time.monotonic() - began, at < len(nodes))

    def _step(self, nodes: object) -> tuple[int, int]:
        """Copy a few blocks, and wait for them; how many, and how many of these runs are done with."""
        result = 0, 0

        def decide() -> None:
            nonlocal result
            result = self._placement.copy(nodes, Tier.DISK, STEP_BLOCKS)  # type: ignore[arg-type]

        self._moves.when_decided(decide)
        return result

    def _copied(self) -> int:
        return int(self._placement.stats()["copied"][TIER_NAMES[Tier.DISK]])

    def _refused(self) -> int:
        return self._admission.refused()["refused_by_write_budget"]
