"""The mutex that a cache's pool, tree, placement and tables share."""

cimport cython

import os

from pagedkv.threads.ending import at_end
from pagedkv.threads.pthread cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_trylock, pthread_mutex_unlock,
)

cdef int forks = 0
cdef bint ending = False


def _forked():
    """This process was forked off.

    The threads that have its copies of the mutexes are not in it.
    """
    global forks
    forks += 1


def _end():
    """The interpreter is ending.

    Threads are stopped where they ask for the GIL, and one may have a mutex then.
    """
    global ending
    ending = True


os.register_at_fork(after_in_child=_forked)
at_end(_end)


@cython.final
cdef class Lock:
    """A mutex for the core's own short sections; see lock.pxd for the rules."""

    def __cinit__(self):
        pthread_mutex_init(&self.mutex, NULL)
        self.born = forks

    def __dealloc__(self):
        pthread_mutex_destroy(&self.mutex)

    cdef void acquire(self) noexcept:
        if pthread_mutex_trylock(&self.mutex) != 0:
            with nogil:
                pthread_mutex_lock(&self.mutex)
        write_hint(&self.taken, self.taken + 1)

    cdef void release(self) noexcept nogil:
        pthread_mutex_unlock(&self.mutex)

    cdef bint is_ours(self) noexcept:       # False in a forked child: whatever is guarded is the parent's
        return self.born == forks

    cdef bint may_be_taken(self) noexcept:  # by what dies: not where another thread may have it for good
        return self.born == forks and not ending

    cdef bint begin_audit(self) noexcept:
        cdef bint collecting = PyGC_Disable()
        self.acquire()
        return collecting

    cdef void end_audit(self, bint collecting) noexcept:
        self.release()
        if collecting:
            PyGC_Enable()
