"""Makes room: has the core decide what moves, and waits until there is room.

Or until everything else is held.

It moves nothing. The dispatcher's thread (:mod:`pagedkv.cache.dispatcher`) carries out what the core decides, whatever
becomes of the caller that asked for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np

from pagedkv._core.dispatch import CLOSED, ENDED, NOT_YET, Dispatch
from pagedkv._core.placement import Placement
from pagedkv._core.tier import TIER_NAMES, Tier
from pagedkv.cache.dispatcher import Dispatcher
from pagedkv.errors import ClosedError, InvalidArgument, OutOfBlocks
from pagedkv.observe.hooks import Hooks

ATTEMPTS = 1000  # at room that others keep taking, before a promotion is given up
FLUSH_BLOCKS = 64  # demoted before the disk's health is looked at again
AHEAD_SHARE = 64  # of the device is kept free for the steps to come, at most
SLICE_S = 0.05  # a caller that waits runs Python this often, which is when a signal's exception can arrive


class Claim:
    """Device blocks that a scheduler is about to use.

    Attributes
    ----------
    blocks : of its last plan, 0 once that is over.
    """

    __slots__ = ("__weakref__", "_claiming", "blocks")

    def __init__(self, claiming: threading.Lock) -> None:
        self._claiming, self.blocks = claiming, 0

    def take(self, blocks: int) -> None:
        """So many are about to be used: prefetches that have not been decided yet leave them."""
        with self._claiming:
            self.blocks = blocks


class Moves:
    """Has the core make room and promote, and waits for it.

    Any thread may call it, but for the dispatcher's own, which would wait for itself.

    Parameters
    ----------
    placement : Placement
    dispatch : Dispatch of `placement`
    dispatcher : carries out what is decided.
    hooks : told when room is made.
    clock : seconds; what ages and times to live go by. None: the system's monotonic clock.
    """

    def __init__(
        self,
        placement: Placement,
        dispatch: Dispatch,
        dispatcher: Dispatcher,
        hooks: Hooks,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.placement, self._dispatch, self._dispatcher = placement, dispatch, dispatcher
        self._hooks, self._clock = hooks, clock
        self.uses_time = placement.tells_time  # or a sequence was given a time to live
        self._prefetching: set[int] = set()  # threads with a prefetch under way
        self._claims: tuple[weakref.ref[Claim], ...] = ()
        self._claiming = threading.Lock()
        device, *colder = placement.pools
        assert device is not None
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

    # ---- waiting

    def begin_prefetch(self) -> None:
        """This thread's next moves are a prefetch's, which holds blocks until it is over.

        Others can wait for that.
        """
        self._prefetching.add(threading.get_ident())
        self._dispatch.hold_up(1)

    def end_prefetch(self) -> None:
        """This thread's prefetch is over and holds nothing any more."""
        self._dispatch.hold_up(-1)  # first, as it needs no memory: others may wait for it
        self._prefetching.discard(threading.get_ident())

    def run_moves(self) -> bool:
        """Wait until a move under way, or another thread's prefetch, is over.

        False if there is none.

        Raises
        ------
        ClosedError, InvalidArgument
            The cache was closed meanwhile; or the caller is a hook of ``moves``.
        """
        return self.wait_since(self.num_ended)

    @property
    def num_ended(self) -> int:
        """Moves that are over so far, as :meth:`wait_since` counts them."""
        return self._dispatch.num_announced

    def wait_since(self, seen: int, timeout_s: float | None = None) -> bool:
        """Wait until a move or a prefetch is over; False if none is decided or under way.

        What a prefetch holds is about to be let go of, so its end counts as that of a move. Prefetches do not wait for
        each other's ends.

        Parameters
        ----------
        seen : int
            `num_ended` of before the caller looked whether it has to wait: moves that are over since then count.
        timeout_s : float, optional
            True after so many seconds all the same.

        Raises
        ------
        ClosedError, InvalidArgument
            As :meth:`run_moves`.
        """
        dispatcher, wait = self._dispatcher, self._dispatch.wait
        self.check_may_wait()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        others = threading.get_ident() not in self._prefetching
        if not dispatcher.has_thread:
            dispatcher.pump()
        while (said := wait(seen, SLICE_S, others)) == NOT_YET:
            if until is not None and time.monotonic() >= until:
                return True
            if not dispatcher.has_thread:  # another caller was interrupted with moves of this one
                dispatcher.pump()
        if dispatcher.interrupts:
            with contextlib.suppress(IndexError):  # another caller was quicker
                raise dispatcher.interrupts.popleft()
        if said == CLOSED:
            self._dispatch.close()  # what this call had decided after the first close is over, too
            raise ClosedError("this cache was closed while the call waited for moves between its tiers")
        return said == ENDED

    def check_may_wait(self) -> None:
        """Raise where the caller must not wait for moves.

        Raises
        ------
        InvalidArgument
            It is the dispatcher's thread.
        """
        if self._dispatcher.is_this_thread():
            raise InvalidArgument(
                "a hook of a `moves` span, a clock or a log handler was called by the thread that carries moves out, "
                "so it cannot do what waits for moves: do that in another span's hook, or in a thread of your own"
            )

    def _hear(self) -> None:
        """Let the hooks be told of moves that are over before the caller goes on."""
        dispatch = self._dispatch
        if self._hooks.all and not self._dispatcher.is_this_thread():
            while dispatch.is_telling():
                dispatch.wait(dispatch.num_announced, SLICE_S)

    def _decides(self) -> None:
        """The caller is about to have the core decide: hooks are told of the moves in its context."""
        if self._hooks.all:
            self._dispatcher.context = contextvars.copy_context()

    def when_decided(self, decide: Callable[[], object]) -> None:
        """Have something decided, and wait until the moves that it decided are over.

        Raises
        ------
        InvalidArgument
            The caller must not wait; nothing was decided.
        """
        self.check_may_wait()
        self._decides()
        first = self._dispatch.num_started
        decide()
        last = self._dispatch.num_started
        while first < last:
            seen = self._dispatch.num_announced
            if not self._dispatch.under_way(first, last):
                break
            self.wait_since(seen)
        self._hear()

    def drain_namespace(self, root: int) -> None:
        """Return once nothing of a namespace is under way."""
        while True:
            seen = self._dispatch.num_announced
            if not self.placement.moving_in(root):
                return
            self.wait_since(seen)

    # ---- room

    def make_room(self, num_blocks: int, tier: int = Tier.DEVICE) -> None:
        """Make `num_blocks` free blocks in `tier`.

        Demotes and drops as the policy says, and returns once they are free.

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
                goal = min(num_blocks, pool.num_available + max(1, self._room_below(tier)))
                if not self._has_made_room(goal, tier):
                    raise self.placement.out_of_blocks(num_blocks, tier)
                if goal == num_blocks:
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
        pool = self.placement.pools[Tier.DEVICE]
        assert pool is not None
        if low and self._dispatcher.has_thread and pool.num_available < low:
            below = self._room_below(Tier.DEVICE)
            if below:
                self._decides()
                self.placement.reserve(min(2 * low, pool.num_available + below), Tier.DEVICE)

    def _has_made_room(self, num_blocks: int, tier: int) -> bool:
        """Decide what goes and wait for that, until there is room; False if none can be made."""
        self._decides()
        while True:
            seen = self._dispatch.num_announced
            if not self.placement.reserve(num_blocks, tier):
                return True
            if not self.wait_since(seen):
                return not self.placement.reserve(num_blocks, tier)

    def _room_below(self, tier: int) -> int:
        """Blocks that the tier below can take at once; more would be dropped from it."""
        for pool in self.placement.pools[tier + 1 :]:
            if pool is not None:
                return pool.num_obtainable
        return 2**31

    # ---- time

    def now_ns(self) -> int:
        """The time in nanoseconds, by the cache's clock."""
        return time.monotonic_ns() if self._clock is None else max(0, int(self._clock() * 1e9))

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

    def _decide_promotion(self, owner: int, until: int, cold: int) -> None:
        """Have the core promote a path.

        A prefetch does so only beside what schedulers have claimed by then.
        """
        if threading.get_ident() not in self._prefetching:
            self.placement.promote(owner, until)
            return
        pool = self.placement.pools[Tier.DEVICE]
        assert pool is not None
        with self._claiming:  # a scheduler claims before it looks at the room: it sees this, or this sees its claim
            if cold + self.spoken_for <= pool.num_obtainable:
                self.placement.promote(owner, until)

    def promote(self, owner: int, deadline_s: float | None = None) -> int:
        """Bring an owned path to the device.

        Whole blocks of it that are there in the end, from the front.

        Parameters
        ----------
        owner : int
        deadline_s : float, optional
            Seconds from now, also for making room; promotions that have not arrived from the disk by then, or not
            started from memory, are given up.

        Raises
        ------
        OutOfBlocks
            The device has no room for them. The owner keeps its path as it is.
        """
        placement = self.placement
        until = 0 if deadline_s is None else time.monotonic_ns() + int(deadline_s * 1e9)
        for attempt in itertools.count(1):
            cold = int(np.count_nonzero(placement.tiers_of(owner)))
            if not cold:
                break
            try:
                self.make_room(cold)
            except OutOfBlocks:
                if int(np.count_nonzero(placement.tiers_of(owner))) >= cold:
                    raise
                continue  # another thread has brought some of it up meanwhile: less is needed
            self._decides()
            try:
                self._decide_promotion(owner, until, cold)
                break
            except OutOfBlocks:  # another thread took the room: make it again
                if attempt == ATTEMPTS:
                    raise
        while True:
            seen = self._dispatch.num_announced
            if not placement.is_moving(owner):
                break
            self.wait_since(seen)
        self._hear()
        return placement.settle(owner)
