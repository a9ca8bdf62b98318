"""Who is inside an object with files of its own: many callers at once, or one alone, or nobody any more.

Files must not be closed, nor all slots be changed at once, while another thread is in the middle of a call. A process
that was forked off may not come in at all: its copies of the locks may be held by threads it does not have.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pagedkv.errors import ClosedError, TierError


class Entrance:
    """Open from the start.

    Parameters
    ----------
    what : what is entered, for the errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._inside = 0
        self._lost = 0  # of them, callers that hang
        self._alone = self._shut = False

    @property
    def is_ours(self) -> bool:
        """Whether this process made the object."""
        return self._pid == os.getpid()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """One of many callers.

        Raises
        ------
        ClosedError
            Shut.
        TierError
            In a process that was forked off.
        """
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._check_open()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The only caller: waits until the others have left, and keeps new ones waiting. Raises as `inside`.

        Raises
        ------
        TierError
            A caller inside hangs.
        """
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._check_open()
            self._alone = True
            self._changed.wait_for(lambda: self._inside == 0 or self._lost)
        try:
            if self._lost:
                raise TierError(f"{self._what} has a call inside that does not come back: nothing was changed")
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def shut(self) -> bool:
        """Let nobody in any more and wait until all have left that do not hang; False if it was shut before."""
        with self._changed:
            if self._shut:
                return False
            self._shut = True
            self._changed.wait_for(lambda: self._inside <= self._lost and not self._alone)
        return True

    @property
    def lost(self) -> int:
        """Callers inside that hang."""
        return self._lost

    def lose_one(self) -> None:
        """A caller inside hangs: nobody waits for it."""
        with self._changed:
            self._lost += 1
            self._changed.notify_all()

    def find_one(self) -> bool:
        """A caller that hung has left; whether it was the last one out of what is shut."""
        with self._changed:
            self._lost -= 1
            return self._shut and not self._lost and not self._inside

    def _check_process(self) -> None:
        if not self.is_ours:  # before any lock
            raise TierError(
                f"{self._what} belongs to process {self._pid}; a forked child must open a directory of its own"
            )

    def _check_open(self) -> None:
        if self._shut:
            raise ClosedError(f"{self._what} is closed")
