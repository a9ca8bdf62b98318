"""A readers-writer gate that can be closed and refuses forked processes.

It guards an object that owns files: files must not be closed, nor all slots be changed at once, while another thread
is in the middle of a call. A forked child is refused, because its copies of the locks may be held by threads that it
does not have.

The context managers of `inside` and `alone` enter and leave in C, so that no asynchronous exception (a signal
handler's) can come between being counted and being able to leave. Leaving allocates nothing, so it cannot fail for
want of memory. This module uses no `with` itself: Cython allocates the exception that it hands to `__exit__`.
"""

cimport cython

import os

from pagedkv.threads.monitor cimport Monitor
from pagedkv.errors import ClosedError, TierError


@cython.final
cdef class ReadersWriterGate:
    """A readers-writer gate, open from the start.

    Shared by many callers (`inside`) or held by one (`alone`), until `shut`.

    Parameters
    ----------
    what : name of the guarded object, for error messages.
    """

    cdef object what
    cdef object pid
    cdef Monitor changed
    cdef int num_inside
    cdef int num_lost           # callers inside that hang
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
        """Whether a caller is exclusive inside, or waits to be."""
        return self.is_alone

    def inside(self, *, waits=True):
        """Context manager that enters shared; its value is True.

        With ``waits=False`` it does not wait for an exclusive caller: its value is then False, and the caller stays
        outside the gate.

        Raises
        ------
        ClosedError
            The gate is shut.
        TierError
            The calling process is a fork of the one that made the gate.
        """
        return Visit(self, waits, False)

    def alone(self):
        """Context manager that enters exclusive.

        It waits until the others have left, and keeps new ones waiting.

        Raises
        ------
        ClosedError, TierError
            As `inside`; also a TierError where a caller inside hangs.
        """
        return Visit(self, True, True)

    def shut(self):
        """Refuse all further callers; False if the gate was shut before."""
        cdef bint was_shut
        self.changed.take()
        was_shut, self.is_shut = self.is_shut, True
        self.changed.give()
        return not was_shut

    def is_empty(self, limit_s, last_out):
        """After `shut`: wait up to `limit_s` seconds for callers to leave; whether none is left.

        It does not wait for callers that hang.

        If some are left, the last one to leave calls `last_out`; otherwise `last_out` is never called.
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
        """Count one caller inside as hanging: nothing waits for it any more."""
        self.changed.take()
        self.num_lost += 1
        self.changed.notify()
        self.changed.give()

    def find_one(self):
        """Count one hanging caller as back."""
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
    """One caller's stay inside, as a context manager."""

    cdef ReadersWriterGate gate
    cdef bint waits
    cdef bint wants_alone
    cdef int inside
    cdef bint alone

    def __init__(self, ReadersWriterGate gate, waits, wants_alone):
        self.gate, self.waits, self.wants_alone = gate, waits, wants_alone

    def __enter__(self):
        cdef ReadersWriterGate gate = self.gate
        gate.check_process()
        gate.changed.take()
        try:
            if self.waits:
                gate.changed.wait_for(gate._is_free)
            gate.check_open()
            if not self.wants_alone:
                self.inside = not gate.is_alone
                gate.num_inside += self.inside
                return self.inside == 1
            self.alone = gate.is_alone = True
            try:
                gate.changed.wait_for(gate._others_left)
                if gate.num_lost:
                    raise TierError(
                        f"{gate.what} has a call inside that does not come back: nothing was changed")
            except BaseException:
                self.leave()
                raise
            return None
        finally:
            gate.changed.give()

    def __exit__(self, kind, error, trace):
        self.leave()

    def __dealloc__(self):
        if self.inside or self.alone:
            self.leave()

    cdef object leave(self):
        cdef int inside = self.inside
        cdef bint alone = self.alone
        self.inside, self.alone = 0, False
        self.gate.leave(inside, alone)
