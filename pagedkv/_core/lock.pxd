# One mutex per cache. Lock rules:
#   * taken with the GIL held by `acquire` (which lets go of the GIL only if it has to wait), given back by `release`;
#   * between the two no Python object is made, called or released: a finaliser could call back in and wait for itself;
#   * nobody waits for the mutex while holding the GIL, so a thread that holds the mutex can always get the GIL back.
from libc.stdint cimport int64_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_trylock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef extern from *:
    """
    #include <stdint.h>
    /* A number that is only a hint: read and written without the mutex, never torn, perhaps of a moment ago. */
    static inline int64_t read_hint(const int64_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
    static inline void write_hint(int64_t *at, int64_t value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
    """
    int64_t read_hint(const int64_t* at) nogil
    void write_hint(int64_t* at, int64_t value) nogil

cdef class Lock:
    cdef pthread_mutex_t mutex
    cdef void acquire(self) noexcept
    cdef void release(self) noexcept nogil
