"""Carries out Moves on threads of its own, and answers with Tickets.

The threads copy without the GIL.

The mover decides nothing and keeps no order. The caller of `submit` owns the sources and destinations of all moves
until the ticket is settled, so no two moves in flight touch the same block.

A tier that raises costs the blocks of that part, one counter and (the first time) one log line; never a
thread. A store that does not come back costs a thread until it does, and callers wait for it no longer than the
deadline of a read, or `hang_s`: the part has failed then, and its thread alone has its memory until it is back. While
a call hangs, no other is made into that store.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ClosedError, InvalidArgument, TierError, WrongType
from pagedkv.observe.callbacks import Log
from pagedkv.spec.sizes import check_plain
from pagedkv.threads import crew
from pagedkv.threads.ending import at_end
from pagedkv.tiers.base import Name, OpenTier, Record, is_store
from pagedkv.tiers.mover.hangs import HANG_S, LANE
from pagedkv.tiers.mover.parts import check_moves, cut, stored_moves
from pagedkv.tiers.mover.ticket import Ticket
from pagedkv.tiers.mover.work_queue import DirectionStats, Part, WorkQueue
from pagedkv.tiers.mover.worker import run, work

log = Log(logging.getLogger("pagedkv.tiers.mover"))

MOST_THREADS = 64


class Mover:
    """Threads that move blocks between tiers.

    Parameters
    ----------
    tiers : mapping of tier number to tier
        Numbers 0 to 3 must have the same `block_bytes`, as must 4 to 7 and so on: such a lane holds blocks of another
        size in the same memory.
    threads : int
        Worker threads, `MOST_THREADS` at most. Where a tier is a store there is one more, for moves between memories
        alone. 0: none at all; moves wait in the queue until the mover is closed, for tests that carry them out.
    describe : callable, optional
        ``describe(moves) -> list of Record or Name``, one per move, called by `submit` in the caller's thread with
        the moves to or from a `StoreTier`.
    deadline_s : float, optional
        Default for `submit`.
    hang_s : float
        Seconds, more than 0, that a call into a store may take.
    max_queued_blocks : int
        `submit` waits while more blocks than this are queued.
    on_done : callable, optional
        Called once per ticket, when it is settled, in a worker thread (or the caller's, for no moves). It may
        submit, it must not wait.
    clock : callable
        Monotonic seconds, for deadlines.

    Raises
    ------
    WrongType, InvalidArgument
    """

    is_synchronous = False

    def __init__(
        self,
        tiers: Mapping[int, OpenTier],
        *,
        threads: int = 2,
        describe: Callable[[NDArray[np.void]], list[Record | Name]] | None = None,
        deadline_s: float | None = None,
        hang_s: float = HANG_S,
        max_queued_blocks: int = 4096,
        on_done: Callable[[Ticket], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(tiers, Mapping) or not all(
            isinstance(number, int) and hasattr(tier, "block_bytes") for number, tier in tiers.items()
        ):
            raise WrongType("the tiers of a mover must be a mapping of numbers to tiers")
        sizes: dict[int, set[int]] = {number // LANE: set() for number in tiers} or {0: set()}
        for number, tier in tiers.items():
            sizes[number // LANE].add(tier.block_bytes)
        for found in sizes.values():
            if len(found) != 1:
                raise InvalidArgument(f"the tiers of a mover must have one block_bytes, not {sorted(found)}")
        for what, value, least in (("threads", threads, 0), ("max_queued_blocks", max_queued_blocks, 1)):
            check_plain(value, what, "a plain int")
            if not isinstance(value, int) or isinstance(value, bool):
                raise WrongType(f"{what} must be an int, not {type(value).__name__}")
            if value < least:
                raise InvalidArgument(f"{what} must be at least {least}, not {value}")
        if threads > MOST_THREADS:
            raise InvalidArgument(f"a mover may have {MOST_THREADS} threads at most, not {threads}")
        _check_seconds("deadline_s", deadline_s)
        _check_seconds("hang_s", hang_s)
        if not hang_s:
            raise InvalidArgument("hang_s must be more than 0: every call into a store would hang")
        self._describe, self._deadline_s, self._on_done = describe, deadline_s, on_done
        self._max_queued_blocks, self._num_threads = max_queued_blocks, max(1, threads)
        self._queue = WorkQueue(dict(tiers), clock, hang_s)
        _running.add(self._queue)
        self._unheld = weakref.finalize(self, _tell_to_stop, self._queue, cancel=True)
        self._unheld.atexit = False
        for number in range(threads and threads + any(map(is_store, tiers.values()))):
            express = number == threads
            thread = threading.Thread(
                target=work, args=(self._queue, express), name=f"pagedkv-mover-{number}", daemon=True
            )
            self._queue.threads.append(thread)
            crew.start(thread)

    def submit(
        self,
        moves: NDArray[np.void],
        *,
        deadline_s: float | None = None,
        on_done: Callable[[Ticket], object] | None = None,
        here: bool = False,
        before: Callable[[Ticket], object] | None = None,
        records: Sequence[Record | Name] | None = None,
    ) -> Ticket:
        """Queue moves. Waits while the queue is full (not in a worker thread), never for the moves.

        Parameters
        ----------
        moves : structured array [n]
            As `take_moves` returns. All moves of a transfer succeed or fail together.
        deadline_s : float, optional
            Seconds from now; parts that have not started by then fail, and reads from a store are left behind. Default:
            the mover's.
        on_done : callable, optional
            As the mover's, for this ticket. Default: the mover's.
        here : bool
            For a dispatcher, which no store may keep: it does not wait for room in the queue, and a single part between
            two memories is carried out by the calling thread, before this returns.
        before : callable, optional
            Called with the ticket before anything is queued.
        records : sequence, optional
            One for each move, all of which are to or from a store; instead of asking ``describe``.

        Raises
        ------
        WrongType, InvalidArgument
            The moves cannot be carried out as a whole.
        ClosedError, TierError
            The mover is closed, or belongs to the process this one was forked from.

        Whatever is raised, nothing is queued or under way.
        """
        queue = self._queue
        if queue.pid != os.getpid():
            raise TierError(f"this mover belongs to process {queue.pid}; a forked child must make its own")
        if queue.closed:
            raise ClosedError("the mover is closed")
        check_moves(moves, queue.tiers)
        _check_seconds("deadline_s", deadline_s)
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        deadline = None if limit_s is None else queue.clock() + limit_s
        named = self._records(moves) if records is None else dict(enumerate(records))
        src_blocks = moves["src_block"].astype(np.int32)
        dst_blocks = moves["dst_block"].astype(np.int32)
        cuts = list(cut(moves, queue.tiers, self._num_threads))
        transfers = moves["transfer"].astype(np.int64)
        tell = self._on_done if on_done is None else on_done
        ticket = Ticket(transfers, len(cuts), deadline, tell, queue.give_up_overdue)
        parts = [
            Part(
                ticket,
                src,
                dst,
                chosen,
                src_blocks[chosen],
                dst_blocks[chosen],
                _pick(named, chosen),
                next((number for number in (src, dst) if is_store(queue.tiers[number])), None),
            )
            for src, dst, chosen in cuts
        ]
        if before is not None:
            before(ticket)
        if not parts:
            ticket.settle()
        elif here and _is_quick(parts):
            ticket.part_done(parts[0].moves, run(queue, parts[0]))
        else:
            self._enqueue(parts, moves.size, here)
        return ticket

    def watch(self, ticket: Ticket) -> float:
        """Give up what takes too long of a ticket; seconds after which to look again."""
        return self._queue.give_up_overdue(ticket)

    def _enqueue(self, parts: list[Part], count: int, at_once: bool) -> None:
        """Queue parts of so many blocks once there is room.

        Parts whose store hangs fail at once.
        """
        queue, pause = self._queue, 0.0
        while True:
            with queue.changed:
                if queue.changed.wait_for(lambda: queue.closed or at_once or self._has_room(count), pause):
                    if queue.closed:
                        raise ClosedError("the mover was closed while a submit waited for room in its queue")
                    hanging = queue.calls.hanging_stores()
                    queue.refuse([part for part in parts if part.is_into(hanging)], "left")
                    queued = [part for part in parts if not part.is_into(hanging)]
                    num_blocks = queue.queued_blocks + sum(part.moves.size for part in queued)
                    before = len(queue.parts)
                    try:
                        queue.parts.extend(queued)
                    except BaseException:  # there was no memory for all of them, and no thread has seen one
                        while len(queue.parts) > before:
                            queue.parts.pop()
                        raise
                    queue.queued_blocks = num_blocks
                    queue.changed.notify_all()
                    return
            pause = queue.give_up_overdue()

    def _has_room(self, count: int) -> bool:
        queued = self._queue.queued_blocks
        has_room = queued == 0 or queued + count <= self._max_queued_blocks
        return has_room or self._is_a_worker()

    def _is_a_worker(self) -> bool:
        """Whether the caller is one of the mover's threads."""
        own = threading.get_ident()  # `current_thread` would make an object for each thread that has none, and keep it
        return any(thread.ident == own and thread.is_alive() for thread in self._queue.threads)

    def _records(self, moves: NDArray[np.void]) -> dict[int, Record | Name]:
        stored = stored_moves(moves, self._queue.tiers)
        if not stored.size:
            return {}
        if self._describe is None:
            raise InvalidArgument("moves to or from a store need a mover made with describe=")
        described = self._describe(moves[stored])
        if len(described) != stored.size:
            raise InvalidArgument(f"describe returned {len(described)} records for {stored.size} moves")
        return dict(zip(stored.tolist(), described))

    def stats(self) -> dict[tuple[int, int], DirectionStats]:
        """Counters by (source tier, destination tier); a copy."""
        self._queue.give_up_overdue()
        with self._queue.changed:
            return {pair: replace(counts) for pair, counts in self._queue.stats.items()}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, the same in every tier."""
        return next(iter(self._queue.tiers.values())).block_bytes

    @property
    def queued_blocks(self) -> int:
        """Blocks that wait for a thread."""
        return self._queue.queued_blocks

    def close(self, *, cancel: bool = False) -> None:
        """Refuse further moves, finish (or cancel) the queued ones, and join the threads.

        Every ticket is settled afterwards, but for a write that hangs in a store without `call_hangs`, which settles
        when it is back. A second call does nothing. Threads inside a call that hangs are left, with a line in the log;
        they keep the memory that they may still touch.

        Raises
        ------
        InvalidArgument
            Called by a worker thread (from ``on_done``), which cannot wait for itself.
        """
        if self._queue.pid != os.getpid() or not self._unheld.alive:
            return
        if self._is_a_worker():
            raise InvalidArgument("a mover cannot be closed from its own on_done callback")
        _tell_to_stop(self._queue, cancel=cancel)
        _join(self._queue)
        self._unheld.detach()  # or it would keep the tiers as long as this mover lives

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_quick(parts: list[Part]) -> bool:
    """Whether a dispatcher may carry parts out itself.

    No store can keep it, and other threads could not help.
    """
    return len(parts) == 1 and parts[0].store is None


def _check_seconds(what: str, seconds: float | None) -> None:
    check_plain(seconds, what, "a number of seconds")
    if seconds is not None and not (isinstance(seconds, (int, float)) and seconds >= 0):
        raise InvalidArgument(f"{what} must be a number of seconds, 0 or more, not {seconds!r}")


def _pick(records: dict[int, Record | Name], chosen: NDArray[np.intp]) -> list[Record | Name]:
    return [records[i] for i in chosen.tolist()] if chosen[0] in records else []


_running: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


def _tell_to_stop(queue: WorkQueue, *, cancel: bool) -> None:
    """Does not join: the garbage collector may call it from anywhere, in a worker thread too."""
    if queue.pid != os.getpid():  # a thread that the fork left behind may hold the lock
        return
    with queue.changed:
        queue.closed = True
        if cancel:
            for part in queue.parts:
                part.ticket.cancel()
        queue.changed.notify_all()


@at_end
def _stop_all() -> None:
    """No thread may still copy when the interpreter frees the arenas."""
    for queue in list(_running):
        _tell_to_stop(queue, cancel=True)
        if queue.pid == os.getpid():
            _join(queue)


def _join(queue: WorkQueue) -> None:
    """Wait for the threads of a mover that was told to stop, except those in a hanging call."""
    lost: list[threading.Thread] = []

    def others_are_idle() -> bool:
        lost[:] = queue.calls.lost_threads()
        if not any(thread.is_alive() for thread in queue.threads if thread not in lost):
            return True  # whatever is queued, no thread is left to take it
        return not queue.parts and queue.busy <= len(lost)

    while True:
        pause = queue.give_up_overdue()
        with queue.changed:
            if queue.changed.wait_for(others_are_idle, pause):
                break
    for thread in queue.threads:
        if thread not in lost:
            with suppress(RuntimeError):  # its start was interrupted
                thread.join()
    if lost:
        log.warning("%d of the mover's threads are in a call that does not come back, and are left there", len(lost))
