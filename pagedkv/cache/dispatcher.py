"""The mover's dispatcher.

A thread that takes the core's decided moves, has them carried out, and reports their end.

A move belongs to the core until this thread takes it, then to a Taken, and with it to the job that the thread made of
it; the end of the job is the end of the move, whatever raises. No caller ever has a move, so an exception in a caller's
thread loses none. The thread enters no store, so no disk keeps it; what is small and in memory it copies itself.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.block_pool import BlockPool
from pagedkv._core.dispatch import LONGEST_S, Dispatch, Taken
from pagedkv._core.placement import Placement
from pagedkv._core.tier import Tier
from pagedkv.cache.admission import Admission
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.jobs import MOST_UNANSWERED, Job, left_of, transfers_of, without_ticket
from pagedkv.cache.scrub import Scrub
from pagedkv.cache.storage import Carrier, Handle
from pagedkv.observe.callbacks import Log
from pagedkv.observe.hooks import Hooks, Off
from pagedkv.threads import crew
from pagedkv.threads.monitor import Monitor

log = Log(logging.getLogger("pagedkv.tiers.mover"))

AGAIN_S = 0.01  # until a round that failed is made again


class Dispatcher:
    """Carries out what a Placement decides, in a thread of its own.

    Parameters
    ----------
    placement : Placement
    dispatch : Dispatch of `placement`
    carrier : moves the blocks.
    admission : asked about each demotion to the disk.
    costs : told how long loads take.
    scrub : told what promotions leave on the device.
    hooks : told of moves.

    Attributes
    ----------
    context : of the caller that decided last, where there are hooks: they are told of the moves in a copy of it.
    interrupts : KeyboardInterrupt and its like that hooks raised, for callers that wait.
    """

    def __init__(
        self,
        placement: Placement,
        dispatch: Dispatch,
        carrier: Carrier,
        admission: Admission,
        costs: CostModel,
        scrub: Scrub,
        hooks: Hooks,
    ) -> None:
        self._placement, self._dispatch, self._carrier, self._hooks = placement, dispatch, carrier, hooks
        self._admission, self._costs, self._scrub = admission, costs, scrub
        self._jobs: list[Job] = []
        self._thread: threading.Thread | None = None
        self._pumping = Monitor()  # rounds of callers, where there is no thread, come one after the other
        self._pumper = 0
        self.closing = self._stopping = False
        self.context: contextvars.Context | None = None
        self.interrupts: deque[BaseException] = deque()
        self._pid = os.getpid()

    # ---- life

    def start(self) -> None:
        """Begin to take moves.

        The thread holds this object weakly: a cache that is not closed can be collected.
        """
        weakref.finalize(self, self._dispatch.close).atexit = False
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self), self._dispatch), name="pagedkv-dispatch", daemon=True
        )
        _started.add(self)
        crew.start(self._thread)

    @property
    def has_thread(self) -> bool:
        """Whether it was started; if not, :meth:`pump` does the work."""
        return self._thread is not None

    def is_this_thread(self) -> bool:
        """Whether the caller is the dispatcher itself: a hook of ``moves``, or what it calls."""
        if self._pumper == threading.get_ident():
            return True
        thread = self._thread  # `current_thread` would make an object for each thread that has none, and keep it
        return thread is not None and thread.ident == threading.get_ident() and thread.is_alive()

    def close(self) -> None:
        """Finish what is decided and under way, and end the thread.

        Again is fine, also after an interrupted call.
        """
        self.closing = True
        self._dispatch.wake()
        if self._thread is None:
            while self._jobs:
                self.pump()
        elif not self.is_this_thread():  # if it is, it ends after this round
            with suppress(RuntimeError):  # `start` was interrupted before there was a thread
                self._thread.join()
        self._dispatch.close()

    def stop(self) -> None:
        """End the thread after its round, whatever is under way: the process ends."""
        if self._thread is not None and self._pid == os.getpid():
            self._stopping = True
            self._dispatch.wake()
            self._thread.join()

    # ---- the dispatcher's round

    def pump(self) -> float | None:
        """One round, as :meth:`round`, after those of other threads.

        For caches without a dispatcher's thread.
        """
        with self._pumping:
            self._pumper = threading.get_ident()
            try:
                return self.round(self._dispatch.take())
            finally:
                self._pumper = 0

    def round(self, taken: Taken | None) -> float | None:
        """Begin what was taken and end what is settled.

        Seconds until there may be more to do, None where all is done.

        What goes wrong costs moves, which are given up. Where it raises all the same, there was no memory even for
        that: :meth:`recover` what was taken.
        """
        if taken is not None:
            upward = taken.moves["dst_tier"] < taken.moves["src_tier"]
            self._begin(taken, taken.moves[~upward], "demote", self._demote)
            self._begin(taken, taken.moves[upward], "promote", self._promote)
        for job in list(self._jobs):
            self._end_settled(job)
        pause = min((self._carrier.watch(ticket) for job in self._jobs for ticket, _ in job.tickets), default=LONGEST_S)
        return None if self._stopping or (self.closing and not self._jobs) else pause

    def recover(self, taken: Taken) -> None:
        """Give up what a round that raised has taken and put into no ticket.

        To be called again where it raises.

        That `taken` gives moves up as it dies is not enough: without memory CPython may lose a reference to it, and it
        never dies.
        """
        lost = without_ticket(taken.moves, self._jobs)
        if len(lost):
            self._lose(lost, MemoryError())

    def _begin(
        self, taken: Taken, moves: NDArray[np.void], direction: str, submit: Callable[[Job, NDArray[np.void]], None]
    ) -> None:
        if not len(moves):
            return
        num_bytes = len(moves) * self._carrier.block_bytes
        span = self._hooks.span("moves", moves, direction=direction, blocks=len(moves), bytes=num_bytes)
        job = Job(taken, span, self.context)
        self._tell(job, span.__enter__)
        self._jobs.append(job)
        try:
            submit(job, moves)
        except BaseException as problem:  # whatever raises, the thread goes on, and each move is somewhere
            self._lose(without_ticket(moves, [job]), problem)

    def _demote(self, job: Job, moves: NDArray[np.void]) -> None:
        """Copy one tier down, or drop what admission refuses."""
        admitted = [part for part in transfers_of(moves) if self._is_admitted(part)]
        if admitted:
            self._submit(job, np.concatenate(admitted), None)

    def _promote(self, job: Job, moves: NDArray[np.void]) -> None:
        """Submit a ticket for each tier and deadline.

        All are under way at once, so that each tier's time is its own.

        Those that have not arrived from the disk in time, or not started from memory, are given up, and keep their
        colder copies. Demotions have no deadline: a late one would lose its blocks for nothing.
        """
        parts: dict[tuple[int, int], list[NDArray[np.void]]] = {}
        for part in transfers_of(moves):
            until = self._dispatch.until(int(part["transfer"][0]))
            parts.setdefault((int(part["src_tier"][0]), until), []).append(part)
        now = time.monotonic_ns()
        for (_, until), some in sorted(parts.items(), key=lambda item: item[0]):
            self._submit(job, np.concatenate(some), max(0, until - now) * 1e-9 if until else None)

    def _submit(self, job: Job, moves: NDArray[np.void], deadline_s: float | None) -> None:
        """Have moves carried out.

        The job has their ticket before anything is queued; if this raises, nothing is.
        """
        settled, num_tickets = partial(_settled, self._dispatch, job.taken), len(job.tickets)
        try:
            ticket = self._carrier.submit(
                moves, deadline_s=deadline_s, on_done=settled, here=True,
                before=lambda ticket: job.tickets.append((ticket, moves)),
            )  # fmt: skip
            if len(job.tickets) == num_tickets:  # a carrier that has queued without a word
                job.tickets.append((ticket, moves))
        except BaseException:
            del job.tickets[num_tickets:]
            raise

    def _is_admitted(self, transfer: NDArray[np.void]) -> bool:
        """Whether a demotion is carried out; one that is not is over, and its blocks are dropped."""
        if transfer["dst_tier"][0] != Tier.DISK:
            return True
        node = int(transfer["node"][0])
        depth, continued, matched = self._placement.prospects(node)
        try:
            if self._admission.admits(Tier.DISK, len(transfer), depth, continued, matched, node):
                return True
        except BaseException as interrupt:
            if isinstance(interrupt, Exception):
                raise
            self.interrupts.append(interrupt)  # of the caller's clock: it comes out of a call that waits for moves
            if continued:  # as where the budget fails
                return True
        self._dispatch.give_up(transfer, announce=not self._hooks.all)  # with hooks, at the end of the job
        return False

    def _end_settled(self, job: Job) -> None:
        for ticket, moves in [entry for entry in list(job.tickets) if self._is_settled(job, *entry)]:
            try:
                self._complete(job, ticket, moves)
            except BaseException as problem:
                self._lose(moves, problem, ticket)  # where that raises, the next round ends the ticket again
            job.tickets.remove((ticket, moves))
        if not job.tickets:
            self._jobs.remove(job)
            try:
                job.span.set(moved_blocks=job.arrived)
                self._tell(job, lambda: job.span.__exit__(None, None, None))
            finally:
                self._dispatch.announce()

    def _is_settled(self, job: Job, ticket: Handle, moves: NDArray[np.void]) -> bool:
        """Whether a ticket's results are final.

        A ticket that cannot say so is lost: it may be writing yet.
        """
        try:
            return bool(ticket.is_settled)
        except Exception as problem:
            job.unanswered += 1
            if not isinstance(problem, MemoryError) or job.unanswered > MOST_UNANSWERED:
                self._lose(moves, problem, in_use=True)
                job.tickets.remove((ticket, moves))
        except BaseException as interrupt:  # of a caller that makes the round itself: it comes out where that waits
            self.interrupts.append(interrupt)
        return False

    def _complete(self, job: Job, ticket: Handle, moves: NDArray[np.void]) -> None:
        """Report what a ticket has done."""
        transfers, ok = ticket.results()
        self._keep_left(moves, ticket)
        arrived = ok[np.searchsorted(transfers, moves["transfer"])]
        upward = moves["dst_tier"] == Tier.DEVICE
        if not ok.all() or self._scrub.active:  # before another sequence may be given the blocks
            self._scrub.spoilt(moves["dst_block"][upward & ~arrived])
            for part in transfers_of(moves[upward & arrived]):
                self._scrub.holds(part["dst_block"], self._placement.root_of(int(part["node"][0])))
        if upward[0] and ok.all():
            self._costs.observe_load(
                int(moves["src_tier"][0]), len(moves) * self._carrier.block_bytes, ticket.seconds
            )  # fmt: skip
        _, decided = np.unique(moves["transfer"], return_index=True)
        order = np.argsort(decided)  # what was colder is colder in the next tier too
        # with hooks, callers go on once the hooks were told: what they see next is after it
        at_once = isinstance(job.span, Off) or bool(job.tickets)
        self._dispatch.finish(transfers[order], ok[order], ticket.tried()[order], announce=at_once)
        job.arrived += int(np.count_nonzero(arrived))

    def _keep_left(self, moves: NDArray[np.void], ticket: Handle) -> None:
        """Keep the blocks of a call that was left taken until it is back, after its transfer."""
        left = moves[left_of(ticket, moves)]
        if not len(left):
            return
        for pool, blocks in self._destinations(left):
            pool.incref(blocks)
        ticket.when_back(lambda part: self._let_go(moves[part]))

    def _let_go(self, moves: NDArray[np.void]) -> None:
        self._scrub.spoilt(moves["dst_block"][moves["dst_tier"] == Tier.DEVICE])
        for pool, blocks in self._destinations(moves):
            pool.free(blocks)
        self._dispatch.room_made()

    def _destinations(self, moves: NDArray[np.void]) -> Iterator[tuple[BlockPool, NDArray[np.int32]]]:
        for tier in np.unique(moves["dst_tier"]).tolist():
            pool = self._placement.pools[tier]
            assert pool is not None
            yield pool, np.ascontiguousarray(moves["dst_block"][moves["dst_tier"] == tier])

    def _lose(
        self, moves: NDArray[np.void], problem: BaseException, ticket: Handle | None = None, *, in_use: bool = False
    ) -> None:
        """Give moves up after an exception.

        Those of a ticket that is settled, or that were never queued.

        Where a thread may still write into their destinations, or the scrub could not be told of what those hold, no
        sequence is ever given those blocks again.
        """
        keep = True
        with suppress(BaseException):
            if not in_use and (ticket is None or not left_of(ticket, moves).any()):
                self._scrub.spoilt(moves["dst_block"][moves["dst_tier"] == Tier.DEVICE])
                keep = False
        self._dispatch.give_up(moves, keep=keep)
        with suppress(BaseException):
            log.warning("%d blocks were not moved", len(moves), exc_info=problem)

    def _tell(self, job: Job, tell: Callable[[], Any]) -> None:
        """Call hooks, in the context of the caller that decided."""
        try:
            if job.context is None:
                tell()
            else:
                job.context.run(tell)
        except MemoryError as problem:
            with suppress(BaseException):
                self._hooks.no_memory(problem)
        except BaseException as interrupt:
            self.interrupts.append(interrupt)


_started: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """No thread may still copy when the interpreter frees the arenas.

    The movers' threads are stopped after this.
    """
    for dispatcher in list(_started):
        dispatcher.stop()


def _settled(dispatch: Dispatch, taken: Taken, ticket: Handle) -> None:
    """In a worker's thread.

    The ticket holds `taken`, and with it the moves' memory, while a thread is in it.
    """
    dispatch.wake()


def _work(weakly: weakref.ref[Dispatcher], dispatch: Dispatch) -> None:
    """The dispatcher's thread."""
    pause: float | None = LONGEST_S
    taken: Taken | None = None  # by a round that is not over
    while pause is not None:
        dispatcher = None  # while it waits it holds neither the cache nor, but for AGAIN_S, moves
        try:
            if taken is None:
                taken = dispatch.take(pause)
                dispatcher = weakly()
                if dispatcher is None:
                    return
                pause = dispatcher.round(taken)
            else:
                time.sleep(AGAIN_S)
                dispatcher = weakly()
                if dispatcher is None:
                    return
                dispatcher.recover(taken)
                pause = 0.0
            taken = None
        except BaseException:  # no memory: the thread goes on, and recovers what was taken
            pause = AGAIN_S
