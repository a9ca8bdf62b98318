# The runs of one recency list in an array, for policies that look at some of them at random. No order is kept.
from libc.stdint cimport int32_t

cdef enum:
    NO_SEAT = -1
    KEPT = 8                    # of those looked at, the best ones are looked at again next time

cdef struct Candidates:
    int32_t* nodes              # [capacity], owned
    int32_t count
    int32_t capacity
    int32_t kept[KEPT]          # best first; each may have left since
    int32_t num_kept

# `seat` is the node's place in the array. False: no memory; the run is then found through its recency list alone.
cdef bint candidates_add(Candidates* c, int32_t* seats, int32_t n) noexcept nogil
cdef bint candidates_has(Candidates* c, const int32_t* seats, int32_t n) noexcept nogil
cdef void candidates_drop(Candidates* c, int32_t* seats, int32_t n) noexcept nogil
