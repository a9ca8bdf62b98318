"""Runs that may be looked at in any order, O(1) to add and to drop."""

from libc.stdint cimport int32_t
from libc.stdlib cimport realloc


cdef bint candidates_add(Candidates* c, int32_t* seats, int32_t n) noexcept nogil:
    cdef int32_t capacity
    cdef int32_t* grown
    seats[n] = NO_SEAT
    if c.count == c.capacity:
        capacity = c.capacity * 2 if c.capacity else 64
        grown = <int32_t*>realloc(c.nodes, capacity * sizeof(int32_t))
        if grown == NULL:
            return False
        c.nodes, c.capacity = grown, capacity
    c.nodes[c.count] = n
    seats[n] = c.count
    c.count += 1
    return True


cdef void candidates_drop(Candidates* c, int32_t* seats, int32_t n) noexcept nogil:
    cdef int32_t seat = seats[n], moved
    if seat == NO_SEAT:
        return
    c.count -= 1
    moved = c.nodes[c.count]
    c.nodes[seat] = moved
    seats[moved] = seat
    seats[n] = NO_SEAT


cdef bint candidates_has(Candidates* c, const int32_t* seats, int32_t n) noexcept nogil:
    return seats[n] != NO_SEAT and seats[n] < c.count and c.nodes[seats[n]] == n
