"""The conductor's hands: runs the core's Moves through the mover until there is room, or everything else is held."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.block_pool import BlockPool
from pagedkv._core.events import TIER_NAMES
from pagedkv._core.placement import Placement
from pagedkv.admission import Admission
from pagedkv.cost_model import CostModel
from pagedkv.errors import OutOfBlocks
from pagedkv.hooks import Hooks
from pagedkv.scrub import Scrub
from pagedkv.tiers import Mover, Ticket

DEVICE, HOST, DISK = 0, 1, 2
ATTEMPTS = 1000  # at room that others keep taking, before a promotion is given up
FLUSH_BLOCKS = 64  # demoted before the disk's health is looked at again


class Conductor:
    """Takes Moves from a Placement, runs them, and reports them back; any thread may call it.

    A thread takes whatever moves are decided, its own or another's; who finds none waits for those in flight.

    Parameters
    ----------
    placement : Placement
    mover : Mover
    admission : asked about each demotion to the disk.
    costs : told how long loads take.
    scrub : told what promotions leave on the device.
    hooks : told when room is made and blocks are moved.
    clock : seconds; what ages and times to live go by. None: the system's monotonic clock.
    """

    def __init__(
        self,
        placement: Placement,
        mover: Mover,
        admission: Admission,
        costs: CostModel,
        scrub: Scrub,
        hooks: Hooks,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.placement, self._mover, self._hooks, self._clock = placement, mover, hooks, clock
        self._admission, self._costs, self._scrub = admission, costs, scrub
        self._finished = threading.Condition()
        self.uses_time = placement.policy == "hazard"  # or somebody gave a time to live
        self._rounds = 0  # completions so far: a waiter compares, so no wake-up is lost

    def run_moves(self, deadline_s: float | None = None) -> bool:
        """Run the moves that are decided, or wait for some that run elsewhere. False if there are neither.

        Parameters
        ----------
        deadline_s : float, optional
            Seconds from now; promotions that have not arrived from the disk by then, or not started from memory, are
            given up, and keep their colder copies. Demotions have no deadline: a late one would lose its block for
            nothing. Either is given up where the disk hangs.
        """
        with self._finished:
            rounds = self._rounds
        return self._carry_out(self.placement.take_moves(), deadline_s) or self._wait_for_others(rounds)

    def _carry_out(self, moves: NDArray[np.void], deadline_s: float | None = None) -> bool:
        upward = moves["dst_tier"] < moves["src_tier"]
        try:
            self._run("demote", moves[~upward], self._demote)
        finally:
            self._run("promote", moves[upward], lambda part: self._promote(part, deadline_s))
        return len(moves) > 0

    def _run(self, direction: str, moves: NDArray[np.void], carry_out: Callable[[NDArray[np.void]], int]) -> None:
        if len(moves):
            num_bytes = len(moves) * self._mover.block_bytes
            with self._hooks.span("moves", moves, direction=direction, blocks=len(moves), bytes=num_bytes) as span:
                span.set(moved_blocks=carry_out(moves))

    def _wait_for_others(self, rounds: int) -> bool:
        """Wait for the next completion after `rounds`; False if there can be none."""
        if self.placement.num_in_flight == 0:
            with self._finished:
                return self._rounds != rounds
        with self._finished:
            self._finished.wait_for(lambda: self._rounds != rounds, timeout=1.0)
        return True

    def run_decided(self) -> None:
        """Run the moves that are decided, and wait for no others."""
        self._carry_out(self.placement.take_moves())

    def drain_namespace(self, root: int) -> None:
        """Return once nothing of a namespace is under way."""
        while self.placement.moving_in(root):
            self.run_moves()

    def make_room(self, num_blocks: int, tier: int = DEVICE) -> None:
        """Return once `tier` has `num_blocks` free blocks, demoting and dropping as the policy says.

        Raises
        ------
        OutOfBlocks
            Everything else is held.
        """
        self.expire()
        pool = self.placement.pools[tier]
        assert pool is not None
        with self._hooks.span("make_room", blocks=num_blocks, tier=TIER_NAMES[tier]):
            while True:
                goal = min(num_blocks, pool.num_available + self._room_below(tier))
                if not self._has_made_room(goal, tier):
                    raise self.placement.out_of_blocks(num_blocks, tier)
                if goal == num_blocks:
                    return

    def _has_made_room(self, num_blocks: int, tier: int) -> bool:
        """Decide what goes and carry that out, until there is room; False if none can be made."""
        while True:
            with self._finished:
                rounds = self._rounds
            missing = self.placement.reserve(num_blocks, tier)
            moves = self.placement.take_moves()  # at once: what others decide is theirs to wait for
            progressed = self._carry_out(moves)
            if not missing:
                return True
            if not progressed and not self._wait_for_others(rounds):
                return not self.placement.reserve(num_blocks, tier)

    def _room_below(self, tier: int) -> int:
        """Blocks that the tier below can take at once, at least 1: what is demoted beyond that would be dropped."""
        for pool in self.placement.pools[tier + 1 :]:
            if pool is not None:
                counts = pool.counts()
                return max(1, counts["available"] + counts["cached"])
        return 2**31

    def now_ns(self) -> int:
        """The time in nanoseconds, by the cache's clock."""
        return time.monotonic_ns() if self._clock is None else max(0, int(self._clock() * 1e9))

    def expire(self) -> None:
        """Let times to live end that are over, and tell the policy what time it is."""
        if self.uses_time:
            self.placement.expire(self.now_ns())

    def write_back(self, is_healthy: Callable[[], bool]) -> None:
        """Demote what nobody holds, tier by tier, until all of it is on the disk, as pressure would.

        Parameters
        ----------
        is_healthy : asked before every few blocks; once it is False the rest stays where it is, or it would be lost.
        """
        self.expire()
        while is_healthy() and any(self._push_down(tier) for tier in (HOST, DEVICE)):
            pass

    def _push_down(self, tier: int) -> bool:
        """Demote a few blocks of a tier, the coldest; whether it holds fewer now."""
        pool = self.placement.pools[tier]
        if pool is None or not (cached := pool.counts()["cached"]):
            return False
        wanted = pool.num_available + min(cached, FLUSH_BLOCKS, self._room_below(tier))
        while self.placement.reserve(wanted, tier) and self.run_moves():
            pass
        return pool.counts()["cached"] < cached

    def promote(self, owner: int, deadline_s: float | None = None) -> int:
        """Bring an owned path to the device; whole blocks of it that are there in the end, from the front.

        Raises
        ------
        OutOfBlocks
            The device has no room for them. The owner keeps its path as it is.
        """
        placement = self.placement
        until = None if deadline_s is None else time.monotonic() + deadline_s
        for attempt in itertools.count(1):
            cold = int(np.count_nonzero(placement.tiers_of(owner)))
            if not cold:
                break
            self.make_room(cold)
            try:
                placement.promote(owner)
            except OutOfBlocks:  # another thread took the room: make it again
                if attempt == ATTEMPTS:
                    raise
                continue
            moves = placement.take_moves()
            self._carry_out(moves, None if until is None else max(0.0, until - time.monotonic()))
            break
        while placement.is_moving(owner):
            self.run_moves()
        return placement.settle(owner)

    def _demote(self, moves: NDArray[np.void]) -> int:
        """Copy one tier down, or drop what admission refuses; blocks that arrived."""
        admitted = [part for part in _transfers(moves) if self._is_admitted(part)]
        if not admitted:
            return 0
        moves = np.concatenate(admitted)
        try:
            ticket = self._mover.submit(moves)
        except BaseException:
            self._give_up(moves)
            raise
        return self._complete(moves, ticket)

    def _is_admitted(self, transfer: NDArray[np.void]) -> bool:
        """Whether a demotion is carried out; one that is not is over, and its blocks are dropped."""
        if transfer["dst_tier"][0] != DISK:
            return True
        node = int(transfer["node"][0])
        depth, continued, matched = self.placement.prospects(node)
        if self._admission.admits(DISK, len(transfer), depth, continued, matched, node):
            return True
        self._give_up(transfer)
        return False

    def _promote(self, moves: NDArray[np.void], deadline_s: float | None) -> int:
        """A ticket for each tier, all under way at once, so that each tier's time is its own; blocks that arrived."""
        parts = {tier: moves[moves["src_tier"] == tier] for tier in np.unique(moves["src_tier"]).tolist()}
        tickets: dict[int, Ticket] = {}
        arrived = 0
        try:
            for tier, part in parts.items():
                tickets[tier] = self._mover.submit(part, deadline_s=deadline_s)
        except BaseException:
            self._give_up(moves[~np.isin(moves["src_tier"], list(tickets))])
            raise
        finally:
            for tier, ticket in tickets.items():
                arrived += self._complete(parts[tier], ticket)
                if ticket.results()[1].all():
                    self._costs.observe_load(tier, len(parts[tier]) * self._mover.block_bytes, ticket.seconds)
        return arrived

    def _complete(self, moves: NDArray[np.void], ticket: Ticket) -> int:
        """Report what a ticket has done; blocks that arrived."""
        transfers, ok = ticket.results()
        self._keep_left(moves, ticket)
        arrived = ok[np.searchsorted(transfers, moves["transfer"])]
        if not ok.all() or self._scrub.active:  # before anybody else may be given the blocks
            upward = moves["dst_tier"] == DEVICE
            self._scrub.spoilt(moves["dst_block"][upward & ~arrived])
            for part in _transfers(moves[upward & arrived]):
                self._scrub.holds(part["dst_block"], self.placement.root_of(int(part["node"][0])))
        _, decided = np.unique(moves["transfer"], return_index=True)
        order = np.argsort(decided)  # what was colder is colder in the next tier too
        self._report(transfers[order], ok[order], ticket.tried()[order])
        return int(np.count_nonzero(arrived))

    def _keep_left(self, moves: NDArray[np.void], ticket: Ticket) -> None:
        """What a call that was left may still write stays taken until it is back, whoever else lets go of it."""
        left = moves[ticket.left()]
        if not len(left):
            return
        for pool, blocks in self._destinations(left):
            pool.incref(blocks)

        def let_go(part: NDArray[np.intp]) -> None:
            self._scrub.spoilt(moves["dst_block"][part][moves["dst_tier"][part] == DEVICE])
            for pool, blocks in self._destinations(moves[part]):
                pool.free(blocks)
            self._wake()

        ticket.when_back(let_go)

    def _destinations(self, moves: NDArray[np.void]) -> Iterator[tuple[BlockPool, NDArray[np.int32]]]:
        for tier in np.unique(moves["dst_tier"]).tolist():
            pool = self.placement.pools[tier]
            assert pool is not None
            yield pool, np.ascontiguousarray(moves["dst_block"][moves["dst_tier"] == tier])

    def _give_up(self, moves: NDArray[np.void]) -> None:
        """Moves of which nothing was read or written are over."""
        transfers = np.unique(moves["transfer"])
        never = np.zeros(len(transfers), np.bool_)
        self._report(transfers, never, never)

    def _report(self, transfers: NDArray[np.int64], ok: NDArray[np.bool_], tried: NDArray[np.bool_]) -> None:
        self.placement.complete(transfers, ok, tried)
        self._wake()

    def _wake(self) -> None:
        """Whoever waits for room or for others looks again."""
        with self._finished:
            self._rounds += 1
            self._finished.notify_all()


def _transfers(moves: NDArray[np.void]) -> Iterator[NDArray[np.void]]:
    """Moves transfer by transfer, in their order; the moves of one stand together."""
    edges = np.flatnonzero(np.diff(moves["transfer"])) + 1
    if len(moves):
        for a, b in itertools.pairwise([0, *edges.tolist(), len(moves)]):
            yield moves[a:b]
