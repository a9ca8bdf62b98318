"""Who is inside an object with files of its own: many callers at once, or one alone, or none any more.

Files must not be closed, nor all slots be changed at once, while another thread is in the middle of a call. A process
that was forked off may not come in at all: its copies of the locks may be held by threads it does not have.

What `inside` and `alone` return is entered and left in C, so that no exception from outside can come between being
counted and being able to leave. Leaving makes no object, so that it needs no memory. No `with` is used here: Cython's
needs memory for the exception that it hands to `__exit__`.
"""

cimport cython

import os

from pagedkv.threads.monitor cimport Monitor
from pagedkv.errors import ClosedError, TierError


@cython.final
cdef class Entrance:
    """Open from the start.

    Parameters
    ----------
    what : what is entered, for the errors.
    """

    cdef object what
    cdef object pid
    cdef Monitor changed
    cdef int num_inside
    cdef int num_lost           # of them, callers that hang
    cdef bint is_alone
    cdef bint is_shut
    cdef object last_out

    def __init__(self, what):
        self.what, self.pid, self.changed = what, os.getpid(), Monitor()
        self.last_out = None

    @property
    def is_ours(self):
        """Whether this process made the object."""
        return self.pid == os.getpid()

    @property
    def is_kept(self):
        """Whether a caller is alone inside, or waits for the others to leave."""
        return self.is_alone

    def inside(self, *, waits=True):
        """One of many callers, for ``with``: True. Without `waits`, False, and not inside, where one is alone.

        Raises
        ------
        ClosedError
            Shut.
        TierError
            In a process that was forked off.
        """
        return Visit(self, waits, False)

    def alone(self):
        """The only caller, for ``with``: waits until the others have left, and keeps new ones waiting. Raises as `inside`.

        Raises
        ------
        TierError
            A caller inside hangs.
        """
        return Visit(self, True, True)

    def shut(self):
        """Let no caller in any more; False if it was shut before."""
        cdef bint was_shut
        self.changed.take()
        was_shut, self.is_shut = self.is_shut, True
        self.changed.give()
        return not was_shut

    def is_empty(self, limit_s, last_out):
        """Wait until all have left what is shut but those that hang, so many seconds at most; whether it is empty.

        If it is not, `last_out` is called by the caller that leaves last; else never.
        """
        self.changed.take()
        try:
            self.changed.wait_for(self._is_quiet, limit_s)
            if self.num_inside or self.is_alone:
                self.last_out = last_out
                return False
            return True
        finally:
            self.changed.give()

    def lose_one(self):
        """A caller inside hangs: others do not wait for it."""
        self.changed.take()
        self.num_lost += 1
        self.changed.notify()
        self.changed.give()

    def find_one(self):
        """A caller that hung has left."""
        self.changed.take()
        self.num_lost -= 1
        self.changed.give()

    def _is_quiet(self):
        return self.num_inside <= self.num_lost and not self.is_alone

    def _is_free(self):
        return not self.is_alone

    def _others_left(self):
        return self.num_inside == 0 or self.num_lost > 0

    cdef object check_process(self):
        if not self.is_ours:            # before any lock
            raise TierError(
                f"{self.what} belongs to process {self.pid}; a forked child must open a directory of its own")

    cdef object check_open(self):
        if self.is_shut:
            raise ClosedError(f"{self.what} is closed")

    cdef object leave(self, int inside, bint alone):
        cdef object last_out = None
        self.changed.take()
        self.num_inside -= inside
        if alone:
            self.is_alone = False
        self.changed.notify()
        if not (self.num_inside or self.is_alone):
            last_out, self.last_out = self.last_out, None
        self.changed.give()
        if last_out is not None:
            last_out()


@cython.final
@cython.no_gc_clear
cdef class Visit:
    """A caller's time inside."""

    cdef Entrance entrance
    cdef bint waits
    cdef bint wants_alone
    cdef int inside
    cdef bint alone

    def __init__(self, Entrance entrance, waits, wants_alone):
        self.entrance, self.waits, self.wants_alone = entrance, waits, wants_alone

    def __enter__(self):
        cdef Entrance entrance = self.entrance
        entrance.check_process()
        entrance.changed.take()
        try:
            if self.waits:
                entrance.changed.wait_for(entrance._is_free)
            entrance.check_open()
            if not self.wants_alone:
                self.inside = not entrance.is_alone
                entrance.num_inside += self.inside
                return self.inside == 1
            self.alone = entrance.is_alone = True
            try:
                entrance.changed.wait_for(entrance._others_left)
                if entrance.num_lost:
                    raise TierError(
                        f"{entrance.what} has a call inside that does not come back: nothing was changed")
            except BaseException:
                self.leave()
                raise
            return None
        finally:
            entrance.changed.give()

    def __exit__(self, kind, error, trace):
        self.leave()

    def __dealloc__(self):
        if self.inside or self.alone:
            self.leave()

    cdef object leave(self):
        cdef int inside = self.inside
        cdef bint alone = self.alone
        self.inside, self.alone = 0, False
        self.entrance.leave(inside, alone)
