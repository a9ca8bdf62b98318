"""Evicted blocks by the hash of their prefix."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free


cdef int64_t ghost_find(Ghosts* g, uint64_t key) noexcept nogil:
    cdef int64_t slot
    if g.slots == NULL:
        return -1
    slot = <int64_t>(key >> 7) & g.mask
    while g.slots[slot].queue >= 0:
        if g.slots[slot].key == key:
            return slot
        slot = (slot + 1) & g.mask
    return -1


cdef bint ghost_fresh(Place* p, Ghosts* g, int32_t tier, int64_t slot) noexcept nogil:
    cdef Ghost* e
    if slot < 0:
        return False
    e = &g.slots[slot]
    return e.stamp > 0 and g.count[e.queue] - e.stamp < p.pools[tier].max_capacity


# Keeps only entries that may still count; doubles the table while they fill more than a quarter of it.
cdef bint ghosts_rebuild(Place* p, Ghosts* g, int32_t tier) noexcept nogil:
    cdef Ghosts fresh = g[0]
    cdef int64_t i, kept = 0, slot, size = 1024
    if g.slots != NULL:
        for i in range(g.mask + 1):
            if g.slots[i].queue >= 0 and ghost_fresh(p, g, tier, i):
                kept += 1
    while size < kept * 4:
        size *= 2
    fresh.slots = <Ghost*>calloc(size, sizeof(Ghost))
    if fresh.slots == NULL:
        return False
    fresh.mask = size - 1
    fresh.used = kept
    for i in range(size):
        fresh.slots[i].queue = -1
    if g.slots != NULL:
        for i in range(g.mask + 1):
            if g.slots[i].queue >= 0 and ghost_fresh(p, g, tier, i):
                slot = <int64_t>(g.slots[i].key >> 7) & fresh.mask
                while fresh.slots[slot].queue >= 0:
                    slot = (slot + 1) & fresh.mask
                fresh.slots[slot] = g.slots[i]
        free(g.slots)
    g[0] = fresh
    return True


cdef void ghost_put(Place* p, Ghosts* g, int32_t tier, uint64_t key, int32_t queue) noexcept nogil:
    cdef int64_t slot = ghost_find(g, key)
    if slot < 0:
        if (g.slots == NULL or (g.used + 1) * 2 > g.mask) and not ghosts_rebuild(p, g, tier):
            return
        slot = <int64_t>(key >> 7) & g.mask
        while g.slots[slot].queue >= 0:
            slot = (slot + 1) & g.mask
        g.used += 1
        g.slots[slot].key = key
    g.count[queue] += 1
    g.slots[slot].queue = queue
    g.slots[slot].stamp = g.count[queue]


cdef int32_t ghost_queue(Place* p, Ghosts* g, int32_t tier, uint64_t chain, bint use_up) noexcept nogil:
    cdef int64_t slot
    cdef int32_t queue
    slot = ghost_find(g, chain)
    if slot < 0:
        return 0
    queue = 1 if ghost_fresh(p, g, tier, slot) else 0
    if use_up:
        g.slots[slot].stamp = 0
    return queue
