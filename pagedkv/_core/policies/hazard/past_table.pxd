# The hash table of a History: from the hash of a past's first block to the past. Open addressing, linear probing; a hole
# is closed when a past leaves, so that there are no tombstones.
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from pagedkv._core.policies.hazard.history cimport History
from pagedkv._core.types cimport E_MEMORY, NIL, OK

cdef inline int64_t slot_of(History* h, uint64_t key) noexcept nogil:
    return <int64_t>(key >> 7) & h.mask

cdef inline void table_put(History* h, int32_t p) noexcept nogil:
    cdef int64_t slot = slot_of(h, h.pasts[p].keys[0])
    while h.table[slot] >= 0:
        slot = (slot + 1) & h.mask
    h.table[slot] = p
    h.used += 1

cdef inline void table_drop(History* h, int32_t p) noexcept nogil:
    cdef int64_t slot = slot_of(h, h.pasts[p].keys[0]), hole, home
    while h.table[slot] != p:
        slot = (slot + 1) & h.mask
    hole = slot
    while True:                         # close the gap: no tombstones
        slot = (slot + 1) & h.mask
        if h.table[slot] < 0:
            break
        home = slot_of(h, h.pasts[h.table[slot]].keys[0])
        if (slot - home) & h.mask >= (slot - hole) & h.mask:
            h.table[hole] = h.table[slot]
            hole = slot
    h.table[hole] = NIL
    h.used -= 1

# Room for `extra` more: E_MEMORY with nothing changed.
cdef inline int table_grow(History* h, int64_t extra) noexcept nogil:
    cdef int64_t size = h.mask + 1
    cdef int32_t p
    cdef int32_t* grown
    while (h.used + extra) * 2 > size:
        size *= 2
    if size == h.mask + 1:
        return OK
    grown = <int32_t*>malloc(size * sizeof(int32_t))
    if grown == NULL:
        return E_MEMORY
    memset(grown, 0xFF, size * sizeof(int32_t))
    free(h.table)
    h.table, h.mask, h.used = grown, size - 1, 0
    for p in range(h.num_pasts):
        if h.pasts[p].length > 0:
            table_put(h, p)
    return OK
