"""A condition variable that an exception from outside cannot leave locked.

`threading.Condition.__enter__` is a Python function. A signal that arrives after it has taken its lock, and before it has
returned, raises there, and the lock stays taken for good. Here `__enter__` and `__exit__` are C functions, so a signal's
exception comes before the mutex is taken or inside the ``with``, which gives it back.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident

from pagedkv.threads.pthread cimport (
    cond_init_monotonic, cond_wait_ns, mutex_init_recursive, now_ns, pthread_cond_broadcast, pthread_cond_destroy,
    pthread_mutex_destroy, pthread_mutex_lock, pthread_mutex_trylock, pthread_mutex_unlock,
)

cdef enum:
    SLICE_NS = 50_000_000       # a thread that waits looks for signals this often


@cython.final
cdef class Monitor:
    """A recursive mutex and a condition variable.

    With the methods of ``threading.Condition`` that pagedkv needs.

    The thread that has it may run Python code; others wait for it without the GIL.
    """

    def __cinit__(self):
        mutex_init_recursive(&self.mutex)
        cond_init_monotonic(&self.changed)

    def __dealloc__(self):
        pthread_cond_destroy(&self.changed)
        pthread_mutex_destroy(&self.mutex)

    cdef void take(self) noexcept:
        if pthread_mutex_trylock(&self.mutex) != 0:
            with nogil:
                pthread_mutex_lock(&self.mutex)
        self.depth += 1
        self.owner = <unsigned long>PyThread_get_thread_ident()

    cdef void give(self) noexcept:
        self.depth -= 1
        if self.depth == 0:
            self.owner = 0
        pthread_mutex_unlock(&self.mutex)

    cdef void notify(self) noexcept:
        pthread_cond_broadcast(&self.changed)

    def __enter__(self):
        self.take()
        return self

    def __exit__(self, kind, error, trace):
        self.give()

    def is_mine(self):
        """Whether the calling thread has the monitor."""
        return self.owner == <unsigned long>PyThread_get_thread_ident()     # only this thread sets that, or takes it back

    def notify_all(self):
        """Have every thread that waits look at its predicate again. The caller has the monitor."""
        self.notify()

    def wait_for(self, predicate, timeout=None):
        """Wait until ``predicate()`` is true, at most `timeout` seconds; returns its last value.

        The monitor is released while it waits.

        Raises
        ------
        RuntimeError
            The thread has the monitor more than once, so that it could not be let go of.
        BaseException
            Exceptions of a signal's handler, or of the predicate. The thread has the monitor then.
        """
        cdef long long until = -1, pause
        cdef double seconds
        result = predicate()
        if result:
            return result
        if self.depth != 1:
            raise RuntimeError("a thread that has a monitor twice cannot wait for it")
        if timeout is not None:
            seconds = timeout
            until = now_ns() + <long long>(max(0.0, min(seconds, 1e9)) * 1e9)
        while not result:
            pause = SLICE_NS
            if until >= 0:
                pause = min(pause, until - now_ns())
                if pause <= 0:
                    break
            self.depth, self.owner = 0, 0
            with nogil:
                cond_wait_ns(&self.changed, &self.mutex, pause)
            self.depth, self.owner = 1, <unsigned long>PyThread_get_thread_ident()
            PyErr_CheckSignals()
            result = predicate()
        return result
