"""The mover's dispatcher: its thread has the core's moves made, and reports their end.

A move belongs to the core until this thread takes it, then to a Taken, and with it to the job that the thread made of
it; the end of the job is the end of the move, whatever raises. No caller ever has a move, so an exception in a caller's
thread loses none. The thread enters no store, so no disk keeps it; small moves in memory it copies itself.

Where the carrier is synchronous there is no thread: callers make its rounds themselves (`Dispatcher.pump`).
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.dispatch import LONGEST_S, Dispatch, Taken
from pagedkv._core.placement import Placement
from pagedkv._core.tier import Tier
from pagedkv.cache.admission import Admission, Reason
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.dispatcher_thread import settled, stop_at_exit, work
from pagedkv.cache.jobs import MOST_UNANSWERED, Job, destinations_of, groups_of, left_of, transfers_of, without_ticket
from pagedkv.cache.remote.sender import Sender
from pagedkv.cache.runtime import SYSTEM, Runtime
from pagedkv.cache.scrub import Scrub
from pagedkv.cache.storage import Carrier, Handle, bytes_of, written
from pagedkv.observe.callbacks import Log, is_interrupt
from pagedkv.observe.hooks import Hooks, Off
from pagedkv.threads import crew
from pagedkv.threads.crew import Thread
from pagedkv.threads.monitor import Monitor

log = Log(logging.getLogger("pagedkv.tiers.mover"))

LATE_S = 10.0  # after its deadline, before a late read counts as hanging: callers then wait for its blocks no more
DEVICE, DISK = int(Tier.DEVICE), int(Tier.DISK)  # for NumPy, which drops an interrupt while it looks at a Tier


class Dispatcher:
    """Carries out a Placement's moves, in a thread of its own.

    Parameters
    ----------
    placement : Placement
    dispatch : Dispatch of `placement`
    carrier : moves the blocks.
    admission : asked about what goes to the disk.
    costs : told how long loads take.
    scrub : told what promotions leave on the device.
    hooks : told of moves.
    runtime : whose clock deadlines go by, and whose thread makes the rounds.

    Attributes
    ----------
    sender : has committed blocks sent to the remote store; None without one.
    context : of the caller that decided last, where there are hooks: they are told of the moves in a copy of it.
    interrupts : KeyboardInterrupt and its like that hooks raised, for callers that wait; where callers make the rounds,
        all that interrupted one, for the caller that makes it.
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
        runtime: Runtime = SYSTEM,
    ) -> None:
        self._placement, self._dispatch, self._carrier = placement, dispatch, carrier
        self._hooks, self._runtime = hooks, runtime
        self._admission, self._costs, self._scrub = admission, costs, scrub
        self._jobs: list[Job] = []
        self.sender: Sender | None = None
        self._thread: Thread | None = None
        self._pumping = Monitor()  # rounds of callers, where there is no thread, come one after the other
        self._taken: Taken | None = None  # by a caller's round that is not over, or was interrupted
        self.closing = self._stopping = self.has_stopped = False  # stopped with the process: no move ends any more
        self.context: contextvars.Context | None = None
        self.interrupts: deque[BaseException] = deque()
        self._pid = os.getpid()

    # ---- life

    def start(self) -> None:
        """Begin to take moves.

        The thread holds this object weakly: a cache that is not closed can be collected.
        """
        weakref.finalize(self, self._dispatch.close).atexit = False
        self._thread = self._runtime.thread(partial(work, weakref.ref(self), self._dispatch), "pagedkv-dispatch")
        stop_at_exit(self)
        crew.start(self._thread)

    @property
    def has_thread(self) -> bool:
        """Whether it was started; if not, :meth:`pump` does the work."""
        return self._thread is not None

    def is_this_thread(self) -> bool:
        """Whether the caller is the dispatcher itself: a hook of ``moves``, or a call of that."""
        if self._pumping.is_mine():
            return True
        thread = self._thread  # `current_thread` would make an object for each thread that has none, and keep it
        return thread is not None and thread.ident == threading.get_ident() and thread.is_alive()

    def close(self) -> None:
        """Finish the moves decided and under way, and end the thread.

        Again is fine, also after an interrupted call.
        """
        self.closing = True
        self._dispatch.wake()
        if self.is_this_thread():
            pass  # it ends the moves under way, and itself, after this round
        elif self._thread is None:
            while self._jobs:
                self.pump()
        else:
            with suppress(RuntimeError):  # `start` was interrupted before there was a thread
                self._thread.join()
        self._dispatch.close()

    def stop(self) -> None:
        """End the thread after its round, whatever is under way: the process ends."""
        if self._thread is not None and self._pid == os.getpid():
            self._stopping = True
            self._dispatch.wake()
            self._thread.join()
            self.has_stopped = True

    # ---- the dispatcher's round

    def pump(self) -> float | None:
        """One round, as :meth:`round`, after those of other threads.

        For caches without a dispatcher's thread. What interrupts the round comes out once it is over; where it cannot
        be ended, this call or the next gives up the moves that it has taken and put into no ticket.
        """
        with self._pumping:
            try:
                self._recover_taken()
                self._taken = self._dispatch.take()
                pause = self.round(self._taken)
                self._taken = None
            except BaseException:
                self._recover_taken()
                raise
            if self.interrupts:
                raise self.interrupts.popleft()
            return pause

    def _recover_taken(self) -> None:
        """Give up the moves of an interrupted round, whose traceback may keep the Taken for ever."""
        if self._taken is not None:
            self.recover(self._taken)
            self._taken = None

    def round(self, taken: Taken | None) -> float | None:
        """Begin the moves taken and end the settled ones.

        Seconds until there may be more to do, None where all is done.

        What goes wrong costs moves, which are given up. Where it raises all the same, there was no memory even for
        that: :meth:`recover` the moves taken.
        """
        if taken is not None:
            upward = taken.moves["dst_tier"] < taken.moves["src_tier"]
            self._begin(taken, taken.moves[~upward], "demote", self._demote)
            self._begin(taken, taken.moves[upward], "promote", self._promote)
        for job in list(self._jobs):
            self._end_settled(job)
        pause = min((self._carrier.watch(ticket) for job in self._jobs for ticket, _ in job.tickets), default=LONGEST_S)
        again_s = None if self.sender is None else self.sender.pump(begins=not self.closing)
        if self._stopping or (self.closing and not self._jobs and again_s is None):
            return None
        return pause if again_s is None else min(pause, again_s)

    def recover(self, taken: Taken) -> None:
        """Give up the moves that a failed round took and put into no ticket.

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
        by_group = self._placement.num_groups > 1
        size, counts = bytes_of(moves, self._carrier, by_group), Job.decided(moves, by_group)
        span = self._hooks.span("moves", moves, direction=direction, **counts, bytes=size)
        job = Job(taken, span, self.context, by_group)
        self._jobs.append(job)  # first: hooks that are told of its begin are told of its end by this round or the next
        self._tell(job, span.__enter__)
        try:
            submit(job, moves)
        except BaseException as problem:  # whatever raises, the thread goes on, and each move is somewhere
            self._lose(without_ticket(moves, [job]), problem)
            self._hear(problem)

    def _demote(self, job: Job, moves: NDArray[np.void]) -> None:
        """Copy to a colder tier, but for what admission refuses."""
        admitted = [part for part in groups_of(moves) if self._is_admitted(part)]
        if admitted:
            self._submit(job, np.concatenate(admitted), None)

    def _promote(self, job: Job, moves: NDArray[np.void]) -> None:
        """Submit a ticket for each tier and deadline.

        All are under way at once, each tier in its own time. Those that have not arrived from the disk in time, or not
        started from memory, are given up, and keep their colder copies. Demotions have no deadline.
        """
        parts: dict[tuple[int, int], list[NDArray[np.void]]] = {}
        for part in transfers_of(moves):
            until = self._dispatch.until(int(part["transfer"][0]))
            parts.setdefault((int(part["src_tier"][0]), until), []).append(part)
        now = int(self._runtime.seconds() * 1e9)
        for (_, until), some in sorted(parts.items(), key=lambda item: item[0]):
            self._submit(job, np.concatenate(some), max(0, until - now) * 1e-9 if until else None)

    def _submit(self, job: Job, moves: NDArray[np.void], deadline_s: float | None) -> None:
        """Have moves carried out: the job has their ticket before they are queued, or none is."""
        on_done, num_tickets = partial(settled, self._dispatch, job.taken), len(job.tickets)
        try:
            ticket = self._carrier.submit(
                moves, deadline_s=deadline_s, on_done=on_done, here=True,
                before=lambda ticket: job.tickets.append((ticket, moves)),
            )  # fmt: skip
            if len(job.tickets) == num_tickets:  # a carrier that has queued without a word
                job.tickets.append((ticket, moves))
        except BaseException:
            del job.tickets[num_tickets:]
            raise

    def _is_admitted(self, group: NDArray[np.void]) -> bool:
        """Whether to write a run with the part of its prefix that its tier lacks, as a whole.

        A refused group is over: a demotion drops its blocks, and a copy leaves its source where it is.
        """
        if group["dst_tier"][0] != DISK:
            return True
        node, reason = int(group["node"][-1]), Reason(int(group["reason"][-1]))
        _, continued, matched = self._placement.prospects(node)
        continued = continued and reason is Reason.EVICTED
        try:
            num_blocks, depth, size = written(group, self._carrier)
            continued = continued and num_blocks > 0  # without a tail, those that go on from it keep their own
            if self._admission.admits(DISK, num_blocks, depth, continued, matched, node, reason, size):
                return True
        except BaseException as interrupt:
            if isinstance(interrupt, Exception):
                raise
            self.interrupts.append(interrupt)  # of the caller's clock: it comes out of a call that waits for moves
            if continued:  # as where the budget fails
                return True
        self._dispatch.give_up(group, announce=not self._hooks.all)  # with hooks, at the end of the job
        return False

    def _end_settled(self, job: Job) -> None:
        for ticket, moves in [entry for entry in list(job.tickets) if self._is_settled(job, *entry)]:
            try:
                self._complete(job, ticket, moves)
            except BaseException as problem:
                self._lose(moves, problem, ticket)  # where that raises, the next round ends the ticket again
                self._hear(problem)
            job.tickets.remove((ticket, moves))
        if not job.tickets:
            try:
                job.span.set(**job.told())
                end = partial(job.span.__exit__, None, None, None)
                if not self._tell(job, end):
                    self._tell(job, end)  # those whom what interrupted it has left out
            finally:
                self._dispatch.announce()
            self._jobs.remove(job)  # last: where this is interrupted, the next round ends the job again

    def _is_settled(self, job: Job, ticket: Handle, moves: NDArray[np.void]) -> bool:
        """Whether a ticket is settled. One that cannot say so is lost: it may be writing yet."""
        try:
            return bool(ticket.is_settled)
        except Exception as problem:
            if self._hear(problem) and not isinstance(problem, MemoryError):
                return False
            job.unanswered += 1
            if not isinstance(problem, MemoryError) or job.unanswered > MOST_UNANSWERED:
                self._lose(moves, problem, in_use=True)
                job.tickets.remove((ticket, moves))
        except BaseException as interrupt:
            self._hear(interrupt)
        return False

    def _hear(self, problem: BaseException) -> bool:
        """Keep what interrupts a caller that makes the round itself; whether it is that."""
        heard = self._thread is None and is_interrupt(problem)
        if heard:
            self.interrupts.append(problem)
        return heard

    def _complete(self, job: Job, ticket: Handle, moves: NDArray[np.void]) -> None:
        """Report a ticket's finished moves to the core."""
        transfers, ok = ticket.results()
        self._keep_left(moves, ticket)
        arrived = ok[np.searchsorted(transfers, moves["transfer"])]
        upward = moves["dst_tier"] == DEVICE
        if not ok.all() or self._scrub.active:  # before another sequence may be given the blocks
            self._scrub.spoilt(moves["dst_block"][upward & ~arrived])
            for part in transfers_of(moves[upward & arrived]):
                self._scrub.holds(part["dst_block"], self._placement.root_of(int(part["node"][0])))
        way = int(moves["src_tier"][0]), int(moves["dst_tier"][0])
        size = bytes_of(moves, self._carrier, job.by_group)
        self._costs.observe_move(way, size, ticket.seconds, whole=bool(ok.all()))
        _, decided = np.unique(moves["transfer"], return_index=True)
        order = np.argsort(decided)  # colder here is colder in the next tier too
        # with hooks, callers go on once the hooks were told, and see the state after it
        at_once = isinstance(job.span, Off) or len(job.tickets) > 1  # this ticket is among them
        self._dispatch.finish(transfers[order], ok[order], ticket.tried()[order], announce=at_once)
        job.arrive(moves, arrived)

    def _keep_left(self, moves: NDArray[np.void], ticket: Handle) -> None:
        """Keep the blocks of a call that was left taken until it is back, after its transfer."""
        left = moves[left_of(ticket, moves)]
        if not len(left):
            return
        for pool, blocks in destinations_of(left, self._placement.pools):
            pool.incref(blocks)
        until, on_device = self._dispatch.until(int(left["transfer"][0])), int((left["dst_tier"] == DEVICE).sum())
        is_late = 0 < until <= int(self._runtime.seconds() * 1e9)  # else it hangs: it was left before any deadline
        if is_late and on_device:
            self._dispatch.hold_late(on_device, LATE_S)
        ticket.when_back(lambda part: self._let_go(moves[part], is_late))

    def _let_go(self, moves: NDArray[np.void], is_late: bool) -> None:
        on_device = moves["dst_tier"] == DEVICE
        self._scrub.spoilt(moves["dst_block"][on_device])
        for pool, blocks in destinations_of(moves, self._placement.pools):
            pool.free(blocks)
        self._dispatch.hold_late(-is_late * int(on_device.sum()))

    def _lose(
        self, moves: NDArray[np.void], problem: BaseException, ticket: Handle | None = None, *, in_use: bool = False
    ) -> None:
        """Give moves up after an exception.

        Those of a ticket that is settled, or that were never queued.

        Where a thread may still write into their destinations, or the scrub could not be told of what those hold, no
        sequence is ever given those blocks again.
        """
        keep = True
        try:
            if not in_use and (ticket is None or not left_of(ticket, moves).any()):
                self._scrub.spoilt(moves["dst_block"][moves["dst_tier"] == DEVICE])
                keep = False
        except BaseException as another:
            self._let_out(another)
        self._dispatch.give_up(moves, keep=keep)
        try:
            log.warning("%d blocks were not moved", len(moves), exc_info=problem)
        except BaseException as another:
            self._let_out(another)

    def _let_out(self, problem: BaseException) -> None:
        """Raise an interrupt of a caller's round while it gives moves up; the next round does."""
        if self._thread is None and is_interrupt(problem):
            raise problem

    def _tell(self, job: Job, tell: Callable[[], Any]) -> bool:
        """Call hooks, in the context of the caller that decided; whether it was to the end."""
        try:
            if job.context is None:
                tell()
            else:
                job.context.run(tell)
            return True
        except MemoryError as problem:
            if not self._hear(problem):
                with suppress(BaseException):
                    self._hooks.no_memory(problem)
        except BaseException as interrupt:
            self.interrupts.append(interrupt)
        return False
