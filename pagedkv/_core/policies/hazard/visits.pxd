# Requests under way, and those that are over but have not told their output yet. A slot each, at most MAX_VISITS.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

cdef struct Visit:
    int64_t serial
    uint64_t session            # 0: not named
    int32_t generation
    int32_t next_free
    int32_t num_blocks          # of its prompt
    int32_t known               # of these, remembered when it arrived
    int32_t missing             # of these, neither remembered nor matched
    int32_t turn
    int32_t end                 # its deepest past: of what was known, and of its whole path once it has departed
    int32_t end_generation
    int64_t reserved            # blocks for which LRU has made room already
    float parent_gap            # seconds since its prefix was used, < 0: no prefix
    float parent_output
    float mean_gap              # of its prefix, inherited where it goes on where that ended
    float least_gap
    uint8_t expected            # bucket of the time after which the caller expects the next use; 0: it said nothing
    uint8_t taken               # LRU has made room for all of it
    uint8_t live
    uint8_t departed
    uint8_t extends

cdef struct Visits:
    Visit* at
    int32_t count
    int32_t free_slot
    int64_t serial

cdef void visits_open(Visits* v) noexcept nogil
cdef void visits_close(Visits* v) noexcept nogil
# A visit that has just begun, or NIL: no memory, or too many. `random` chooses the one whose output is never reported
# where all slots are taken.
cdef int32_t visit_new(Visits* v, uint64_t random) noexcept nogil
cdef void visit_end(Visits* v, int32_t slot) noexcept nogil
cdef int32_t visit_of(Visits* v, int64_t handle) noexcept nogil         # that has departed, or E_STALE
