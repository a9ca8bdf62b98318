"""Makes room: has the core decide what moves, and waits until there is room.

Or until everything else is held.

It moves nothing. The dispatcher's thread (:mod:`pagedkv.cache.dispatcher`) carries out the core's decisions, whatever
becomes of the caller that asked for them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.dispatch import Dispatch
from pagedkv._core.placement import Placement
from pagedkv._core.tier import TIER_NAMES, Tier
from pagedkv.cache.dispatcher import Dispatcher
from pagedkv.cache.runtime import SYSTEM, Runtime
from pagedkv.cache.waits import Waits
from pagedkv.errors import OutOfBlocks
from pagedkv.observe.hooks import Hooks

ATTEMPTS = 1000  # at room that others keep taking, before a promotion is given up
FLUSH_BLOCKS = 64  # demoted before the disk's health is looked at again
Amount: TypeAlias = int | NDArray[np.int64]  # blocks; over groups of layers those of each, [num_groups]
AHEAD_SHARE = 64  # of the device is kept free for the steps to come, at most


class Claim:
    """Device blocks that a scheduler is about to use.

    Attributes
    ----------
    blocks : of its last plan, 0 once that is over.
    ahead : of the steps after it, while it has loads under way beside them: those leave so many free.
    """

    __slots__ = ("__weakref__", "_claiming", "ahead", "blocks")

    def __init__(self, claiming: threading.Lock) -> None:
        self._claiming, self.blocks, self.ahead = claiming, 0, 0

    def take(self, blocks: int) -> None:
        """So many are about to be used: prefetches that have not been decided yet leave them."""
        with self._claiming:
            self.blocks = blocks


class Moves(Waits):
    """Has the core make room and promote, and waits for it.

    Any thread may call it, but for the dispatcher's own, which would wait for itself.

    Parameters
    ----------
    placement : Placement
    dispatch : Dispatch of `placement`
    dispatcher : carries out the moves.
    hooks : told when room is made.
    clock : seconds; what ages and times to live go by. None: the runtime's clock.
    runtime : whose clock deadlines go by, and how callers wait.
    """

    def __init__(
        self,
        placement: Placement,
        dispatch: Dispatch,
        dispatcher: Dispatcher,
        hooks: Hooks,
        clock: Callable[[], float] | None = None,
        runtime: Runtime = SYSTEM,
    ) -> None:
        super().__init__(placement, dispatch, dispatcher, hooks, runtime)
        self._clock = clock
        self.uses_time = placement.tells_time  # or a sequence was given a time to live
        self._claims: tuple[weakref.ref[Claim], ...] = ()
        self._claiming = threading.Lock()
        device, *colder = placement.pools
        assert device is not None
        self._by_group = placement.num_groups > 1
        self._low = 0  # device blocks that steps of late have taken
        self._most_ahead = device.max_blocks // AHEAD_SHARE if any(pool is not None for pool in colder) else 0

    # ---- what schedulers are about to use

    def claim(self) -> Claim:
        """A scheduler's own: how many device blocks it is about to use. It ends with the object."""
        claim = Claim(self._claiming)
        with self._claiming:
            self._claims = (*(known for known in self._claims if known() is not None), weakref.ref(claim))
        return claim

    @property
    def spoken_for(self) -> int:
        """Device blocks that schedulers are about to use: prefetches leave so many."""
        return sum(claim.blocks for claim in (known() for known in self._claims) if claim is not None)

    @property
    def ahead(self) -> int:
        """Device blocks that the steps of schedulers with loads beside them are about to take."""
        return sum(claim.ahead for claim in (known() for known in self._claims) if claim is not None)

    # ---- room

    def make_room(self, amount: Amount, tier: int = Tier.DEVICE, *, awaits_reads: bool = True) -> None:
        """Make so many free blocks in `tier`.

        Demotes and drops as the policy says, and returns once they are free. `awaits_reads`: whether to wait for
        promotions, too, which may take long, and which schedulers carry out beside this call.

        Raises
        ------
        OutOfBlocks
            Everything else is held.
        """
        self.expire()
        with self._hooks.span("make_room", blocks=_total(amount), tier=TIER_NAMES[tier]):
            while True:
                goal = self._goal(amount, tier)
                if not self._has_made_room(goal, tier, awaits_reads):
                    raise self._out_of(amount, tier)
                if goal is amount:  # all of it, not a part
                    break
            self._hear()

    def make_room_ahead(self, num_taken: int) -> None:
        """Have room made for later steps, without waiting.

        A step has just taken so many device blocks.

        The low watermark is what recent steps have taken, at most a 64th of the device. Below it the dispatcher demotes
        the policy's next victims, up to twice the watermark, while the model computes: a decode loop over a full cache
        does not wait for room.
        """
        low = self._low = min(max(num_taken, self._low - (self._low >> 3) - 1, 0), self._most_ahead)
        low = max(low, self.ahead)  # beside loads, which take all free blocks
        pool = self.placement.pools[Tier.DEVICE]
        assert pool is not None
        if low and self._dispatcher.has_thread and pool.num_available < low:
            below = self._room_below(Tier.DEVICE)
            if below:
                self._decides()
                self.placement.reserve(min(2 * low, pool.num_available + below), Tier.DEVICE)

    def _has_made_room(self, amount: Amount, tier: int, awaits_reads: bool = True) -> bool:
        """Decide what goes and wait for that, until there is room; False if none can be made."""
        self._decides()
        while True:
            seen = self._dispatch.num_announced
            if self._reserves(amount, tier):
                return True
            if not (awaits_reads or self._dispatch.num_coming) or not self.wait_since(seen):
                return self._reserves(amount, tier)

    def _reserves(self, amount: Amount, tier: int) -> bool:
        """Have the core make room; whether it is there."""
        if isinstance(amount, int):
            return not self.placement.reserve(amount, tier)
        return self.placement.reserve_pages(amount, tier)

    def _goal(self, amount: Amount, tier: int) -> Amount:
        """How much room to ask for at once.

        All of it, or as much as the tier below can take. Over groups of layers the core itself sees to that.
        """
        if isinstance(amount, int):
            pool = self.placement.pools[tier]
            assert pool is not None
            goal = pool.num_available + max(1, self._room_below(tier))
            if goal < amount:
                return goal
        return amount

    def _out_of(self, amount: Amount, tier: int = Tier.DEVICE) -> OutOfBlocks:
        if isinstance(amount, int):
            return self.placement.out_of_blocks(amount, tier)
        pool = self.placement.pools[tier]
        assert pool is not None
        assert pool.extents is not None
        each = np.array(pool.extents.per_extent)
        return self.placement.out_of_blocks(int((-(-amount // each)).sum() * each[0]), tier)

    def _room_below(self, tier: int) -> int:
        """Blocks that the tier below can take at once; more would be dropped from it."""
        for pool in self.placement.pools[tier + 1 :]:
            if pool is not None:
                return pool.num_obtainable
        return 2**31

    # ---- time

    def now_ns(self) -> int:
        """The time in nanoseconds, by the cache's clock."""
        return max(0, int((self.seconds() if self._clock is None else self._clock()) * 1e9))

    def expire(self) -> None:
        """Let times to live end that are over, and tell the policy what time it is."""
        if self.uses_time:
            self.placement.expire(self.now_ns())

    # ---- up and down

    def write_back(self, is_healthy: Callable[[], bool]) -> None:
        """Demote everything cached and not held to the disk, tier by tier, as pressure would.

        Parameters
        ----------
        is_healthy : asked before every few blocks; once it is False the rest stays where it is, or it would be lost.
        """
        self.expire()
        while is_healthy() and any(self._push_down(tier) for tier in (Tier.HOST, Tier.DEVICE)):
            pass

    def _push_down(self, tier: int) -> bool:
        """Demote a few blocks of a tier, the coldest; whether it holds fewer now."""
        pool = self.placement.pools[tier]
        if pool is None or not (cached := pool.counts()["cached"]):
            return False
        self._has_made_room(pool.num_available + min(cached, FLUSH_BLOCKS, max(1, self._room_below(tier))), tier)
        self._hear()
        return pool.counts()["cached"] < cached

    def _decide_promotion(self, owner: int, until: int, cold: Amount) -> None:
        """Have the core promote a path.

        A prefetch does so only beside what schedulers have claimed by then.
        """
        if threading.get_ident() not in self._prefetching:
            self.placement.promote(owner, until)
            return
        pool = self.placement.pools[Tier.DEVICE]
        assert pool is not None
        with self._claiming:  # a scheduler claims before it looks at the room: it sees this, or this sees its claim
            wanted = _beside(cold, self.spoken_for)
            fits = wanted <= pool.num_obtainable if isinstance(wanted, int) else self.placement.could_have(wanted)
            if fits:
                self.placement.promote(owner, until)

    def lift(self, owner: int, until_ns: int = 0) -> None:
        """Make room for the blocks of an owned path below the device, and promote them.

        Parameters
        ----------
        owner : int
        until_ns : int
            Of the monotonic clock: promotions that have not arrived from the disk by then, or not started from memory,
            are given up. 0: none is.

        Raises
        ------
        OutOfBlocks
            The device has no room for them. The owner keeps its path as it is.
        """
        for attempt in itertools.count(1):
            cold = self._cold(owner)
            if not _total(cold):
                return
            try:
                self.make_room(cold)
            except OutOfBlocks:
                if _total(self._cold(owner)) >= _total(cold):
                    raise
                continue  # another thread has brought some of it up meanwhile: less is needed
            self._decides()
            try:
                self._decide_promotion(owner, until_ns, cold)
                return
            except OutOfBlocks:  # another thread took the room: make it again
                if attempt == ATTEMPTS:
                    raise

    def try_lift(self, owner: int, until_ns: int = 0) -> bool:
        """As :meth:`lift`, without waiting; whether the promotions are decided.

        False: room is being made. Ask again when a move is over. Beside schedulers it leaves room for their next steps,
        where there is any to be had.

        Raises
        ------
        OutOfBlocks, ClosedError, InvalidArgument
            As :meth:`lift` and :meth:`wait_since`.
        """
        self.check_may_wait()
        self.expire()
        pool = self.placement.pools[Tier.DEVICE]
        assert pool is not None
        spare = max(self.ahead, self.spoken_for)
        for _ in range(ATTEMPTS):
            seen = self._dispatch.num_announced
            cold = self._cold(owner)
            if not _total(cold):
                return True
            first = cold if isinstance(cold, int) else int(cold[0])
            wanted = _beside(cold, max(0, min(spare, pool.num_obtainable - first)))
            goal = self._goal(wanted, Tier.DEVICE)
            self._decides()
            if self._reserves(goal, Tier.DEVICE):
                if goal is not wanted:
                    continue  # that much was there at once: now there may be more below
                try:
                    self._decide_promotion(owner, until_ns, cold)
                    return True
                except OutOfBlocks:  # another thread took the room: make it again
                    continue
            if not self._dispatcher.has_thread:
                self._dispatcher.pump()
            if self._dispatch.num_announced != seen:
                continue
            if not self._is_idle(seen):
                return False
            if not spare or pool.num_available < first:
                raise self._out_of(cold)
            spare = 0
        return False

    def _cold(self, owner: int) -> Amount:
        """Blocks of an owned path that have to come to the device."""
        if self._by_group:
            return self.placement.cold_pages(owner)
        return int(np.count_nonzero(self.placement.tiers_of(owner)))


def _total(amount: Amount) -> int:
    """Blocks, or pages of all groups."""
    return amount if isinstance(amount, int) else int(amount.sum())


def _beside(amount: Amount, blocks: int) -> Amount:
    """So many blocks more; over groups of layers, of the group that sees everything."""
    if isinstance(amount, int):
        return amount + blocks
    more = amount.copy()
    more[0] += blocks
    return more
