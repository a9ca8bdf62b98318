"""The functions of the policy ``hazard``, and its memory beside the tree's."""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from pagedkv._core.links cimport int32s_grow
from pagedkv._core.place cimport NUM_CLASSES, POLICY_VERSION, Place
from pagedkv._core.policies.hazard cimport requests, victims
from pagedkv._core.policies.hazard.candidates cimport NO_SEAT, Candidates
from pagedkv._core.policies.hazard.history cimport history_roots
from pagedkv._core.policies.hazard.learner cimport (
    Hazard, hazard_cleared, hazard_clock, hazard_close, hazard_lost, hazard_open, hazard_purged,
)
from pagedkv._core.policies.hazard.victims cimport hazard_of
from pagedkv._core.types cimport E_MEMORY, OK

cdef enum:
    FEWEST = 1 << 16            # blocks remembered by default, at least
    MANY = 1 << 22              # from here on twice the tiers' blocks, and not 16 times


cdef int open_(Place* p, int64_t history) noexcept nogil:
    cdef int64_t capacity = 0
    cdef int32_t tier
    for tier in range(p.num_tiers):
        if p.pools[tier] != NULL:
            capacity += p.pools[tier].max_capacity
    if history < 0:
        history = max(<int64_t>FEWEST, min(16 * capacity, max(<int64_t>MANY, 2 * capacity)))
    p.state = hazard_open(capacity, history)
    return OK if p.state != NULL else E_MEMORY


cdef void close(Place* p) noexcept nogil:
    cdef int32_t tier
    cdef int64_t i
    cdef Hazard* z = hazard_of(p)
    if z == NULL:
        return
    for tier in range(p.num_tiers):
        if z.candidates[tier] != NULL:
            for i in range(<int64_t>p.num_domains * NUM_CLASSES):
                free(z.candidates[tier][i].nodes)
        free(z.candidates[tier])
        free(z.seats[tier])
    hazard_close(z)


cdef int grow(Place* p, int32_t nodes) noexcept nogil:
    cdef Hazard* z = hazard_of(p)
    cdef int32_t tier, i
    if history_roots(&z.history, nodes) != OK:
        return E_MEMORY
    for tier in range(p.num_tiers):
        if not int32s_grow(&z.seats[tier], nodes):
            return E_MEMORY
        for i in range(p.fates_capacity, nodes):
            z.seats[tier][i] = NO_SEAT
    return OK


cdef int grow_domains(Place* p, int32_t domain) noexcept nogil:
    cdef Hazard* z = hazard_of(p)
    cdef int32_t tier
    cdef Candidates* grown
    for tier in range(p.num_tiers):
        grown = <Candidates*>realloc(z.candidates[tier], <size_t>(domain + 1) * NUM_CLASSES * sizeof(Candidates))
        if grown == NULL:
            return E_MEMORY
        z.candidates[tier] = grown
        memset(grown + domain * NUM_CLASSES, 0, NUM_CLASSES * sizeof(Candidates))
    return OK


cdef void on_lost(Place* p, int32_t n, int32_t count) noexcept nogil:
    hazard_lost(hazard_of(p), p.fates[n].past, p.fates[n].past_generation,
                p.tree.nodes[n].depth + p.tree.nodes[n].length, count)


cdef void clock(Place* p, int64_t now_ns) noexcept nogil:
    hazard_clock(hazard_of(p), now_ns)


cdef bint remembers(Place* p, int32_t root) noexcept nogil:
    return hazard_of(p).history.of_root[root] != 0


cdef void on_purge(Place* p, int32_t root) noexcept nogil:
    hazard_purged(hazard_of(p), root)


cdef void on_clear(Place* p) noexcept nogil:
    hazard_cleared(hazard_of(p))


HAZARD.version, HAZARD.size = POLICY_VERSION, sizeof(Policy)
HAZARD.needs_chain = HAZARD.has_history = True
HAZARD.victim, HAZARD.open, HAZARD.close = victims.least_hazard, open_, close
HAZARD.grow, HAZARD.grow_domains = grow, grow_domains
HAZARD.on_link, HAZARD.on_unlink, HAZARD.on_child_left = victims.link, victims.unlink, victims.child_left
HAZARD.on_lost, HAZARD.on_end_moved = on_lost, requests.end_moved
HAZARD.arrive, HAZARD.begin, HAZARD.hint, HAZARD.depart = requests.arrive, requests.begin, requests.hint, requests.depart
HAZARD.clock, HAZARD.remembers, HAZARD.on_purge, HAZARD.on_clear = clock, remembers, on_purge, on_clear
