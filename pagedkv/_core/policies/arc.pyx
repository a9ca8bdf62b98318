"""The policy ``arc``: ARC (Megiddo and Modha, FAST 2003) over leaves."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free

from pagedkv._core.place cimport POLICY_VERSION, Place
from pagedkv._core.policies.choosing cimport first_that_may_go
from pagedkv._core.policies.ghosts cimport Ghosts, ghost_find, ghost_fresh, ghost_put, ghost_queue
from pagedkv._core.radix_tree cimport chain_step, node_top
from pagedkv._core.recency cimport set_queue
from pagedkv._core.types cimport E_MEMORY, MAX_TIERS, NIL, OK

cdef struct Arc:
    double target[MAX_TIERS]        # the paper's p: blocks that T1 may hold
    Ghosts ghosts[MAX_TIERS]        # B1 and B2


cdef inline Arc* state_of(Place* p) noexcept nogil:
    return <Arc*>p.state


cdef int open_(Place* p, int64_t history) noexcept nogil:
    p.state = calloc(1, sizeof(Arc))
    return OK if p.state != NULL else E_MEMORY


cdef void close(Place* p) noexcept nogil:
    cdef int32_t tier
    if p.state != NULL:
        for tier in range(MAX_TIERS):
            free(state_of(p).ghosts[tier].slots)
    free(p.state)


cdef void on_hit(Place* p, int32_t n) noexcept nogil:
    if p.fates[n].queue[node_top(p.tree, n)] == 0:
        set_queue(p, node_top(p.tree, n), n, 1)


cdef void on_miss(Place* p, uint64_t chain, const int32_t* tokens, int64_t num_blocks) noexcept nogil:
    cdef int64_t i, slot
    cdef Arc* s = state_of(p)
    cdef double capacity = p.pools[0].max_capacity
    for i in range(num_blocks):
        chain = chain_step(p.tree, chain, tokens + i * p.tree.block_size)
        slot = ghost_find(&s.ghosts[0], chain)
        if ghost_fresh(p, &s.ghosts[0], 0, slot):
            if s.ghosts[0].slots[slot].queue == 0:
                s.target[0] = s.target[0] + 1 if s.target[0] + 1 < capacity else capacity
            else:
                s.target[0] = s.target[0] - 1 if s.target[0] > 1 else 0


cdef void on_evict(Place* p, int32_t tier, int32_t n, int32_t first, int32_t count) noexcept nogil:
    cdef int32_t i
    for i in range(first + count - 1, first - 1, -1):
        ghost_put(p, &state_of(p).ghosts[tier], tier, p.tree.nodes[n].chain[i], p.fates[n].queue[tier])


cdef int32_t queue_of(Place* p, int32_t tier, uint64_t chain, bint use_up) noexcept nogil:
    return ghost_queue(p, &state_of(p).ghosts[tier], tier, chain, use_up)


cdef int32_t victim(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
    cdef int32_t first = 0 if p.size[tier][0] > state_of(p).target[tier] and p.size[tier][0] > 0 else 1
    cdef int32_t n = first_that_may_go(p, tier, list_no + first, childless)
    cdef double surplus = p.size[tier][0] - state_of(p).target[tier]
    if n != NIL and first == 0 and surplus < limit[0]:      # then it is T2's turn
        limit[0] = <int32_t>surplus if surplus == <int32_t>surplus else <int32_t>surplus + 1
    return n if n != NIL else first_that_may_go(p, tier, list_no + 1 - first, childless)


ARC.version, ARC.size = POLICY_VERSION, sizeof(Policy)
ARC.needs_chain = True
ARC.victim, ARC.open, ARC.close = victim, open_, close
ARC.on_hit, ARC.on_miss, ARC.on_evict, ARC.queue_of = on_hit, on_miss, on_evict, queue_of
