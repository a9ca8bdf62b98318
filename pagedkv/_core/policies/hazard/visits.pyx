"""Visits of the policy ``hazard``: slots with generations, handed out and taken back.

Decides nothing.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from pagedkv._core.types cimport E_STALE, NIL, handle_generation, handle_slot, next_generation

cdef enum:
    MAX_VISITS = 65536
    TRIES = 64


cdef void visits_open(Visits* v) noexcept nogil:
    memset(v, 0, sizeof(Visits))
    v.free_slot = NIL


cdef void visits_close(Visits* v) noexcept nogil:
    free(v.at)
    visits_open(v)


# Room for another visit where too many outputs were never told: some old one will not be told any more.
cdef void give_up_a_report(Visits* v, uint64_t random) noexcept nogil:
    cdef int32_t i, slot
    for i in range(TRIES):
        slot = <int32_t>((random + <uint64_t>i) % <uint64_t>v.count)
        if v.at[slot].live and v.at[slot].departed:
            visit_end(v, slot)
            return


cdef int32_t visit_new(Visits* v, uint64_t random) noexcept nogil:
    cdef int32_t slot, capacity
    cdef Visit* grown
    if v.free_slot == NIL and v.count >= MAX_VISITS:
        give_up_a_report(v, random)
    if v.free_slot == NIL:
        capacity = v.count * 2 if v.count else 64
        if capacity > MAX_VISITS:
            return NIL
        grown = <Visit*>realloc(v.at, capacity * sizeof(Visit))
        if grown == NULL:
            return NIL
        v.at = grown
        memset(grown + v.count, 0, (capacity - v.count) * sizeof(Visit))
        for slot in range(capacity - 1, v.count - 1, -1):
            grown[slot].next_free = v.free_slot
            v.free_slot = slot
        v.count = capacity
    slot = v.free_slot
    v.free_slot = v.at[slot].next_free
    v.serial += 1
    v.at[slot].serial = v.serial
    v.at[slot].session = 0
    v.at[slot].live, v.at[slot].departed, v.at[slot].expected, v.at[slot].taken = 1, 0, 0, 0
    return slot


cdef void visit_end(Visits* v, int32_t slot) noexcept nogil:
    v.at[slot].live = 0
    if next_generation(&v.at[slot].generation):
        v.at[slot].next_free = v.free_slot
        v.free_slot = slot


cdef int32_t visit_of(Visits* v, int64_t handle) noexcept nogil:
    cdef int32_t slot = handle_slot(handle)
    if slot < 0 or slot >= v.count or not v.at[slot].live or not v.at[slot].departed:
        return E_STALE
    return slot if v.at[slot].generation == handle_generation(handle) else E_STALE
