"""The conductor's hands: runs the core's Moves through the mover until there is room, or everything else is held."""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.placement import Placement
from pagedkv.errors import PagedKVError
from pagedkv.tiers import Mover


class Conductor:
    """Takes Moves from a Placement, runs them, and reports them back; any thread may call it.

    A thread takes whatever moves are decided, its own or another's; who finds none waits for those in flight.
    """

    def __init__(self, placement: Placement, mover: Mover) -> None:
        self.placement, self._mover = placement, mover
        self._finished = threading.Condition()
        self.uses_ttl = False  # whether somebody gave a time to live
        self._rounds = 0  # completions so far: a waiter compares, so no wake-up is lost

    def run_moves(self, deadline_s: float | None = None) -> bool:
        """Run the moves that are decided, or wait for some that run elsewhere. False if there are neither.

        Parameters
        ----------
        deadline_s : float, optional
            Seconds from now; promotions that have not started by then count as failed. Demotions have no
            deadline: a late one would lose its block for nothing.
        """
        with self._finished:
            rounds = self._rounds
        moves = self.placement.take_moves()
        if len(moves):
            upward = moves["dst_tier"] < moves["src_tier"]
            for part, limit in ((moves[~upward], None), (moves[upward], deadline_s)):
                if len(part):
                    self._run(part, limit)
            return True
        if self.placement.num_in_flight == 0:
            with self._finished:
                return self._rounds != rounds
        with self._finished:
            self._finished.wait_for(lambda: self._rounds != rounds, timeout=1.0)
        return True

    def drain(self) -> None:
        """Run what is decided until nothing is under way."""
        while self.run_moves():
            pass

    def make_room(self, num_blocks: int, tier: int = 0) -> None:
        """Return once `tier` has `num_blocks` free blocks, demoting and dropping as the policy says.

        Raises
        ------
        OutOfBlocks
            Everything else is held.
        """
        self.expire()
        while self.placement.reserve(num_blocks, tier):
            if not self.run_moves():
                if not self.placement.reserve(num_blocks, tier):
                    return
                raise self.placement.out_of_blocks(num_blocks, tier)

    def expire(self) -> None:
        """Let times to live end that are over."""
        if self.uses_ttl:
            self.placement.expire(time.monotonic_ns())

    def promote(self, owner: int, deadline_s: float | None = None) -> int:
        """Bring an owned path to the device; whole blocks of it that are there in the end, from the front.

        Raises
        ------
        OutOfBlocks
            The device has no room for them. The owner keeps its path as it is.
        """
        placement = self.placement
        until = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            cold = int(np.count_nonzero(placement.tiers_of(owner)))
            if not cold:
                break
            self.make_room(cold)
            try:
                placement.promote(owner)
            except PagedKVError:
                if placement.reserve(cold) or placement.num_in_flight:  # another thread took the room: make it again
                    continue
                raise
            break
        while placement.is_moving(owner):
            left = None if until is None else max(0.0, until - time.monotonic())
            self.run_moves(left)
        return placement.settle(owner)

    def _run(self, moves: NDArray[np.void], deadline_s: float | None) -> None:
        try:
            ticket = self._mover.submit(moves, deadline_s=deadline_s)
        except BaseException:
            transfers = np.unique(moves["transfer"])
            self._complete(transfers, np.zeros(len(transfers), np.bool_))
            raise
        self._complete(*ticket.results())

    def _complete(self, transfers: NDArray[np.int64], ok: NDArray[np.bool_]) -> None:
        self.placement.complete(transfers, ok)
        with self._finished:
            self._rounds += 1
            self._finished.notify_all()
