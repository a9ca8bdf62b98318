"""The choice of a victim: of some leaves, the one with the fewest expected hits per second."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._core.links cimport Links, is_linked
from pagedkv._core.place cimport Fate, Place
from pagedkv._core.policies.choosing cimport first_that_may_go, hot_children, may_go
from pagedkv._core.policies.hazard.candidates cimport (
    KEPT, NO_SEAT, Candidates, candidates_add, candidates_drop, candidates_has,
)
from pagedkv._core.policies.hazard.learner cimport (
    hazard_lru_depth, hazard_random, hazard_rate, hazard_room, hazard_span,
)
from pagedkv._core.recency cimport list_of
from pagedkv._core.types cimport NIL

cdef enum:
    HAZARD_CANDIDATES = 32
    HAZARD_MORE = 16             # candidates for each further victim of one request


# ---- candidates

cdef void link(Place* p, int32_t tier, int32_t n) noexcept nogil:
    candidates_add(&hazard_of(p).candidates[tier][list_of(p, tier, n) >> 1], hazard_of(p).seats[tier], n)


cdef void unlink(Place* p, int32_t tier, int32_t n) noexcept nogil:
    if hazard_of(p).seats[tier][n] != NO_SEAT:
        candidates_drop(&hazard_of(p).candidates[tier][list_of(p, tier, n) >> 1], hazard_of(p).seats[tier], n)


cdef void child_left(Place* p, int32_t n) noexcept nogil:
    cdef int32_t tier
    for tier in range(p.num_tiers):
        if is_linked(&p.links[tier], n) and hazard_of(p).seats[tier][n] == NO_SEAT:
            link(p, tier, n)


# ---- the choice

# Expected hits per second of holding the last block of run n; what no request has let go of yet comes first.
cdef inline double rate_of(Place* p, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    return hazard_rate(hazard_of(p), f.past, f.past_generation, p.tree.nodes[n].depth + p.tree.nodes[n].length)


# Blocks at the end of run n that plain LRU would have evicted already.
cdef inline int32_t beyond_lru(Place* p, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    cdef int32_t end = p.tree.nodes[n].depth + p.tree.nodes[n].length
    return end - hazard_lru_depth(hazard_of(p), f.past, f.past_generation, end)


cdef inline int32_t span_of(Place* p, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    return hazard_span(hazard_of(p), f.past, f.past_generation, p.tree.nodes[n].depth + p.tree.nodes[n].length)


# The least of the rates among runs that LRU would have evicted already, which is all that the bound leaves to choose from: the
# cold end of the list, and some taken at random. Without any, LRU's own choice.
cdef int32_t least_beyond_lru(
    Place* p, int32_t tier, Candidates* c, int32_t coldest_one, bint childless, int32_t* limit
) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int32_t best = coldest_one, n = coldest_one, seen = 0, steps = 0, _i
    cdef double best_rate = 1e300
    hazard_of(p).counters.held_back += 1
    while n >= 0 and seen < 2 * HAZARD_CANDIDATES and steps < 8 * HAZARD_CANDIDATES:
        if may_go(p, tier, n, childless):
            if not is_less_beyond_lru(p, n, &best, &best_rate, limit):
                break
            seen += 1
        steps += 1
        n = links.next[n]
    if best_rate < 1e300 and c.count > 2 * HAZARD_CANDIDATES:
        for _i in range(2 * HAZARD_CANDIDATES):
            n = c.nodes[hazard_random(hazard_of(p)) % <uint64_t>c.count]
            if may_go(p, tier, n, childless):
                is_less_beyond_lru(p, n, &best, &best_rate, limit)
    return best


# False: LRU has all of run n.
cdef bint is_less_beyond_lru(Place* p, int32_t n, int32_t* best, double* best_rate, int32_t* limit) noexcept nogil:
    cdef int32_t surplus = beyond_lru(p, n)
    cdef double rate
    if surplus == 0:
        return False
    rate = rate_of(p, n)
    if rate < best_rate[0]:
        best[0], best_rate[0], limit[0] = n, rate, surplus
    return True


# The least of the rates among the coldest run, some taken at random, and the best of those that were looked at before but
# not taken: power of choice with memory (Mitzenmacher, Prabhakar and Shah, FOCS 2002).
cdef int32_t least_hazard(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
    cdef Candidates* c = &hazard_of(p).candidates[tier][list_no >> 1]
    cdef int32_t coldest_one = first_that_may_go(p, tier, list_no, childless), num_seen = 0, i, j, k, n, most
    cdef int32_t[HAZARD_CANDIDATES + KEPT + 1] seen     # nodes by rising rate, those looked at twice only once
    cdef double[HAZARD_CANDIDATES + KEPT + 1] rates
    cdef int64_t room = hazard_room(hazard_of(p)) if childless else p.tree.max_run
    cdef bint all_of_them
    cdef double rate
    if coldest_one == NIL:
        return NIL
    if room == 0:
        return least_beyond_lru(p, tier, c, coldest_one, childless, limit)
    most = HAZARD_MORE if hazard_of(p).looked_at == hazard_of(p).guard.arrivals else HAZARD_CANDIDATES
    hazard_of(p).looked_at = hazard_of(p).guard.arrivals
    i = -1 - c.num_kept
    while i < most and i < c.count:
        all_of_them = c.count <= most
        if i == -1:
            n = coldest_one
        elif i < -1:
            n = c.kept[-2 - i]
        else:
            n = c.nodes[i if all_of_them else hazard_random(hazard_of(p)) % c.count]
        i += 1
        if i < 0 and not candidates_has(c, hazard_of(p).seats[tier], n):
            continue
        if not may_go(p, tier, n, childless):
            if hot_children(p, tier, n) > 0:    # until the last of them goes
                candidates_drop(c, hazard_of(p).seats[tier], n)
                if all_of_them and i > 0:
                    i -= 1
            continue
        rate = rate_of(p, n)
        j = num_seen
        if j == KEPT + 1 and not (rate < rates[j - 1]):
            continue
        while j > 0 and (rate < rates[j - 1] or (rate == rates[j - 1] and p.fates[n].last_use < p.fates[seen[j - 1]].last_use)):
            j -= 1
        if j > 0 and seen[j - 1] == n:
            continue
        num_seen = min(num_seen + 1, KEPT + 1)
        for k in range(num_seen - 1, j, -1):
            seen[k], rates[k] = seen[k - 1], rates[k - 1]
        seen[j], rates[j] = n, rate
    c.num_kept = num_seen - 1
    for i in range(1, num_seen):
        c.kept[i - 1] = seen[i]
    n = seen[0]
    limit[0] = min(limit[0], span_of(p, n))
    room += beyond_lru(p, n)
    if room < limit[0]:
        limit[0] = <int32_t>room
    return n
