"""The conductor's hands: runs the core's Moves through the mover until there is room, or everything else is held."""

from __future__ import annotations

import threading
import time

import numpy as np

from pagedkv._core.placement import Placement
from pagedkv.errors import PagedKVError
from pagedkv.tiers import Mover, Ticket


class Conductor:
    """Takes Moves from a Placement, runs them, and reports them back; any thread may call it.

    A thread takes whatever moves are decided, its own or another's; who finds none waits for those in flight.
    """

    def __init__(self, placement: Placement, mover: Mover) -> None:
        self.placement, self._mover = placement, mover
        self._finished = threading.Condition()
        self._rounds = 0  # completions so far: a waiter compares, so no wake-up is lost

    def run_moves(self, deadline_s: float | None = None) -> bool:
        """Run the moves that are decided, or wait for some that run elsewhere. False if there are neither.

        Parameters
        ----------
        deadline_s : float, optional
            Seconds from now; moves that have not started by then count as failed.
        """
        with self._finished:
            rounds = self._rounds
        ticket = self.start_moves(deadline_s)
        if ticket is not None:
            self.finish(ticket)
            return True
        if self.placement.num_in_flight == 0:
            with self._finished:
                return self._rounds != rounds
        with self._finished:
            self._finished.wait_for(lambda: self._rounds != rounds, timeout=1.0)
        return True

    def start_moves(self, deadline_s: float | None = None) -> Ticket | None:
        """Hand the decided moves to the mover; None if there are none. Whoever starts them must `finish` them."""
        moves = self.placement.take_moves()
        if not len(moves):
            return None
        try:
            return self._mover.submit(moves, deadline_s=deadline_s)
        except BaseException:
            self._complete(np.unique(moves["transfer"]), np.zeros(len(np.unique(moves["transfer"])), np.bool_))
            raise

    def finish(self, ticket: Ticket) -> None:
        """Wait for a ticket and tell the core how its transfers ended."""
        self._complete(*ticket.results())

    def make_room(self, num_blocks: int, tier: int = 0, deadline_s: float | None = None) -> None:
        """Return once `tier` has `num_blocks` free blocks, demoting and dropping as the policy says.

        Raises
        ------
        OutOfBlocks
            Everything else is held.
        """
        while self.placement.reserve(num_blocks, tier):
            if not self.run_moves(deadline_s):
                if not self.placement.reserve(num_blocks, tier):
                    return
                raise self.placement.out_of_blocks(num_blocks, tier)

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
            self.make_room(cold, deadline_s=deadline_s)
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

    def _complete(self, transfers: np.ndarray, ok: np.ndarray) -> None:
        self.placement.complete(transfers, ok)
        with self._finished:
            self._rounds += 1
            self._finished.notify_all()
