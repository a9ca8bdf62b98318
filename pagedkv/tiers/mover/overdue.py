"""Gives up on overdue work: reads past their deadline, and store calls that hang.

The thread inside cannot be stopped. Its part has failed from then on, whatever it does, and its memory is its own until
it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from pagedkv.observe.callbacks import Log
from pagedkv.tiers.base import LeavableTier, is_leavable
from pagedkv.tiers.mover.shared import Part, Shared, count_untried, direction_of, log_once
from pagedkv.tiers.mover.ticket import Ticket

log = Log(logging.getLogger("pagedkv.tiers.mover"))

WATCH_S = 1.0  # who waits for results looks this often, at least, for what takes too long


def begin_call(shared: Shared, part: Part) -> None:
    """This thread is about to carry out a part; noted where a store is one end of it."""
    if part.store is not None:
        with shared.changed:
            shared.calls.begin(part, part.store, shared.clock())


def end_call(shared: Shared, part: Part) -> None:
    """It is out of the store, and of the memory. It is never left from now on."""
    if part.store is None:
        return
    with shared.changed:
        hung = shared.calls.end(part)
        shared.changed.notify_all()
    store = shared.tiers[part.store]
    if hung and is_leavable(store):
        _tell(store.call_came_back)


def give_up_overdue(shared: Shared, ticket: Ticket | None = None) -> float:
    """Wait no longer for what takes too long; seconds until there may be more of it.

    A call that has taken `hang_s` hangs: its store is told, before anybody else can be given its memory, and what is
    queued for that store is refused. Where the deadline of `ticket` is over, its reads are left, and what it has in the
    queue is late. The log comes last, when nothing waits for it: it may lie on the device that hangs, or raise.
    """
    told: list[LeavableTier] = []
    left: list[Part] = []
    refused: list[Part] = []
    late: list[Part] = []
    try:
        with shared.changed:
            now = shared.clock()
            is_over = ticket is not None and ticket.deadline is not None and now >= ticket.deadline
            overdue = shared.calls.mark_hanging(now - shared.hang_s)
            told += [store for part in overdue if (store := _tell_store(shared, part)) is not None]
            if is_over:
                overdue += [part for part in shared.calls.under_way() if part.ticket is ticket and _reads(part)]
            left += [part for part in dict.fromkeys(overdue) if _may_be_left(shared, part)]
            for part in left:
                direction_of(shared, part).left += part.moves.size
                part.ticket.leave(part.moves, reading=_reads(part))
            hanging = shared.calls.hanging_stores()
            refused += _unqueue(shared, lambda part: part.store in hanging) if hanging else []
            late += _unqueue(shared, lambda part: part.ticket is ticket) if is_over else []
            oldest = shared.calls.oldest()
    finally:
        for part in left:
            if part.ticket.is_left(part.moves):  # not if this was interrupted
                part.ticket.one_less()
        refuse(shared, refused, "left")
        refuse(shared, late, "late")
    for store in told:
        store.log_state()
    for part in left:
        log_once(shared, part, TimeoutError, "the tier does not answer in time; their memory is kept until it does")
    pause = min(WATCH_S, shared.hang_s if oldest is None else oldest + shared.hang_s - now)
    return pause if is_over or ticket is None or ticket.deadline is None else min(pause, ticket.deadline - now)


def refuse(shared: Shared, parts: Iterable[Part], why: str) -> None:
    """Parts that no thread will take are over, and counted as ``"late"`` or ``"left"``."""
    for part in parts:
        count_untried(shared, part, why)
        part.ticket.part_done(part.moves, None)


def _unqueue(shared: Shared, chosen: Callable[[Part], bool]) -> list[Part]:
    found = [part for part in shared.queue if chosen(part)]
    for part in found:
        shared.queue.remove(part)
        shared.queued_blocks -= part.moves.size
    if found:
        shared.changed.notify_all()
    return found


def _reads(part: Part) -> bool:
    return part.store == part.src


def _may_be_left(shared: Shared, part: Part) -> bool:
    """Whether somebody still waits for a part under way, and need not."""
    return not part.ticket.is_left(part.moves) and (_reads(part) or is_leavable(shared.tiers[part.dst]))


def _tell_store(shared: Shared, part: Part) -> LeavableTier | None:
    store = shared.tiers[part.src if _reads(part) else part.dst]
    if not is_leavable(store):
        return None
    _tell(lambda: store.call_hangs(part.moves.size))
    return store


def _tell(tell: Callable[[], None]) -> None:
    """Whatever a store or the log makes of it, nobody loses a thread or a result by it."""
    try:
        tell()
    except BaseException:
        with suppress(BaseException):
            log.exception("a store that was told of a call that hangs raised")
