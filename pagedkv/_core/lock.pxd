# One mutex per cache. Lock rules:
#   * taken with the GIL held by `acquire` (which lets go of the GIL only if it has to wait), given back by `release`;
#   * between the two no Python object is made, called or released: a finaliser could call back in and wait for itself;
#     Audits do make some: between `begin_audit` and `end_audit`, which stands in a `finally`, the collector is off;
#   * no thread waits for the mutex while it holds the GIL, so a thread that holds the mutex can always get the GIL back.
from libc.stdint cimport int64_t

from pagedkv.threads.pthread cimport pthread_mutex_t

cdef extern from *:
    """
    #include <stdint.h>
    /* A number that is only a hint: read and written without the mutex, never torn, perhaps of a moment ago. */
    static inline int64_t read_hint(const int64_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
    static inline void write_hint(int64_t *at, int64_t value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
    """
    int64_t read_hint(const int64_t* at) nogil
    void write_hint(int64_t* at, int64_t value) nogil

cdef extern from "Python.h":
    int PyGC_Enable()
    int PyGC_Disable()          # whether the collector was on; neither allocates anything

cdef class Lock:
    cdef pthread_mutex_t mutex
    cdef int born               # forks of this process's ancestors when it was made
    cdef int64_t taken          # times so far; written by the thread that has it
    cdef bint is_ours(self) noexcept
    cdef bint may_be_taken(self) noexcept
    cdef void acquire(self) noexcept
    cdef void release(self) noexcept nogil
    cdef bint begin_audit(self) noexcept                    # whether the collector was on, for `end_audit`
    cdef void end_audit(self, bint collecting) noexcept
