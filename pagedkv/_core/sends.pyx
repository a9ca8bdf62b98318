"""Sends: runs that other processes are to find in the store behind the claims."""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, malloc

from pagedkv._core.place cimport Place, Wanted, Write
from pagedkv._core.radix_tree cimport is_remainder, node_top
from pagedkv._core.types cimport DEVICE, NIL
from pagedkv.threads.pthread cimport pthread_cond_signal

cdef enum:
    MOST_SENDS = 65536


cdef bint grow(Place* p) noexcept nogil:
    cdef int64_t i, capacity = 2 * p.sends_capacity if p.sends_capacity else 64
    cdef Wanted* grown = <Wanted*>malloc(capacity * sizeof(Wanted)) if capacity <= MOST_SENDS else NULL
    if grown == NULL:
        return False
    for i in range(p.num_sends):
        grown[i] = p.sends[(p.sends_head + i) % p.sends_capacity]
    free(p.sends)
    p.sends, p.sends_capacity, p.sends_head = grown, capacity, 0
    return True


# The oldest wish; without its bit if its run is still there.
cdef Wanted pop(Place* p) noexcept nogil:
    cdef Wanted entry = p.sends[p.sends_head]
    p.sends_head = (p.sends_head + 1) % p.sends_capacity
    p.num_sends -= 1
    if is_there(p, entry):
        p.fates[entry.node].wanted &= <uint8_t>~(1 << entry.tier)
    return entry


cdef bint is_there(Place* p, Wanted entry) noexcept nogil:
    return p.tree.nodes[entry.node].root != NIL and p.tree.nodes[entry.node].generation == entry.generation


cdef void want_send(Place* p, int32_t n, Write least) noexcept nogil:
    cdef int32_t tier = p.coldest + 1
    cdef Wanted* entry
    if p.sends_when < least or tier == p.num_tiers:
        return
    while p.tree.nodes[n].length > 0 and (p.fates[n].sent == p.tree.nodes[n].length or is_remainder(p.tree, n)):
        n = p.tree.nodes[n].parent
    if p.tree.nodes[n].length == 0 or (p.fates[n].wanted >> tier) & 1:
        return
    if p.num_sends == p.sends_capacity and not grow(p):
        if p.num_sends == 0:
            return                                  # without memory it waits for its next use
        pop(p)
        p.sends_dropped += 1
    entry = &p.sends[(p.sends_head + p.num_sends) % p.sends_capacity]
    entry.node, entry.generation, entry.tier, entry.left = n, p.tree.nodes[n].generation, tier, 0
    p.fates[n].wanted |= <uint8_t>(1 << tier)
    p.num_sends += 1
    p.send_news = True
    if p.decided != NULL:                           # as for a move: who sends them hears of it
        pthread_cond_signal(p.decided)


# The first unsent block of the path to run n; NIL if one of those from there on is not on the device, where a block stays as
# it is while it is owned.
cdef int32_t first_unsent(Place* p, int32_t n) noexcept nogil:
    cdef int32_t at = n, top = n, first = NIL
    while p.tree.nodes[at].length > 0:
        if p.fates[at].sent < p.tree.nodes[at].length:
            top = at
            first = p.tree.nodes[at].depth + p.fates[at].sent
        at = p.tree.nodes[at].parent
    at = n
    while first >= 0:
        if p.fates[at].failed or node_top(p.tree, at) != DEVICE:
            return NIL
        if at == top:
            return first
        at = p.tree.nodes[at].parent
    return NIL


cdef int32_t next_unsent(Place* p, int32_t* first) noexcept nogil:
    cdef Wanted entry
    while p.num_sends > 0:
        entry = pop(p)
        first[0] = NIL
        if is_there(p, entry) and p.tree.nodes[entry.node].length > 0 and not p.fates[p.tree.nodes[entry.node].root].failed:
            first[0] = first_unsent(p, entry.node)
        if first[0] >= 0:
            return entry.node
        p.sends_dropped += 1
    return NIL


cdef void mark_sent(Place* p, int32_t n, int32_t first, bint sent) noexcept nogil:
    while p.tree.nodes[n].length > 0 and p.tree.nodes[n].depth + p.tree.nodes[n].length > first:
        p.fates[n].sent = p.tree.nodes[n].length if sent else max(0, first - p.tree.nodes[n].depth)
        n = p.tree.nodes[n].parent
