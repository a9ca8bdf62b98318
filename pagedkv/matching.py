"""Matching: a prompt's cached prefix is owned, weighed and brought to the device."""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.placement import Placement
from pagedkv.cost_model import CostModel
from pagedkv.errors import OutOfBlocks
from pagedkv.hooks import Hooks
from pagedkv.moving import DISK, Conductor

NOTHING = np.empty(0, np.uint8)  # was found


class Matcher:
    """What a new sequence and a prefetch have in common. Any thread may call it.

    Parameters
    ----------
    placement : Placement
    conductor : Conductor
    costs : says which disk hits are worth their loading.
    block_size : tokens of a block.
    deadline_s : what has not come from disk, or not started from memory, by then is given up; None to wait.
    hooks : told of matches, promotions and prefetches.
    """

    def __init__(
        self,
        placement: Placement,
        conductor: Conductor,
        costs: CostModel,
        block_size: int,
        deadline_s: float | None,
        hooks: Hooks,
    ) -> None:
        self._placement, self._conductor, self._costs, self._hooks = placement, conductor, costs, hooks
        self._block_size, self.deadline_s = block_size, deadline_s
        self._counting = threading.Lock()
        self.declined_tokens = 0

    def acquire(self, prompt: NDArray[np.int32], root: int) -> tuple[int, NDArray[np.uint8], int]:
        """Own the part of the cached prefix that is worth having, at least one token short of the prompt.

        Waits (within the deadline) for runs that are promoted for others. What is not worth its loading stays where it
        is, and is counted in `declined_tokens`.

        Returns
        -------
        owner : int
            To be released.
        tiers : uint8 [n]
            Where each of its blocks was found.
        found : int
            Blocks that were found, with those that are not worth their loading.
        """
        if not self._hooks.all:
            return self._acquire(prompt, root)
        owner = -1
        try:
            with self._hooks.span("match", tokens=len(prompt)) as span:
                owner, tiers, found = self._acquire(prompt, root)
                span.set(blocks=len(tiers), cold_blocks=int(np.count_nonzero(tiers)))
        except BaseException:
            if owner >= 0:
                self._placement.release(owner)
            raise
        return owner, tiers, found

    def _acquire(self, prompt: NDArray[np.int32], root: int) -> tuple[int, NDArray[np.uint8], int]:
        placement = self._placement
        limit = max(len(prompt) - 1, 0) // self._block_size
        until = None if self.deadline_s is None else time.monotonic() + self.deadline_s
        while True:
            owner, found = placement.acquire(prompt, root, limit, request=False)  # it is none before it has a row
            try:
                if placement.blocked_by(owner) < 0 or (until is not None and time.monotonic() >= until):
                    return owner, self._worth_having(owner) if found else NOTHING, found
            except BaseException:
                placement.release(owner)
                raise
            placement.release(owner)
            self._conductor.run_moves(self.deadline_s)

    def promote(self, owner: int) -> int:
        """Bring what `acquire` owned to the device; its whole blocks there in the end, from the front.

        Raises
        ------
        OutOfBlocks
            The device has no room for them. The owner keeps its path as it is.
        """
        if not self._hooks.all:
            return self._conductor.promote(owner, self.deadline_s)
        with self._hooks.span("promote") as span:
            kept = self._conductor.promote(owner, self.deadline_s)
            span.set(blocks=kept)
        return kept

    def prefetch(self, prompt: NDArray[np.int32], root: int) -> int:
        """Bring the cached prefix to the device and let go of it; its tokens there, 0 where there is no room."""
        with self._hooks.span("prefetch", tokens=len(prompt)) as span:
            owner, _, _ = self.acquire(prompt, root)
            try:
                tokens = self.promote(owner) * self._block_size
            except OutOfBlocks:
                tokens = 0
            finally:
                self._placement.release(owner)
            span.set(hit_tokens=tokens)
        return tokens

    def _worth_having(self, owner: int) -> NDArray[np.uint8]:
        tiers = self._placement.tiers_of(owner)
        worth = self._costs.worth_loading(tiers, DISK)
        if worth < len(tiers):
            kept = self._placement.shorten(owner, worth)
            with self._counting:
                self.declined_tokens += (len(tiers) - kept) * self._block_size
            tiers = tiers[:kept]
        return tiers
