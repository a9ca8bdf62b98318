"""A Ticket: what came of the moves of one `Mover.submit`, and the way to give up on them.

States of a ticket, in order, never back:

    pending     parts wait in the queue or run
    settled     no thread will touch the memory of its moves any more; the results are final
    done        the mover's ``on_done`` callback has returned as well

A part that waits is dropped by `cancel`; one that runs is finished. Either way the ticket settles.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("pagedkv.tiers.mover")


class Ticket:
    """Made by `Mover.submit`; all methods may be called from any thread.

    Parameters
    ----------
    transfers : int64 [n]
        The transfer that each move belongs to.
    num_parts : int
        Parts the moves were cut into; 0 settles at once.
    deadline : float, optional
        On the mover's clock; parts that have not started by then fail.
    on_done : callable, optional
        Called once with the ticket when it is settled, by the thread that settled it. It must not call
        `wait`.
    """

    def __init__(
        self,
        transfers: NDArray[np.int64],
        num_parts: int,
        deadline: float | None = None,
        on_done: Callable[[Ticket], object] | None = None,
    ) -> None:
        self.deadline = deadline
        self._transfers = transfers
        self._ok = np.zeros(transfers.size, np.bool_)
        self._tried = np.ones(transfers.size, np.bool_)
        self._begun = self._ended = time.perf_counter()
        self._pending = num_parts
        self._on_done = on_done
        self._lock = threading.Lock()
        self._cancelled = False
        self._settled = threading.Event()
        self._done = threading.Event()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the ticket is done, at most `timeout_s` seconds; whether it is."""
        return self._done.wait(timeout_s)

    def done(self) -> bool:
        """Whether the results are final: no thread touches the memory of the moves any more."""
        return self._settled.is_set()

    def results(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Wait until the ticket is settled, then say what became of each transfer.

        Returns
        -------
        transfer_ids : int64 [k], ascending, each once
        ok : bool [k]
            True if every block of the transfer arrived. False: cancelled, late or failed; its destinations
            hold rubbish.
        """
        self._settled.wait()
        ids, index = np.unique(self._transfers, return_inverse=True)
        failed = np.bincount(index.reshape(-1)[~self._ok], minlength=ids.size)
        return ids, failed == 0

    def tried(self) -> NDArray[np.bool_]:
        """Wait until the ticket is settled; bool [k] in the order of `results`.

        False for a transfer that failed only because parts of it never started, cancelled or late: nothing speaks
        against what it was to be read from.
        """
        self._settled.wait()
        ids, index = np.unique(self._transfers, return_inverse=True)
        index = index.reshape(-1)
        failed = np.bincount(index[~self._ok], minlength=ids.size)
        refuted = np.bincount(index[~self._ok & self._tried], minlength=ids.size)
        tried: NDArray[np.bool_] = (failed == 0) | (refuted > 0)
        return tried

    @property
    def seconds(self) -> float:
        """From its making until it was settled."""
        return self._ended - self._begun

    def cancel(self) -> None:
        """Drop what has not started and finish what runs; `results` still says what became of it all."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def part_done(self, moves: NDArray[np.intp], ok: NDArray[np.bool_] | None) -> None:
        """For the mover: a part is over. `ok` is bool per move of the part, or None if none arrived."""
        if ok is not None:
            self._ok[moves] = ok
        with self._lock:
            self._pending -= 1
            last = self._pending == 0
        if last:
            self.settle()

    def not_tried(self, moves: NDArray[np.intp]) -> None:
        """For the mover: these moves were given up before anything of them was read or written."""
        self._tried[moves] = False

    def settle(self) -> None:
        """For the mover: no part is left."""
        self._ended = time.perf_counter()
        self._settled.set()
        try:
            if self._on_done is not None:
                self._on_done(self)
        except BaseException:  # a worker thread survives everything
            log.exception("the on_done callback of a ticket raised; the ticket is done all the same")
        finally:
            self._done.set()
