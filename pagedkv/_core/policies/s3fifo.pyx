"""The policy ``s3fifo``: S3-FIFO (Yang et al., SOSP 2023) over leaves."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free

from pagedkv._core.links cimport Links, coldest, unlink
from pagedkv._core.place cimport POLICY_VERSION, Fate, Place
from pagedkv._core.policies.choosing cimport first_that_may_go, may_go
from pagedkv._core.policies.ghosts cimport Ghosts, ghost_put, ghost_queue
from pagedkv._core.radix_tree cimport tree_split
from pagedkv._core.recency cimport fate_split, is_owned, place_ensure, recency_link, set_queue
from pagedkv._core.types cimport E_MEMORY, MAX_TIERS, NIL, OK


cdef inline Ghosts* ghosts_of(Place* p, int32_t tier) noexcept nogil:
    return &(<Ghosts*>p.state)[tier]


cdef int open_(Place* p, int64_t history) noexcept nogil:
    p.state = calloc(MAX_TIERS, sizeof(Ghosts))
    return OK if p.state != NULL else E_MEMORY


cdef void close(Place* p) noexcept nogil:
    cdef int32_t tier
    if p.state != NULL:
        for tier in range(MAX_TIERS):
            free(ghosts_of(p, tier).slots)
    free(p.state)


cdef void on_hit(Place* p, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    if f.frequency < 3:
        f.frequency += 1


cdef void on_evict(Place* p, int32_t tier, int32_t n, int32_t first, int32_t count) noexcept nogil:
    cdef int32_t i
    if p.fates[n].queue[tier] != 0:
        return
    for i in range(first + count - 1, first - 1, -1):
        ghost_put(p, ghosts_of(p, tier), tier, p.tree.nodes[n].chain[i], 0)


cdef int32_t queue_of(Place* p, int32_t tier, uint64_t chain, bint use_up) noexcept nogil:
    return ghost_queue(p, ghosts_of(p, tier), tier, chain, use_up)


cdef int32_t victim(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int64_t* size = &p.size[tier][0]
    cdef int64_t capacity = p.pools[tier].max_capacity, tries = 6 * capacity + 100, small, count
    cdef int32_t n, upper
    cdef bint from_small
    small = capacity // 10
    if small < 1:
        small = 1
    while tries > 0:
        n = coldest(links, list_no)
        from_small = n >= 0 and (size[0] >= small or size[1] == 0)
        if not from_small:
            n = coldest(links, list_no + 1)
            if n < 0:
                n = coldest(links, list_no)
                if n < 0:
                    return NIL
                from_small = True
        if from_small:
            count = size[0] - small + 1 if size[0] >= small else 1
            if size[1] == 0:
                count = 1
            if may_go(p, tier, n, childless) and p.fates[n].frequency == 0:
                limit[0] = <int32_t>count
                return n
            if count < p.tree.nodes[n].length:      # only the tail of the run moves to the main queue
                upper = NIL
                if place_ensure(p, 1) == OK:
                    upper = tree_split(p.tree, n, p.tree.nodes[n].length - <int32_t>count)
                if upper == NIL:
                    p.no_memory = True
                    return NIL
                fate_split(p, upper, n)
            unlink(links, n)
            set_queue(p, tier, n, 1)
            p.fates[n].frequency = 0
            recency_link(p, tier, n)
        else:
            if may_go(p, tier, n, childless) and p.fates[n].frequency == 0:
                return n
            if p.fates[n].frequency > 0 and not is_owned(p, n, tier):
                p.fates[n].frequency -= 1
            unlink(links, n)
            recency_link(p, tier, n)
        tries -= p.tree.nodes[n].length
    n = first_that_may_go(p, tier, list_no, childless)     # everything in main is held or has children
    return n if n != NIL else first_that_may_go(p, tier, list_no + 1, childless)


S3FIFO.version, S3FIFO.size = POLICY_VERSION, sizeof(Policy)
S3FIFO.needs_chain = S3FIFO.keeps_owned = True
S3FIFO.victim, S3FIFO.open, S3FIFO.close = victim, open_, close
S3FIFO.on_hit, S3FIFO.on_evict, S3FIFO.queue_of = on_hit, on_evict, queue_of
