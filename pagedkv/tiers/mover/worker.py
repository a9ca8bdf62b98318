"""A worker thread of the mover: takes parts, carries them out, and counts.

Whatever a tier, a store or the log raises, the thread lives on.
"""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.tiers.base import is_off
from pagedkv.tiers.mover.transfer import transfer
from pagedkv.tiers.mover.work_queue import Part, WorkQueue

AGAIN_S = 0.01  # until a worker without memory tries again


def work(queue: WorkQueue, express: bool) -> None:
    """A worker thread: takes parts in order until the mover is closed and the queue is empty.

    An express worker takes only parts between two memories, so that those never wait for a disk.
    """

    def first() -> Part | None:
        return next((part for part in queue.parts if part.store is None or not express), None)

    part: Part | None = None  # taken out of the queue, and counted as busy; an idle thread keeps no ticket alive
    is_begun = is_told = False
    while True:
        try:
            if part is None:
                with queue.changed:
                    queue.changed.wait_for(lambda: first() is not None or queue.closed)
                    chosen = first()
                    if chosen is None:
                        return
                    left, busy = queue.queued_blocks - chosen.moves.size, queue.busy + 1
                    queue.parts.remove(chosen)  # nothing from here on needs memory
                    part, chosen, is_begun, is_told = chosen, None, False, False
                    queue.queued_blocks, queue.busy = left, busy
                    queue.changed.notify_all()
            if not is_told:
                if is_begun:
                    part.ticket.part_done(part.moves, None)
                else:
                    is_begun = True
                    part.ticket.part_done(part.moves, run(queue, part))
                is_told = True
            with queue.changed:
                queue.busy -= 1
                queue.changed.notify_all()
            part = None
        except BaseException:  # noqa: PERF203 - no memory for the books: a part that was begun fails, the thread goes on
            time.sleep(AGAIN_S)


def run(queue: WorkQueue, part: Part) -> NDArray[np.bool_] | None:
    """Carry out a part and count; None if it was not started or a tier raised."""
    late = part.ticket.deadline is not None and queue.clock() >= part.ticket.deadline
    if part.ticket.cancelled or late:
        queue.count_untried(part, "cancelled" if part.ticket.cancelled else "late")
        return None
    queue.begin_call(part)
    src, dst = queue.tiers[part.src], queue.tiers[part.dst]
    ok: NDArray[np.bool_] | None = None
    problem: BaseException | None = None
    off = False  # before or after: then perhaps in between, when a read was refused
    try:
        off = is_off(src)
        ok = transfer(src, part.src_blocks, dst, part.dst_blocks, part.records)
        if ok.shape != part.moves.shape or ok.dtype != np.bool_:
            raise TierError(f"a tier answered with {ok.dtype} {list(ok.shape)} for {part.moves.size} blocks")
        arrived = int(ok.sum())
        off = off or is_off(src)
    except BaseException as raised:  # whatever a tier does, the thread lives
        arrived, ok, problem = 0, None, raised
    while True:
        try:
            queue.end_call(part)
            break
        except MemoryError:  # else it would count as a call that hangs
            time.sleep(AGAIN_S)
    if problem is not None:
        with suppress(BaseException):  # and whatever a log does
            queue.log_once(part, type(problem), repr(problem))
    if part.ticket.is_left(part.moves):  # it was counted then
        return ok
    if ok is not None and off:
        part.ticket.not_tried(part.moves[~ok])
    with queue.changed:
        counts = queue.direction_of(part)
        counts.blocks += arrived
        counts.bytes += arrived * src.block_bytes
        counts.failed += part.moves.size - arrived
    return ok
