"""A Ticket: what came of the moves of one `Mover.submit`, and the way to give up on them.

States of a ticket, in order, never back:

    pending     parts wait in the queue or run
    settled     the results are final, and no thread will touch the memory of its moves any more, but for `left`
    done        the mover's ``on_done`` callback has returned as well

A part that waits is dropped by `cancel`; one that runs is finished, or left behind where it is a call into a store that
does not come back in time: it has failed then, whatever it does later, but its thread is still in its memory. Either
way the ticket settles.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from pagedkv.observe.callbacks import Log
from pagedkv.threads.monitor import Monitor

log = Log(logging.getLogger("pagedkv.tiers.mover"))


class Ticket:
    """Made by `Mover.submit`; all methods may be called from any thread.

    Parameters
    ----------
    transfers : int64 [n]
        The transfer that each move belongs to.
    num_parts : int
        Parts the moves were cut into; 0 settles at once.
    deadline : float, optional
        On the mover's clock; parts that have not started by then fail, and reads from a store are left behind.
    on_done : callable, optional
        Called once with the ticket when it is settled, by the thread that settled it. It must not call
        `wait`.
    watch : callable, optional
        ``watch(ticket)`` gives up what takes too long, and returns the seconds after which to call it again; called by
        threads that wait for results. Default: nothing is given up.
    """

    def __init__(
        self,
        transfers: NDArray[np.int64],
        num_parts: int,
        deadline: float | None = None,
        on_done: Callable[[Ticket], object] | None = None,
        watch: Callable[[Ticket], float] | None = None,
    ) -> None:
        self.deadline = deadline
        self._transfers = transfers
        self._ok = np.zeros(transfers.size, np.bool_)
        self._tried = np.ones(transfers.size, np.bool_)
        self._left = np.zeros(transfers.size, np.bool_)
        self._over = np.zeros(transfers.size, np.bool_)  # by the first move of a part
        self._back: list[NDArray[np.intp]] = []  # parts that were left and are back, not reported yet
        self._tell_back: Callable[[NDArray[np.intp]], object] | None = None
        self._begun = self._ended = time.perf_counter()
        self._pending = num_parts
        self._on_done, self._watch = on_done, watch
        self._lock = threading.Lock()
        self._cancelled = False
        self._changed = Monitor()  # a signal's exception may come out of a wait, and leave no lock taken
        self._is_settled = self._is_done = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the ticket is done, at most `timeout_s` seconds; whether it is."""
        return self._wait_for(lambda: self._is_done, timeout_s)

    @property
    def is_settled(self) -> bool:
        """As `done`, but gives up nothing."""
        return self._is_settled

    def done(self) -> bool:
        """Whether the results are final.

        No thread touches the memory of the moves any more, but for those `left`.

        Waits for nothing, but gives up what takes too long.
        """
        return self._wait_for(lambda: self._is_settled, 0)

    def results(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Wait until the ticket is settled, then say what became of each transfer.

        Returns
        -------
        transfer_ids : int64 [k], ascending, each once
        ok : bool [k]
            True if every block of the transfer arrived. False: cancelled, late, left or failed; its destinations
            hold rubbish.
        """
        self._wait()
        ids, index = np.unique(self._transfers, return_inverse=True)
        failed = np.bincount(index.reshape(-1)[~self._ok], minlength=ids.size)
        return ids, failed == 0

    def tried(self) -> NDArray[np.bool_]:
        """Wait until the ticket is settled; bool [k] in the order of `results`.

        False for a transfer that failed only because parts of it never started, cancelled or late, were left while they
        read, or were refused by a store that is off: nothing speaks against its source.
        """
        self._wait()
        ids, index = np.unique(self._transfers, return_inverse=True)
        index = index.reshape(-1)
        failed = np.bincount(index[~self._ok], minlength=ids.size)
        refuted = np.bincount(index[~self._ok & self._tried], minlength=ids.size)
        tried: NDArray[np.bool_] = (failed == 0) | (refuted > 0)
        return tried

    def left(self) -> NDArray[np.bool_]:
        """Wait until settled; bool [n], the moves whose memory is in use until `when_back`.

        A thread that hangs may still touch it.
        """
        self._wait()
        return self._left.copy()

    def when_back(self, tell: Callable[[NDArray[np.intp]], object]) -> None:
        """Have ``tell(moves)`` called for every part that was left, once its thread is back.

        The thread no longer touches the part's memory then.

        Parameters
        ----------
        tell : callable
            By the thread that comes back, or here and now for parts that are back already. It must not wait.
        """
        with self._lock:
            self._tell_back = tell
            back, self._back = self._back, []
        for moves in back:
            tell(moves)

    def _wait(self) -> None:
        self._wait_for(lambda: self._is_settled, None)

    def _wait_for(self, is_over: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `is_over()`, giving up overdue work meanwhile; whether it came in time."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_over():
            watch = self._watch
            pauses = [] if watch is None else [watch(self)]
            if end is not None:
                pauses.append(max(0.0, end - time.monotonic()))
            with self._changed:
                self._changed.wait_for(is_over, min(pauses, default=None))
            if end is not None and time.monotonic() >= end:
                break
        return is_over()

    @property
    def seconds(self) -> float:
        """From its making until it was settled."""
        return self._ended - self._begun

    def cancel(self) -> None:
        """Drop the moves that have not started, and finish those that run.

        `results` still reports every move.
        """
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def part_done(self, moves: NDArray[np.intp], ok: NDArray[np.bool_] | None) -> None:
        """For the mover: a part is over.

        `ok` is bool per move of the part, or None if none arrived.

        To be called again where it raises for want of memory; only the first call that came so far counts.
        """
        with self._lock:
            left = self.is_left(moves)
            again = bool(self._over[moves[0]])
            if ok is not None and not left and not again:
                self._ok[moves] = ok
            if not left and not again:
                self._over[moves[0]] = True
                self._pending -= 1
            last = self._pending == 0
        if left:
            self._came_back(moves)
        elif last and not self._is_done:
            self.settle()

    def leave(self, moves: NDArray[np.intp], *, reading: bool) -> None:
        """For the mover: stop waiting for a part.

        Its `part_done`, when it comes, changes no result.

        To be followed by `one_less`.

        Parameters
        ----------
        moves : of a part that runs and was not left before.
        reading : whether it reads from a store; that it did not come back says nothing against the stored blocks.
        """
        with self._lock:
            self._left[moves] = True
            if reading:
                self._tried[moves] = False

    def is_left(self, moves: NDArray[np.intp]) -> bool:
        """For the mover: whether this part was left."""
        return bool(self._left[moves[0]])

    def one_less(self) -> None:
        """For the mover: there is one part less to wait for."""
        with self._lock:
            self._pending -= 1
            last = self._pending == 0
        if last:
            self.settle()

    def _came_back(self, moves: NDArray[np.intp]) -> None:
        with self._lock:
            tell = self._tell_back
            if tell is None:
                self._back.append(moves)
        try:
            if tell is not None:
                tell(moves)
        except BaseException:  # a worker thread survives everything, and tells once
            with suppress(BaseException):
                log.exception("the callback for a call that is back raised; the call counts as back all the same")

    def not_tried(self, moves: NDArray[np.intp]) -> None:
        """For the mover: these moves were given up before anything of them was read or written."""
        self._tried[moves] = False

    def settle(self) -> None:
        """For the mover: no part is left."""
        self._ended = time.perf_counter()
        self._watch = None
        self._is_settled = True
        self._wake()
        try:
            if self._on_done is not None:
                self._on_done(self)
        except BaseException:  # a worker thread survives everything
            with suppress(BaseException):
                log.exception("the on_done callback of a ticket raised; the ticket is done all the same")
        finally:
            self._is_done = True
            self._wake()

    def _wake(self) -> None:
        """Wake waiters.

        They poll in any case, so a wake-up that fails for want of memory only delays them.
        """
        with suppress(MemoryError), self._changed:
            self._changed.notify_all()
