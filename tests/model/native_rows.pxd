# Sequences and their steps.
from libc.stdint cimport int32_t, int64_t

from native_owners cimport Owners
from native_world cimport Holder

cdef class Rows(Owners):
    cdef int open_row(self, bint promoted) except -1
    cdef int reuse_part(self, Holder* ours, int32_t block, int32_t common) except -1
    cdef int end_row(self, int32_t who) except -1
    cdef int extend(self) except -1
    cdef list idle_rows(self)
    cdef bint any_in_step(self) noexcept nogil
    cdef int step(self) except -1
    cdef int begun(self, list chosen, object arrays) except -1
    cdef int end_step(self) except -1
    cdef int computed(self, list chosen) except -1
    cdef int advance(self, list chosen, object handles) except -1
    cdef int fork(self) except -1
    cdef int truncate(self, int32_t who) except -1
