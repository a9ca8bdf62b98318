# Owners of prefixes, blocks that the driver holds by itself, namespaces.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from native_moves cimport Moves
from native_world cimport Holder, Text

cdef class Owners(Moves):
    cdef int32_t blocks_below(self, int64_t handle) noexcept nogil
    cdef int32_t read_match(self, const Text* text, cnp.ndarray tiers, cnp.ndarray blocks) except -1
    cdef int64_t acquire(self, const Text* text, int64_t limit) except -1
    cdef int do_acquire(self, bint whole) except -1
    cdef int bring_up(self, Holder* ours) except -1
    cdef int insert(self, Holder* ours) except -1
    cdef int release(self, int32_t who) except -1
    cdef int share(self) except -1
    cdef int pin(self, Holder* ours) except -1
    cdef int shorten(self, Holder* ours) except -1
    cdef int hold(self) except -1
    cdef int let_go(self) except -1
    cdef int look(self) except -1
    cdef int retain(self) except -1
    cdef int quota(self) except -1
    cdef int drop(self) except -1
