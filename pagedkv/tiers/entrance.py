"""Who is inside an object with files of its own: many callers at once, or one alone, or nobody any more.

Files must not be closed, nor all slots be changed at once, while another thread is in the middle of a call. A process
that was forked off may not come in at all: its copies of the locks may be held by threads it does not have.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
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
        self._last_out: Callable[[], object] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this process made the object."""
        return self._pid == os.getpid()

    @property
    def is_kept(self) -> bool:
        """Whether a caller is alone inside, or waits for the others to leave."""
        return self._alone

    @contextmanager
    def inside(self, *, waits: bool = True) -> Iterator[bool]:
        """One of many callers: True. Without `waits`, False, and not inside, where one is alone.

        Raises
        ------
        ClosedError
            Shut.
        TierError
            In a process that was forked off.
        """
        self._check_process()
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: not self._alone)
            self._check_open()
            enters = not self._alone
            self._inside += enters
        try:
            yield enters
        finally:
            self._leave(enters)

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
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._inside == 0 or self._lost)
            if self._lost:
                raise TierError(f"{self._what} has a call inside that does not come back: nothing was changed")
            yield
        finally:
            self._leave(alone=True)

    def shut(self) -> bool:
        """Let nobody in any more; False if it was shut before."""
        with self._changed:
            was_shut, self._shut = self._shut, True
        return not was_shut

    def is_empty(self, limit_s: float, last_out: Callable[[], object]) -> bool:
        """Wait until all have left what is shut but those that hang, so many seconds at most; whether nobody is inside.

        If somebody is, `last_out` is called by whoever leaves last; else never.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._inside <= self._lost and not self._alone, limit_s)
            if self._inside or self._alone:
                self._last_out = last_out
                return False
        return True

    def lose_one(self) -> None:
        """A caller inside hangs: nobody waits for it."""
        with self._changed:
            self._lost += 1
            self._changed.notify_all()

    def find_one(self) -> None:
        """A caller that hung has left."""
        with self._changed:
            self._lost -= 1

    def _leave(self, inside: int = 0, *, alone: bool = False) -> None:
        last_out = None
        with self._changed:
            self._inside -= inside
            self._alone = self._alone and not alone
            self._changed.notify_all()
            if not (self._inside or self._alone):
                last_out, self._last_out = self._last_out, None
        if last_out is not None:
            last_out()

    def _check_process(self) -> None:
        if not self.is_ours:  # before any lock
            raise TierError(
                f"{self._what} belongs to process {self._pid}; a forked child must open a directory of its own"
            )

    def _check_open(self) -> None:
        if self._shut:
            raise ClosedError(f"{self._what} is closed")
