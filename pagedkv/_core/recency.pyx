"""Recency lists and the eviction policies on top of them.

``lru``     the coldest leaf.
``arc``     ARC (Megiddo and Modha, FAST 2003) over leaves: T1 seen once, T2 seen again, ghosts adapt T1's share.
``s3fifo``  S3-FIFO (Yang et al., SOSP 2023) over leaves: a small and a main FIFO and a ghost queue.
``cost``    of the coldest leaves, the one whose blocks are cheapest to recompute per expected use: recompute cost grows
            linearly with depth (attention), uses are estimated by frequency over age (as in hyperbolic caching,
            Blankstein et al., ATC 2017).
``hazard``  of some leaves, the one with the fewest expected hits per second of holding it; see hazard.
"""

from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from pagedkv._core.block_pool cimport COUNT
from pagedkv._core.policies.hazard.candidates cimport KEPT, NO_SEAT, Candidates, candidates_add, candidates_drop, candidates_has
from pagedkv._core.policies.hazard.learner cimport (
    hazard_follow, hazard_lru_depth, hazard_random, hazard_rate, hazard_room, hazard_span,
)
from pagedkv._core.policies.hazard.history cimport history_roots
from pagedkv._core.links cimport (
    UNLINKED, Links, coldest, int32s_grow, is_linked, link_between, link_hottest, links_grow, unlink,
)
from pagedkv._core.place cimport ARC, COST, HAZARD, NUM_CLASSES, NUM_LISTS, S3FIFO, Domain, Fate, Ghost, Ghosts, Place
from pagedkv._core.radix_tree cimport chain_step, node_ids, node_top, tree_ensure, tree_split
from pagedkv._core.types cimport E_MEMORY, MAX_TIERS, NIL, OK

cdef enum:
    COST_CANDIDATES = 32
    HAZARD_CANDIDATES = 32
    HAZARD_MORE = 16             # candidates for each further victim of one request


cdef int place_ensure(Place* p, int32_t extra) noexcept nogil:
    cdef int32_t capacity, tier, i
    cdef Fate* fates
    cdef uint8_t* kinds
    if tree_ensure(p.tree, extra) != OK:
        return E_MEMORY
    capacity = p.tree.nodes_capacity
    if capacity <= p.fates_capacity:
        return OK
    fates = <Fate*>realloc(p.fates, capacity * sizeof(Fate))
    if fates == NULL:
        return E_MEMORY
    p.fates = fates
    if not int32s_grow(&p.domain_of, capacity):
        return E_MEMORY
    for tier in range(p.num_tiers):
        if not links_grow(&p.links[tier], p.fates_capacity, capacity):
            return E_MEMORY
    if p.policy == HAZARD and history_roots(&p.hazard.history, capacity) != OK:
        return E_MEMORY
    for tier in range(p.num_tiers if p.policy == HAZARD else 0):
        if not int32s_grow(&p.seats[tier], capacity):
            return E_MEMORY
        for i in range(p.fates_capacity, capacity):
            p.seats[tier][i] = NO_SEAT
    kinds = <uint8_t*>realloc(p.kind_of, capacity)
    if kinds == NULL:
        return E_MEMORY
    p.kind_of = kinds
    memset(kinds + p.fates_capacity, 0, capacity - p.fates_capacity)
    memset(p.fates + p.fates_capacity, 0, (capacity - p.fates_capacity) * sizeof(Fate))
    for i in range(p.fates_capacity, capacity):
        p.domain_of[i] = 0
    p.fates_capacity = capacity
    return OK


cdef void domain_free(Place* p, int32_t d) noexcept nogil:
    cdef int32_t tier
    for tier in range(MAX_TIERS):
        assert p.domains[d].usage[tier] == 0, "a namespace that is forgotten has no blocks"
        p.domains[d].quota[tier] = -1
    p.domains[d].root = p.free_domain
    p.free_domain = d


cdef int domain_new(Place* p, int32_t root) noexcept nogil:
    cdef int32_t tier, i, d = p.free_domain
    cdef int32_t* ends
    cdef Candidates* candidates
    cdef Domain* domains
    if d != NIL:                                # its lists are empty, and it has no quota
        p.free_domain = p.domains[d].root
        p.domains[d].root = root
        return d
    d = p.num_domains
    domains = <Domain*>realloc(p.domains, (d + 1) * sizeof(Domain))
    if domains == NULL:
        return E_MEMORY
    p.domains = domains
    for tier in range(p.num_tiers):
        ends = <int32_t*>realloc(p.links[tier].ends, <size_t>(d + 1) * NUM_LISTS * 2 * sizeof(int32_t))
        if ends == NULL:
            return E_MEMORY
        p.links[tier].ends = ends
        for i in range(d * NUM_LISTS, (d + 1) * NUM_LISTS):
            ends[2 * i] = ends[2 * i + 1] = ~i
        if p.policy == HAZARD:
            candidates = <Candidates*>realloc(p.candidates[tier], <size_t>(d + 1) * NUM_CLASSES * sizeof(Candidates))
            if candidates == NULL:
                return E_MEMORY
            p.candidates[tier] = candidates
            memset(candidates + d * NUM_CLASSES, 0, NUM_CLASSES * sizeof(Candidates))
    memset(&domains[d], 0, sizeof(Domain))
    domains[d].root = root
    for tier in range(MAX_TIERS):
        domains[d].quota[tier] = -1
    p.num_domains = d + 1
    return d


cdef void fate_new(Place* p, int32_t n, int32_t top, int32_t klass, int64_t born) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    cdef int32_t tier
    memset(f, 0, sizeof(Fate))
    f.top = <signed char>top
    f.klass = <unsigned char>klass
    f.transfer = -1
    f.past = NIL
    f.born = born
    f.last_use = p.clock
    for tier in range(p.num_tiers):
        p.links[tier].next[n] = UNLINKED
    p.fates[p.tree.nodes[n].parent].kids[top] += 1


cdef void fate_split(Place* p, int32_t upper, int32_t n) noexcept nogil:
    cdef int32_t tier
    cdef Links* links
    p.fates[upper] = p.fates[n]
    for tier in range(MAX_TIERS):
        p.fates[upper].kids[tier] = 0
    past_follow(p, upper)
    p.fates[upper].kids[p.fates[n].top] = 1     # the parent above sees one child of the same top as before
    for tier in range(p.num_tiers):
        links = &p.links[tier]
        links.next[upper] = UNLINKED
        if is_linked(links, n):
            link_between(links, upper, n, links.next[n])
            may_be_chosen(p, tier, upper)


cdef void past_follow(Place* p, int32_t n) noexcept nogil:
    if p.hazard != NULL:
        hazard_follow(p.hazard, &p.fates[n].past, &p.fates[n].past_generation,
                      p.tree.nodes[n].depth + p.tree.nodes[n].length)


cdef void set_top(Place* p, int32_t n, int32_t top) noexcept nogil:
    cdef Fate* above = &p.fates[p.tree.nodes[n].parent]
    above.kids[p.fates[n].top] -= 1
    above.kids[top] += 1
    p.fates[n].top = <signed char>top
    child_left(p, p.tree.nodes[n].parent)


cdef void child_left(Place* p, int32_t n) noexcept nogil:
    cdef int32_t tier
    if p.policy == HAZARD:
        for tier in range(p.num_tiers):
            if is_linked(&p.links[tier], n) and p.seats[tier][n] == NO_SEAT:
                may_be_chosen(p, tier, n)


cdef int32_t list_of(Place* p, int32_t tier, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    return (p.domain_of[p.tree.nodes[n].root] * NUM_CLASSES + f.klass) * 2 + f.queue[tier]


cdef inline void mark(Place* p, int32_t tier, int32_t list_no) noexcept nogil:
    cdef int32_t local = list_no % NUM_LISTS
    p.domains[list_no // NUM_LISTS].mask[tier][local >> 6] |= <uint64_t>1 << (local & 63)


cdef inline void may_be_chosen(Place* p, int32_t tier, int32_t n) noexcept nogil:
    if p.policy == HAZARD:
        candidates_add(&p.candidates[tier][list_of(p, tier, n) >> 1], p.seats[tier], n)


cdef void recency_link(Place* p, int32_t tier, int32_t n) noexcept nogil:
    cdef int32_t list_no = list_of(p, tier, n)
    link_hottest(&p.links[tier], list_no, n)
    may_be_chosen(p, tier, n)
    mark(p, tier, list_no)


cdef void recency_link_demoted(Place* p, int32_t tier, int32_t n) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int32_t parent = p.tree.nodes[n].parent
    if (is_linked(links, parent) and p.fates[parent].top == tier and p.fates[parent].transfer < 0
            and list_of(p, tier, parent) == list_of(p, tier, n)):
        link_between(links, n, links.prev[parent], parent)
        may_be_chosen(p, tier, n)
    else:
        recency_link(p, tier, n)


cdef void recency_unlink(Place* p, int32_t tier, int32_t n) noexcept nogil:
    if is_linked(&p.links[tier], n):
        unlink(&p.links[tier], n)
        must_not_be_chosen(p, tier, n)


cdef void must_not_be_chosen(Place* p, int32_t tier, int32_t n) noexcept nogil:
    if p.policy == HAZARD and p.seats[tier][n] != NO_SEAT:
        candidates_drop(&p.candidates[tier][list_of(p, tier, n) >> 1], p.seats[tier], n)


cdef bint is_owned(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return p.pools[tier].refs[node_ids(p.tree, n, tier)[0]] & COUNT > 1


# ---- ghosts: evicted blocks by the hash of their prefix

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


cdef bint ghost_fresh(Place* p, int32_t tier, int64_t slot) noexcept nogil:
    cdef Ghosts* g = &p.ghosts[tier]
    cdef Ghost* e
    if slot < 0:
        return False
    e = &g.slots[slot]
    return e.stamp > 0 and g.count[e.queue] - e.stamp < p.pools[tier].max_capacity


# Keeps only entries that may still count; doubles the table while they fill more than a quarter of it.
cdef bint ghosts_rebuild(Place* p, int32_t tier) noexcept nogil:
    cdef Ghosts* g = &p.ghosts[tier]
    cdef Ghosts fresh = g[0]
    cdef int64_t i, kept = 0, slot, size = 1024
    if g.slots != NULL:
        for i in range(g.mask + 1):
            if g.slots[i].queue >= 0 and ghost_fresh(p, tier, i):
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
            if g.slots[i].queue >= 0 and ghost_fresh(p, tier, i):
                slot = <int64_t>(g.slots[i].key >> 7) & fresh.mask
                while fresh.slots[slot].queue >= 0:
                    slot = (slot + 1) & fresh.mask
                fresh.slots[slot] = g.slots[i]
        free(g.slots)
    g[0] = fresh
    return True


cdef void ghost_put(Place* p, int32_t tier, uint64_t key, int32_t queue) noexcept nogil:
    cdef Ghosts* g = &p.ghosts[tier]
    cdef int64_t slot = ghost_find(g, key)
    if slot < 0:
        if (g.slots == NULL or (g.used + 1) * 2 > g.mask) and not ghosts_rebuild(p, tier):
            return
        slot = <int64_t>(key >> 7) & g.mask
        while g.slots[slot].queue >= 0:
            slot = (slot + 1) & g.mask
        g.used += 1
        g.slots[slot].key = key
    g.count[queue] += 1
    g.slots[slot].queue = queue
    g.slots[slot].stamp = g.count[queue]


cdef void ghosts_free(Place* p) noexcept nogil:
    cdef int32_t tier
    for tier in range(MAX_TIERS):
        free(p.ghosts[tier].slots)
        p.ghosts[tier].slots = NULL


# ---- what the policies learn

cdef void set_queue(Place* p, int32_t tier, int32_t n, int32_t queue) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    p.size[tier][f.queue[tier]] -= p.tree.nodes[n].length
    p.size[tier][queue] += p.tree.nodes[n].length
    f.queue[tier] = <unsigned char>queue


cdef void on_hit(Place* p, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    if p.policy == ARC:
        if f.queue[node_top(p.tree, n)] == 0:
            set_queue(p, node_top(p.tree, n), n, 1)
    elif p.policy == S3FIFO:
        if f.frequency < 3:
            f.frequency += 1
    elif p.policy == COST and f.frequency < 255:
        f.frequency += 1


cdef void on_miss(Place* p, uint64_t chain, const int32_t* tokens, int64_t num_blocks) noexcept nogil:
    cdef int64_t i, slot
    cdef double capacity = p.pools[0].max_capacity
    if p.policy != ARC:
        return
    for i in range(num_blocks):
        chain = chain_step(p.tree, chain, tokens + i * p.tree.block_size)
        slot = ghost_find(&p.ghosts[0], chain)
        if ghost_fresh(p, 0, slot):
            if p.ghosts[0].slots[slot].queue == 0:
                p.target[0] = p.target[0] + 1 if p.target[0] + 1 < capacity else capacity
            else:
                p.target[0] = p.target[0] - 1 if p.target[0] > 1 else 0


cdef void on_evict(Place* p, int32_t tier, int32_t n, int32_t first, int32_t count) noexcept nogil:
    cdef int32_t i
    if p.policy != ARC and (p.policy != S3FIFO or p.fates[n].queue[tier] != 0):
        return
    for i in range(first + count - 1, first - 1, -1):
        ghost_put(p, tier, p.tree.nodes[n].chain[i], p.fates[n].queue[tier] if p.policy == ARC else 0)


cdef int32_t ghost_queue(Place* p, int32_t tier, uint64_t chain, bint use_up) noexcept nogil:
    cdef int64_t slot
    cdef int32_t queue
    if p.policy != ARC and p.policy != S3FIFO:
        return 0
    slot = ghost_find(&p.ghosts[tier], chain)
    if slot < 0:
        return 0
    queue = 1 if ghost_fresh(p, tier, slot) else 0
    if use_up:
        p.ghosts[tier].slots[slot].stamp = 0
    return queue


# ---- victims

# Children of run n that are as hot as `tier` or hotter.
cdef inline int32_t hot_children(Place* p, int32_t tier, int32_t n) noexcept nogil:
    cdef int32_t u, children = 0
    for u in range(tier + 1):
        children += p.fates[n].kids[u]
    return children


cdef inline bint may_go(Place* p, int32_t tier, int32_t n, bint childless) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    if f.transfer >= 0:
        return False
    if node_top(p.tree, n) < tier:              # a hotter copy exists: this one is redundant
        return True
    if is_owned(p, n, tier):
        return False
    if f.failed or (childless and p.tree.nodes[n].tiers == <uint32_t>1 << tier):    # it would be lost
        return p.tree.nodes[n].first_child == NIL
    return hot_children(p, tier, n) == 0


cdef int32_t first_that_may_go(Place* p, int32_t tier, int32_t list_no, bint childless) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int32_t n = coldest(links, list_no)
    while n >= 0 and not may_go(p, tier, n, childless):
        n = links.next[n]
    return n if n >= 0 else NIL


cdef int32_t cheapest_of_the_coldest(Place* p, int32_t tier, int32_t list_no, bint childless) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int32_t n = coldest(links, list_no), seen = 0, best = NIL
    cdef double score, best_score = 0
    cdef Fate* f
    while n >= 0 and seen < COST_CANDIDATES:
        if may_go(p, tier, n, childless):
            f = &p.fates[n]
            score = (1 + p.cost_slope * (p.tree.nodes[n].depth + p.tree.nodes[n].length)) * (1 + f.frequency)
            score /= <double>(p.clock - f.last_use + 1)
            if best == NIL or score < best_score:
                best, best_score = n, score
            seen += 1
        n = links.next[n]
    return best


cdef int32_t arc_victim(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
    cdef int32_t first = 0 if p.size[tier][0] > p.target[tier] and p.size[tier][0] > 0 else 1
    cdef int32_t n = first_that_may_go(p, tier, list_no + first, childless)
    cdef double surplus = p.size[tier][0] - p.target[tier]
    if n != NIL and first == 0 and surplus < limit[0]:      # then it is T2's turn
        limit[0] = <int32_t>surplus if surplus == <int32_t>surplus else <int32_t>surplus + 1
    return n if n != NIL else first_that_may_go(p, tier, list_no + 1 - first, childless)


cdef int32_t s3fifo_victim(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
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


# Expected hits per second of holding the last block of run n; what no request has let go of yet comes first.
cdef inline double rate_of(Place* p, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    return hazard_rate(p.hazard, f.past, f.past_generation, p.tree.nodes[n].depth + p.tree.nodes[n].length)


# Blocks at the end of run n that plain LRU would have evicted already.
cdef inline int32_t beyond_lru(Place* p, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    cdef int32_t end = p.tree.nodes[n].depth + p.tree.nodes[n].length
    return end - hazard_lru_depth(p.hazard, f.past, f.past_generation, end)


cdef inline int32_t span_of(Place* p, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    return hazard_span(p.hazard, f.past, f.past_generation, p.tree.nodes[n].depth + p.tree.nodes[n].length)


# The least of the rates among runs that LRU would have evicted already, which is all that the bound leaves to choose from: the
# cold end of the list, and some taken at random. Without any, LRU's own choice.
cdef int32_t least_beyond_lru(
    Place* p, int32_t tier, Candidates* c, int32_t coldest_one, bint childless, int32_t* limit
) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int32_t best = coldest_one, n = coldest_one, seen = 0, steps = 0, _i
    cdef double best_rate = 1e300
    p.hazard.counters.held_back += 1
    while n >= 0 and seen < 2 * HAZARD_CANDIDATES and steps < 8 * HAZARD_CANDIDATES:
        if may_go(p, tier, n, childless):
            if not is_less_beyond_lru(p, n, &best, &best_rate, limit):
                break
            seen += 1
        steps += 1
        n = links.next[n]
    if best_rate < 1e300 and c.count > 2 * HAZARD_CANDIDATES:
        for _i in range(2 * HAZARD_CANDIDATES):
            n = c.nodes[hazard_random(p.hazard) % <uint64_t>c.count]
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
    cdef Candidates* c = &p.candidates[tier][list_no >> 1]
    cdef int32_t coldest_one = first_that_may_go(p, tier, list_no, childless), num_seen = 0, i, j, k, n, most
    cdef int32_t[HAZARD_CANDIDATES + KEPT + 1] seen     # nodes by rising rate, those looked at twice only once
    cdef double[HAZARD_CANDIDATES + KEPT + 1] rates
    cdef int64_t room = hazard_room(p.hazard) if childless else p.tree.max_run
    cdef bint all_of_them
    cdef double rate
    if coldest_one == NIL:
        return NIL
    if room == 0:
        return least_beyond_lru(p, tier, c, coldest_one, childless, limit)
    most = HAZARD_MORE if p.hazard.looked_at == p.hazard.guard.arrivals else HAZARD_CANDIDATES
    p.hazard.looked_at = p.hazard.guard.arrivals
    i = -1 - c.num_kept
    while i < most and i < c.count:
        all_of_them = c.count <= most
        if i == -1:
            n = coldest_one
        elif i < -1:
            n = c.kept[-2 - i]
        else:
            n = c.nodes[i if all_of_them else hazard_random(p.hazard) % c.count]
        i += 1
        if i < 0 and not candidates_has(c, p.seats[tier], n):
            continue
        if not may_go(p, tier, n, childless):
            if hot_children(p, tier, n) > 0:    # until the last of them goes
                candidates_drop(c, p.seats[tier], n)
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


cdef int32_t victim_of(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
    if p.policy == S3FIFO:
        return s3fifo_victim(p, tier, list_no, childless, limit)
    if p.policy == ARC:
        return arc_victim(p, tier, list_no, childless, limit)
    if p.policy == HAZARD:
        return least_hazard(p, tier, list_no, childless, limit)
    if p.policy == COST:
        return cheapest_of_the_coldest(p, tier, list_no, childless)
    return first_that_may_go(p, tier, list_no, childless)


cdef int32_t pick_victim(Place* p, int32_t tier, int32_t domain, bint childless, int32_t* limit) noexcept nogil:
    cdef int32_t d, klass, list_no, n, best = NIL, best_class = NUM_CLASSES, best_limit = 0
    cdef Links* links = &p.links[tier]
    cdef uint64_t word
    for d in range(p.num_domains):
        if domain >= 0 and d != domain:
            continue
        klass = 0
        while klass < NUM_CLASSES and klass <= best_class:
            word = p.domains[d].mask[tier][(klass * 2) >> 6] >> ((klass * 2) & 63)
            if word == 0:
                klass = (((klass * 2) >> 6) + 1) << 5       # nothing more in this word of the mask
                continue
            if word & 3:
                list_no = (d * NUM_CLASSES + klass) * 2
                if coldest(links, list_no) < 0 and coldest(links, list_no + 1) < 0:
                    p.domains[d].mask[tier][(klass * 2) >> 6] &= ~(<uint64_t>3 << ((klass * 2) & 63))
                else:
                    limit[0] = p.tree.max_run
                    n = victim_of(p, tier, list_no, childless, limit)
                    if n != NIL:
                        if best == NIL or klass < best_class or p.fates[n].last_use < p.fates[best].last_use:
                            best, best_class, best_limit = n, klass, limit[0]
                        break
            klass += 1
    limit[0] = best_limit
    return best
