"""Loads: prompts' cached prefixes on their way to the device, beside other work.

Stages, in order, never back:

    MATCHES     the prefix is owned as far as it goes; a run of it is being promoted for another owner
    NEEDS_ROOM  all of it is owned; device blocks for what lies in slower tiers are being made free
    MOVES       its promotions are decided, and are carried out by the dispatcher
    OVER        the blocks that have come are owned, the rest is let go of
    LET_GO      it holds nothing any more: a sequence took it over, it was cancelled, or there was no room for it

`Load.done` looks once and never waits for a move; `Load.wait` waits. Both take the same steps, so a sequence that is
opened at once (load and wait) and one that is loaded beside others come to the same blocks. remainder.py is beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.held import Hold, own
from pagedkv._core.placement import Placement
from pagedkv.cache.moves import Moves
from pagedkv.cache.remainder import Remainder
from pagedkv.cache.remote.asking import Asking
from pagedkv.cache.sequence import Sequence
from pagedkv.errors import InvalidArgument, OutOfBlocks
from pagedkv.observe.hooks import Hooks
from pagedkv.observe.latency import CacheLatencies, Histogram
from pagedkv.spec.sizes import number_of_seconds

MATCHES, NEEDS_ROOM, MOVES, OVER, LET_GO = range(5)
GRACE_S = 1.0  # after its deadline, before a load goes on without moves that nothing has given up


class Load:
    """A prompt's cached prefix on its way to the device.

    Made by :meth:`KVCache.load`; for one thread at a time.

    Nothing of the prefix is evicted while the load holds it. One that is cancelled or collected lets go of it.

    Attributes
    ----------
    found : int
        Blocks of the prompt that were cached, also those that are not worth their loading.
    tiers : uint8 [n], or None
        Where each block was found that is worth having; None where all are on the device, or as long as that is open.
    kept : int
        Blocks that are on the device once it is over, from the front.
    """

    __slots__ = (
        "awaits_reads",
        *("_asking", "_began_s", "_error", "_held", "_hooks", "_latencies", "_limit", "_moves", "_opens", "_placement"),
        *("_prompt", "_remainder", "_root", "_stage", "_trace", "_until", "_worth", "found", "kept", "tiers"),
    )

    def __init__(
        self,
        placement: Placement,
        moves: Moves,
        worth: Callable[[int], NDArray[np.uint8]],
        worth_partial: Callable[[int, int, int], bool],
        hooks: Hooks,
        latencies: CacheLatencies,
        prompt: NDArray[np.int32],
        root: int,
        limit: int,
        deadline_s: float | None,
        trace: object,
        asking: Asking | None = None,
    ) -> None:
        self._placement, self._moves, self._worth, self._hooks = placement, moves, worth, hooks
        self._latencies, self._trace = latencies, trace
        self._prompt, self._root, self._limit = prompt, root, limit
        self._began_s = moves.seconds()  # its match; then its promotions
        self._until = None if deadline_s is None else self._began_s + deadline_s
        self._stage = MATCHES
        self._held: Hold | None = None
        self._remainder = Remainder(placement, worth_partial)
        self._asking = asking
        self._error: OutOfBlocks | None = None
        self._opens: Callable[[Load], Sequence] | None = None
        self.awaits_reads = True  # for room for a part of a block; False: they may be those of its caller's other loads
        self.tiers: NDArray[np.uint8] | None = None
        self.found = self.kept = 0

    @property
    def num_cold(self) -> int:
        """Blocks that have to come from slower tiers, as far as that is known yet."""
        return (0 if self.tiers is None else int(np.count_nonzero(self.tiers))) + self.num_beside

    def done(self) -> bool:
        """Look once, without waiting for a move: whether it has arrived, failed or was let go of."""
        if self._stage < OVER:
            try:
                with self._hooks.on_behalf_of(self._trace):
                    self._look()
            except OutOfBlocks as problem:
                self._fail(problem)
        return self._stage >= OVER

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until it is over; the leading tokens of the prompt that are on the device then.

        Raises
        ------
        TimeoutError
            It takes longer than `timeout_s` seconds; it goes on.
        OutOfBlocks
            The device has no room for it; nothing is held then.
        WrongType, InvalidArgument
            Bad timeout; the caller is a hook of ``moves``, whose thread would have to carry it out; it was cancelled.
        ClosedError
        """
        if timeout_s is None:
            self.bring()
        else:
            until = self._moves.seconds() + number_of_seconds(timeout_s, "timeout_s")
            while True:
                seen = self._moves.num_ended
                if self.done():
                    break
                left_s = until - self._moves.seconds()
                if left_s <= 0:
                    raise TimeoutError(f"the load takes longer than {timeout_s} s")
                due_s = left_s if self._until is None else self._left_s()
                self._pause(seen, min(left_s, due_s if due_s > 0 else due_s + GRACE_S))
        self._check_there()
        return self.kept * self._placement.tree.block_size

    def sequence(self) -> Sequence:
        """Wait, and open the sequence of the prompt, which takes the prefix over. Once.

        Raises
        ------
        OutOfBlocks
            The device has no room for the prefix; nothing is held then.
        InvalidArgument, ClosedError
        """
        self.bring()
        self._check_there()
        assert self._opens is not None
        return self._opens(self)

    def cancel(self) -> None:
        """Let go of the prefix. Reads under way go on, and their blocks are cached. Twice is fine."""
        self._stage, self.kept = LET_GO, 0
        held, self._held = self._held, None
        if held is not None:
            held.release()
        self._remainder.let_go()

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __repr__(self) -> str:
        stage = ("matches", "needs room", "moves", "over", "let go")[self._stage]
        return f"<Load, {stage}, {self.num_cold} cold of {self.found} cached blocks>"

    # ---- for the cache and the scheduler

    @property
    def num_beside(self) -> int:
        """Blocks that it brings beside the prompt's own: 1 for one that it shares in part."""
        return self._remainder.num_blocks

    def do_without_remainder(self) -> bool:
        """Load the prefix alone; False if it brings nothing else, or its promotions are decided."""
        if self._stage != NEEDS_ROOM or not self.num_beside:
            return False
        self._remainder.let_go()
        return True

    @property
    def is_matched(self) -> bool:
        """Whether it is known what there is to load."""
        return self._stage > MATCHES

    @property
    def is_moving(self) -> bool:
        """Whether its promotions were decided: their device blocks are taken."""
        return self._stage == MOVES

    @property
    def is_over(self) -> bool:
        """As the last look has found it."""
        return self._stage >= OVER

    @property
    def num_placed(self) -> int:
        """Device blocks that it holds, or that are being read for it."""
        if self._stage == MATCHES:
            return 0 if self._held is None else self._held.num_blocks - self._held.num_cold
        there = self._num_matched() if self._stage in (NEEDS_ROOM, MOVES) else self.kept
        return there - self.num_cold if self._stage == NEEDS_ROOM else there

    @property
    def error(self) -> OutOfBlocks | None:
        """Why it holds nothing: there was no room for it."""
        return self._error

    @property
    def held(self) -> Hold:
        """The owner of the prefix; InvalidArgument where it holds nothing."""
        if self._held is None:
            self._check_there()
        assert self._held is not None
        return self._held

    def device_blocks(self) -> NDArray[np.int32]:
        """Ids of the owned blocks that are on the device: int32 [n]."""
        if self._held is None:
            return np.empty(0, np.int32)
        owner = self._remainder.path(self.held)
        ids: NDArray[np.int32] = self._placement.blocks_of(owner)[self._placement.tiers_of(owner) == 0]
        return ids

    def opens_by(self, opens: Callable[[Load], Sequence]) -> None:
        """What opens its sequence once it is over."""
        self._opens = opens

    def set_deadline(self, deadline_s: float) -> None:
        """Give it up to so many seconds from now; nothing of it may be decided yet."""
        until = self._moves.seconds() + deadline_s
        self._until = until if self._until is None else min(until, self._until)

    def match(self) -> bool:
        """Own the cached prefix of now; False where a run of it is on its way for another owner."""
        if self._stage != MATCHES:
            return True
        if not self._hooks.all:
            return self._match()
        with self._hooks.on_behalf_of(self._trace), self._hooks.span("match", tokens=len(self._prompt)) as span:
            is_all = self._match()
            span.set(blocks=self._num_matched(), cold_blocks=self.num_cold)
        return is_all

    def bring(self) -> None:
        """Wait until it is over. Where this raises OutOfBlocks, nothing is held."""
        if self._stage < OVER:
            try:
                with self._hooks.on_behalf_of(self._trace):
                    self.match_in_the_end()
                    if self._stage < OVER:
                        self._wait_for_moves()
            except OutOfBlocks as problem:
                self._fail(problem)
                raise

    def keep_arrived(self) -> None:
        """Wait no more: keep the blocks that are on the device, from the front."""
        if self._stage >= OVER:
            return
        if self._held is None:
            self._match()
        if self._stage < OVER:
            self._settle()
            self.found = max(self.found, self.kept)

    # ---- inside

    def _look(self) -> None:
        """Take every step that can be taken now."""
        if self._stage == MATCHES:
            self._moves.carry_out()
            self._match()
        if self._stage == NEEDS_ROOM:
            if self._is_late():
                self._settle()
            elif self._lift(self._moves.try_lift):
                self._stage = MOVES
        if self._stage == MOVES:
            path = self._remainder.path(self.held)
            if self._moves.has_arrived(path) or self._is_late(GRACE_S):
                self._settle()

    def _match(self) -> bool:
        held, is_known = own(self._placement, self._prompt, self._root, self._limit), True  # no request before its row
        try:
            is_late = self._is_late()
            if self._asking is not None and held.blocked < 0 and not is_late:
                held, is_known = self._asking.own_more(held)
            is_all = is_late or (is_known and held.blocked < 0)
            tiers = self._worth(held.handle) if is_all and (held.num_cold or held.cold_tail) else None
        except BaseException:  # it would let go by itself, but only once the traceback is gone
            held.release()
            raise
        before, self._held = self._held, held
        if before is not None:
            before.release()
        if is_all:
            self.found, self.tiers = held.num_blocks, tiers
            if tiers is None or len(tiers) == held.num_blocks:
                self._remainder.own(held, self._prompt)
            if tiers is None:
                self.kept = held.num_blocks
            self._stage = OVER if tiers is None and not self.num_beside else NEEDS_ROOM
            self._took(self._latencies.match)
        return is_all

    def _num_matched(self) -> int:
        if self.tiers is not None:
            return len(self.tiers) + self.num_beside
        return 0 if self._held is None else self._held.num_blocks + self.num_beside

    def match_in_the_end(self) -> None:
        """Wait until it is known what there is to load."""
        if self._stage != MATCHES:
            return
        if not self._hooks.all:
            self._own_in_the_end()
            return
        with self._hooks.span("match", tokens=len(self._prompt)) as span:
            self._own_in_the_end()
            span.set(blocks=self._num_matched(), cold_blocks=self.num_cold)

    def _own_in_the_end(self) -> None:
        moves = self._moves
        while True:
            seen = moves.num_ended
            if self._match():
                return
            self._pause(seen, None if self._until is None else self._left_s())

    def _pause(self, seen: int, seconds: float | None) -> None:
        """Wait until a move has ended since `seen`, or the remote store has answered."""
        if self._asking is None or not self._asking.waits(seconds):
            self._moves.wait_since(seen, seconds)

    def _wait_for_moves(self) -> None:
        if not self._hooks.all or not self._num_matched():
            self._arrive()
            return
        with self._hooks.span("promote") as span:
            self._arrive()
            span.set(blocks=self.kept)

    def _arrive(self) -> None:
        if self._stage == NEEDS_ROOM:
            if self._num_matched():
                self._lift(self._moves.lift)
            self._stage = MOVES
        if self._num_matched():
            self._moves.wait_arrived(self._remainder.path(self.held))
        self._settle()

    def _lift(self, lift: Callable[[int, int], bool | None]) -> bool | None:
        """What `lift` says; it is asked without the remainder where that has no room."""
        try:
            return lift(self._remainder.path(self.held), self._until_ns())
        except OutOfBlocks:
            if not self.do_without_remainder():
                raise
        return lift(self._remainder.path(self.held), self._until_ns())

    def _settle(self) -> None:
        """The one place that says how many blocks are there, however they came and whatever failed."""
        self.kept = self._placement.settle(self.held.handle) if self._num_matched() else 0
        self._remainder.settle()  # a row copies from it before it is let go of
        self._stage = OVER
        if self.num_cold:
            self._took(self._latencies.promotion)

    def _took(self, histogram: Histogram) -> None:
        """A part of its work is over, as its owner sees it; the next begins."""
        now = self._moves.seconds()
        histogram.observe(now - self._began_s)
        self._began_s = now

    def _fail(self, problem: OutOfBlocks) -> None:
        self._error = problem
        self.cancel()

    def _check_there(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stage == LET_GO:
            raise InvalidArgument("this load was cancelled, or its sequence was opened: begin another one")

    def _is_late(self, grace_s: float = 0.0) -> bool:
        return self._until is not None and self._moves.seconds() >= self._until + grace_s

    def _left_s(self) -> float:
        assert self._until is not None
        return self._until - self._moves.seconds()

    def _until_ns(self) -> int:
        """For the core: 0 without a deadline."""
        return 0 if self._until is None else max(1, int(self._until * 1e9))
