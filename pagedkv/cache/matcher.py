"""Matching: a prompt's cached prefix is owned, weighed and brought to the device."""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.held import Hold, own
from pagedkv._core.placement import Placement
from pagedkv._core.tier import Tier
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.moves import Moves
from pagedkv.errors import OutOfBlocks
from pagedkv.observe.hooks import Hooks


class Matcher:
    """What a new sequence and a prefetch have in common. Any thread may call it.

    Parameters
    ----------
    placement : Placement
    moves : Moves
    costs : says which disk hits are worth their loading.
    block_size : tokens of a block.
    deadline_s : what has not come from disk, or not started from memory, by then is given up; None to wait.
    hooks : told of matches, promotions and prefetches.
    """

    def __init__(
        self,
        placement: Placement,
        moves: Moves,
        costs: CostModel,
        block_size: int,
        deadline_s: float | None,
        hooks: Hooks,
    ) -> None:
        self._placement, self._moves, self._costs, self._hooks = placement, moves, costs, hooks
        self._block_size, self.deadline_s = block_size, deadline_s
        self._counting = threading.Lock()
        self.declined_tokens = 0

    def acquire(self, prompt: NDArray[np.int32], root: int) -> tuple[Hold, NDArray[np.uint8] | None, int]:
        """Own the part of the cached prefix that is worth loading.

        It is at least one token shorter than the prompt.

        Waits (within the deadline) for runs that are promoted for others. What is not worth its loading stays where it
        is, and is counted in `declined_tokens`.

        Returns
        -------
        held : Hold
            Of that part, to be released.
        tiers : uint8 [n], or None
            Where each of its blocks was found; None where all of them are on the device, and stay there while it is
            held.
        found : int
            Blocks that were found, with those that are not worth their loading.
        """
        if not self._hooks.all:
            return self._acquire(prompt, root)
        held = None
        try:
            with self._hooks.span("match", tokens=len(prompt)) as span:
                held, tiers, found = self._acquire(prompt, root)
                span.set(blocks=held.num_blocks if tiers is None else len(tiers), cold_blocks=_num_cold(tiers))
        except BaseException:  # it would let go by itself, but only once the traceback is gone
            if held is not None:
                held.release()
            raise
        return held, tiers, found

    def _acquire(self, prompt: NDArray[np.int32], root: int) -> tuple[Hold, NDArray[np.uint8] | None, int]:
        placement, moves = self._placement, self._moves
        limit = max(len(prompt) - 1, 0) // self._block_size
        until = None if self.deadline_s is None else time.monotonic() + self.deadline_s
        while True:
            seen = moves.num_ended
            held = own(placement, prompt, root, limit)  # it is no request before it has a row
            try:
                left_s = None if until is None else until - time.monotonic()
                if held.blocked < 0 or (left_s is not None and left_s <= 0):
                    return held, self._worth_having(held.handle) if held.num_cold else None, held.num_blocks
            except BaseException:
                held.release()
                raise
            held.release()
            moves.wait_since(seen, left_s)

    def promote(self, owner: int) -> int:
        """Bring what `acquire` owned to the device.

        Its whole blocks there in the end, from the front.

        Raises
        ------
        OutOfBlocks
            The device has no room for them. The owner keeps its path as it is.
        """
        if not self._hooks.all:
            return self._moves.promote(owner, self.deadline_s)
        with self._hooks.span("promote") as span:
            kept = self._moves.promote(owner, self.deadline_s)
            span.set(blocks=kept)
        return kept

    def check_may_wait(self) -> None:
        """Raise InvalidArgument where the caller must not wait for moves."""
        self._moves.check_may_wait()

    def prefetch(self, prompt: NDArray[np.int32], root: int) -> int:
        """Bring the cached prefix to the device and let go of it.

        Its tokens there, 0 where there is no room.
        """
        with self._hooks.span("prefetch", tokens=len(prompt)) as span:
            self._moves.begin_prefetch()
            try:
                tokens = self._prefetch(prompt, root)
            finally:
                self._moves.end_prefetch()
            span.set(hit_tokens=tokens)
        return tokens

    def _prefetch(self, prompt: NDArray[np.int32], root: int) -> int:
        held, tiers, _ = self.acquire(prompt, root)
        with held:
            if tiers is None:
                return held.num_blocks * self._block_size
            if _num_cold(tiers) > self._room():  # what is claimed is looked at when it is decided
                return 0
            try:
                return self.promote(held.handle) * self._block_size
            except OutOfBlocks:
                return 0

    def _room(self) -> int:
        """Device blocks that are free or can be made free."""
        device = self._placement.pools[0]
        assert device is not None
        return device.num_obtainable

    def _worth_having(self, owner: int) -> NDArray[np.uint8]:
        tiers = self._placement.tiers_of(owner)
        worth = self._costs.worth_loading(tiers, Tier.DISK)
        if worth < len(tiers):
            kept = self._placement.shorten(owner, worth)
            with self._counting:
                self.declined_tokens += (len(tiers) - kept) * self._block_size
            tiers = tiers[:kept]
        return tiers


def _num_cold(tiers: NDArray[np.uint8] | None) -> int:
    return 0 if tiers is None else int(np.count_nonzero(tiers))
