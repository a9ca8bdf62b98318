# Blocks evicted lately, by the hash of their prefix: good for decisions, never for identity.
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._core.place cimport Place

cdef struct Ghost:
    uint64_t key
    int64_t stamp
    int64_t queue           # -1: empty slot

cdef struct Ghosts:
    Ghost* slots
    int64_t mask
    int64_t used
    int64_t count[2]        # evictions so far, per queue

# `g` are those of `tier`, whose capacity says how long a ghost counts. Without memory a ghost is not kept.
cdef int64_t ghost_find(Ghosts* g, uint64_t key) noexcept nogil                     # its slot, -1 if it is not there
cdef bint ghost_fresh(Place* p, Ghosts* g, int32_t tier, int64_t slot) noexcept nogil
cdef void ghost_put(Place* p, Ghosts* g, int32_t tier, uint64_t key, int32_t queue) noexcept nogil
# 1 where a fresh ghost has this prefix hash, else 0; with `use_up` it counts no more.
cdef int32_t ghost_queue(Place* p, Ghosts* g, int32_t tier, uint64_t chain, bint use_up) noexcept nogil
