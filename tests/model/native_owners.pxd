# The driver's chance, its memory of prompts, and what the rows' part of it needs of the owners' part.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t

from native_world cimport MAX_KNOWN, Holder, Text, World

cdef class Owners(World):
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
