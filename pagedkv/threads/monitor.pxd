# For Cython: the same monitor without the methods that Python looks up, which may find no memory.
from pagedkv.threads.pthread cimport pthread_cond_t, pthread_mutex_t

cdef class Monitor:
    cdef pthread_mutex_t mutex      # recursive: a finaliser may run in a thread that has it
    cdef pthread_cond_t changed
    cdef int depth                  # of the thread that has the mutex
    cdef unsigned long owner        # that thread's ident; 0: none has it

    cdef void take(self) noexcept
    cdef void give(self) noexcept
    cdef void notify(self) noexcept
