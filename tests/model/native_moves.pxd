# Chance, prompts and moves.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t

from native_world cimport MAX_KNOWN, Text, World

cdef class Moves(World):
    cdef uint64_t state
    cdef Text known[MAX_KNOWN]      # prefixes that were computed lately
    cdef int32_t num_known
    cdef int32_t names[3]           # by namespace: which of `roots` is its present one
    cdef int32_t max_owners
    cdef int32_t max_rows
    cdef int32_t longest            # tokens of a prompt at most
    cdef int32_t trust              # per cent of transfers that succeed
    cdef int32_t now
    cdef readonly dict seen_events
    cdef int32_t below(self, int32_t n) noexcept nogil
    cdef bint chance(self, int32_t percent) noexcept nogil
    cdef void count(self, object event, int64_t n=*)
    cdef cnp.ndarray array(self, const int32_t* tokens, int32_t n)
    cdef int new_root(self, int32_t name) except -1
    cdef void prompt(self, Text* text) noexcept nogil
    cdef void know(self, const Text* text, int32_t num_tokens) noexcept nogil
    cdef int take(self) except -1
    cdef int complete(self, int32_t which, bint ok) except -1
    cdef int finish_all(self, int32_t trust) except -1
    cdef bint make_room(self, int32_t num_blocks, int32_t tier) except -1
    cdef int reserve(self) except -1
    cdef int write_behind(self) except -1
