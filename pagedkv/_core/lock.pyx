"""The mutex that a cache's pool, tree, placement and tables share."""

cimport cython


@cython.final
cdef class Lock:
    """A mutex for the core's own short sections; see lock.pxd for the rules."""

    def __cinit__(self):
        pthread_mutex_init(&self.mutex, NULL)

    def __dealloc__(self):
        pthread_mutex_destroy(&self.mutex)

    cdef void acquire(self) noexcept:
        if pthread_mutex_trylock(&self.mutex) != 0:
            with nogil:
                pthread_mutex_lock(&self.mutex)

    cdef void release(self) noexcept nogil:
        pthread_mutex_unlock(&self.mutex)
