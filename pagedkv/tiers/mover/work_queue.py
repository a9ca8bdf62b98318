"""The mover's work queue: waiting parts, calls under way, counters, and overdue work.

Overdue are reads past their deadline and store calls that hang. The thread inside cannot be stopped. Its part has
failed from then on, whatever it does, and its memory is its own until it is back.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedkv.observe.callbacks import Log
from pagedkv.threads.monitor import Monitor
from pagedkv.tiers.base import LeavableTier, Name, OpenTier, Record, is_leavable
from pagedkv.tiers.mover.hangs import Calls, store_of
from pagedkv.tiers.mover.ticket import Ticket

log = Log(logging.getLogger("pagedkv.tiers.mover"))

WATCH_S = 1.0  # seconds between two looks for overdue work, at most, while a caller waits for results


@dataclass(slots=True)
class DirectionStats:
    """Counters of one direction, in blocks except `bytes`.

    `failed` counts blocks that a tier could not write or did not have as named; `late` and `cancelled` blocks
    whose part never started; `left` those whose part was in a store that did not come back in time, or was not sent
    into one that hangs.
    """

    blocks: int = 0
    bytes: int = 0
    failed: int = 0
    late: int = 0
    cancelled: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A unit of work: moves in one direction that one thread carries out."""

    ticket: Ticket
    src: int
    dst: int
    moves: NDArray[np.intp]
    src_blocks: NDArray[np.int32]
    dst_blocks: NDArray[np.int32]
    records: Sequence[Record | Name]
    store: int | None  # `src` or `dst` if it is a store; None between memories

    def is_into(self, stores: set[int]) -> bool:
        """Whether it is to or from one of these stores, whichever its lane."""
        return self.store is not None and store_of(self.store) in stores


@dataclass(eq=False)
class WorkQueue:
    """Waiting parts, calls under way and counters of a mover and its threads.

    Threads hold this and not the mover, so that a mover without references can be collected.
    """

    tiers: Mapping[int, OpenTier]
    clock: Callable[[], float]
    hang_s: float
    calls: Calls[Part] = field(default_factory=Calls)
    parts: deque[Part] = field(default_factory=deque)
    queued_blocks: int = 0
    busy: int = 0  # parts that threads carry out now
    closed: bool = False
    changed: Monitor = field(default_factory=Monitor)
    stats: dict[tuple[int, int], DirectionStats] = field(default_factory=dict)
    logged: set[tuple[int, int, type]] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)

    def begin_call(self, part: Part) -> None:
        """Note that this thread is about to carry out a part, if a store is one end of it."""
        if part.store is not None:
            with self.changed:
                self.calls.begin(part, part.store, self.clock())

    def end_call(self, part: Part) -> None:
        """Note that it is out of the store and of the memory; the part is never left from now on."""
        if part.store is None:
            return
        with self.changed:
            hung = self.calls.end(part)
            self.changed.notify_all()
        store = self.tiers[part.store]
        if hung and is_leavable(store):
            _tell(store.call_came_back)

    def give_up_overdue(self, ticket: Ticket | None = None) -> float:
        """Give up on overdue work; seconds until there may be more of it.

        A call that has taken `hang_s` hangs: its store is told before its memory can be reused, and parts queued for
        that store are refused. Where the deadline of `ticket` is over, its reads are left, and its queued parts are
        late. The log comes last, when nothing waits for it: it may lie on the device that hangs, or raise.
        """
        told: list[LeavableTier] = []
        left: list[Part] = []
        refused: list[Part] = []
        late: list[Part] = []
        try:
            with self.changed:
                now = self.clock()
                is_over = ticket is not None and ticket.deadline is not None and now >= ticket.deadline
                overdue = self.calls.mark_hanging(now - self.hang_s)
                told += [store for part in overdue if (store := self._tell_store(part)) is not None]
                if is_over:
                    overdue += [part for part in self.calls.under_way() if part.ticket is ticket and _reads(part)]
                left += [part for part in dict.fromkeys(overdue) if self._may_be_left(part)]
                for part in left:
                    self.direction_of(part).left += part.moves.size
                    part.ticket.leave(part.moves, reading=_reads(part))
                hanging = self.calls.hanging_stores()
                refused += self._unqueue(lambda part: part.is_into(hanging)) if hanging else []
                late += self._unqueue(lambda part: part.ticket is ticket) if is_over else []
                oldest = self.calls.oldest()
        finally:
            for part in left:
                if part.ticket.is_left(part.moves):  # not if this was interrupted
                    part.ticket.one_less()
            self.refuse(refused, "left")
            self.refuse(late, "late")
        for store in told:
            store.log_state()
        for part in left:
            self.log_once(part, TimeoutError, "the tier does not answer in time; their memory is kept until it does")
        pause = min(WATCH_S, self.hang_s if oldest is None else oldest + self.hang_s - now)
        return pause if is_over or ticket is None or ticket.deadline is None else min(pause, ticket.deadline - now)

    def refuse(self, parts: Iterable[Part], why: str) -> None:
        """Fail parts that no thread will take, counted as ``"late"`` or ``"left"``."""
        for part in parts:
            self.count_untried(part, why)
            part.ticket.part_done(part.moves, None)

    def direction_of(self, part: Part) -> DirectionStats:
        """The counters of a part's direction. The caller holds ``changed``."""
        return self.stats.setdefault((part.src, part.dst), DirectionStats())

    def count_untried(self, part: Part, why: str) -> None:
        """Count a part that ended before anything was moved.

        `why` is ``"late"``, ``"cancelled"`` or ``"left"``.
        """
        part.ticket.not_tried(part.moves)
        with self.changed:
            counts = self.direction_of(part)
            setattr(counts, why, getattr(counts, why) + part.moves.size)

    def log_once(self, part: Part, kind: type, what: object) -> None:
        """Log one line for the first error of a kind in a direction."""
        with self.changed:
            first = (part.src, part.dst, kind) not in self.logged
            self.logged.add((part.src, part.dst, kind))
        if first:
            src, dst = self.tiers[part.src].name, self.tiers[part.dst].name
            log.warning("%s to %s: %d blocks lost: %s (others of this kind are only counted)",
                        src, dst, part.moves.size, what)  # fmt: skip

    def _unqueue(self, chosen: Callable[[Part], bool]) -> list[Part]:
        found = [part for part in self.parts if chosen(part)]
        for part in found:
            self.parts.remove(part)
            self.queued_blocks -= part.moves.size
        if found:
            self.changed.notify_all()
        return found

    def _may_be_left(self, part: Part) -> bool:
        """Whether a part under way is still waited for, and need not be."""
        return not part.ticket.is_left(part.moves) and (_reads(part) or is_leavable(self.tiers[part.dst]))

    def _tell_store(self, part: Part) -> LeavableTier | None:
        store = self.tiers[part.src if _reads(part) else part.dst]
        if not is_leavable(store):
            return None
        _tell(lambda: store.call_hangs(part.moves.size))
        return store


def _reads(part: Part) -> bool:
    return part.store == part.src


def _tell(tell: Callable[[], None]) -> None:
    """Call a store's callback; an error in it or in the log costs no thread and no result."""
    try:
        tell()
    except BaseException:
        with suppress(BaseException):
            log.exception("a store that was told of a call that hangs raised")
