"""Recency lists, one set per tier, and the choice of a victim among them.

A list holds the runs of one retention class that the tree alone owns, from cold to hot. Which of a list's runs goes first is
the policy's to say (place.pxd, policies/).
"""

from libc.stdint cimport uint8_t
from libc.stdlib cimport realloc
from libc.string cimport memset

from pagedkv._core.block_pool cimport COUNT
from pagedkv._core.links cimport (
    UNLINKED, Links, coldest, int32s_grow, is_linked, link_between, link_hottest, links_grow, unlink,
)
from pagedkv._core.place cimport NUM_CLASSES, NUM_LISTS, Domain, Fate, Place
from pagedkv._core.policies.choosing cimport first_that_may_go, may_go
from pagedkv._core.radix_tree cimport node_ids, tree_ensure
from pagedkv._core.types cimport E_MEMORY, MAX_TIERS, NIL, OK, handle_slot


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
    for tier in range(p.num_tiers if p.groups != NULL else 0):
        if not links_grow(&p.groups.points[tier], p.fates_capacity, capacity):
            return E_MEMORY
    if p.policy.grow != NULL and p.policy.grow(p, capacity) != OK:
        return E_MEMORY
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
    for tier in range(p.num_tiers if p.groups != NULL else 0):
        ends = <int32_t*>realloc(p.groups.points[tier].ends, <size_t>(d + 1) * NUM_CLASSES * 2 * sizeof(int32_t))
        if ends == NULL:
            return E_MEMORY
        p.groups.points[tier].ends = ends
        for i in range(d * NUM_CLASSES, (d + 1) * NUM_CLASSES):
            ends[2 * i] = ends[2 * i + 1] = ~i
    if p.policy.grow_domains != NULL and p.policy.grow_domains(p, d) != OK:
        return E_MEMORY
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
    f.transfer = f.copying = -1
    f.past = NIL
    f.born = born
    f.last_use = p.clock
    for tier in range(p.num_tiers):
        p.links[tier].next[n] = UNLINKED
        if p.groups != NULL:
            p.groups.points[tier].next[n] = UNLINKED
    p.fates[p.tree.nodes[n].parent].kids[top] += 1


cdef void fate_split(Place* p, int32_t upper, int32_t n) noexcept nogil:
    cdef int32_t tier
    cdef Links* links
    p.fates[upper] = p.fates[n]
    p.fates[upper].point = p.fates[upper].tails = 0     # they stand at the end
    p.fates[upper].wanted = 0                   # the lower part's entry in the ring stands for its path
    p.fates[upper].sent = min(p.fates[n].sent, p.tree.nodes[upper].length)
    p.fates[n].sent -= p.fates[upper].sent
    for tier in range(MAX_TIERS):
        p.fates[upper].kids[tier] = 0
        p.fates[upper].below[tier] = (p.tree.nodes[n].tiers >> tier) & 1
    if p.fates[n].copying >= 0:                 # and is on its way to one more
        p.fates[upper].below[p.transfers[handle_slot(p.fates[n].copying)].dst] += 1
    end_moved(p, upper)
    p.fates[upper].kids[p.fates[n].top] = 1     # the parent above sees one child of the same top as before
    for tier in range(p.num_tiers):
        links = &p.links[tier]
        links.next[upper] = UNLINKED
        if p.groups != NULL:
            p.groups.points[tier].next[upper] = UNLINKED
        if is_linked(links, n):
            link_between(links, upper, n, links.next[n])
            may_be_chosen(p, tier, upper)


cdef void set_top(Place* p, int32_t n, int32_t top) noexcept nogil:
    cdef Fate* above = &p.fates[p.tree.nodes[n].parent]
    above.kids[p.fates[n].top] -= 1
    above.kids[top] += 1
    p.fates[n].top = <signed char>top
    child_left(p, p.tree.nodes[n].parent)


cdef int32_t list_of(Place* p, int32_t tier, int32_t n) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    return (p.domain_of[p.tree.nodes[n].root] * NUM_CLASSES + f.klass) * 2 + f.queue[tier]


cdef inline void mark(Place* p, int32_t tier, int32_t list_no) noexcept nogil:
    cdef int32_t local = list_no % NUM_LISTS
    p.domains[list_no // NUM_LISTS].mask[tier][local >> 6] |= <uint64_t>1 << (local & 63)


cdef void recency_link(Place* p, int32_t tier, int32_t n) noexcept nogil:
    cdef int32_t list_no = list_of(p, tier, n)
    link_hottest(&p.links[tier], list_no, n)
    may_be_chosen(p, tier, n)
    mark(p, tier, list_no)


cdef void recency_link_demoted(Place* p, int32_t tier, int32_t n) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int32_t parent = p.tree.nodes[n].parent
    if (is_linked(links, parent) and (p.closed[tier] or p.fates[parent].top == tier) and p.fates[parent].transfer < 0
            and list_of(p, tier, parent) == list_of(p, tier, n)):
        link_between(links, n, links.prev[parent], parent)
        may_be_chosen(p, tier, n)
    else:
        recency_link(p, tier, n)


cdef void recency_unlink(Place* p, int32_t tier, int32_t n) noexcept nogil:
    if is_linked(&p.links[tier], n):
        unlink(&p.links[tier], n)
        must_not_be_chosen(p, tier, n)


cdef bint is_owned(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return p.pools[tier].refs[node_ids(p.tree, n, tier)[0]] & COUNT > 1


# ---- queues

cdef void set_queue(Place* p, int32_t tier, int32_t n, int32_t queue) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    p.size[tier][f.queue[tier]] -= p.tree.nodes[n].length
    p.size[tier][queue] += p.tree.nodes[n].length
    f.queue[tier] = <unsigned char>queue


# ---- victims

# What the policy answers, if it may go. What may not would be evicted under its owners or its children: a policy of
# another package that names one is passed over, and the coldest that may go takes its place.
cdef inline int32_t checked_victim(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
    cdef int32_t n = p.policy.victim(p, tier, list_no, childless, limit)
    cdef bint is_listed = 0 <= n < p.fates_capacity and is_linked(&p.links[tier], n)
    if n == NIL or (is_listed and limit[0] > 0 and may_go(p, tier, n, childless)):
        return n
    limit[0] = p.tree.max_run
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
                    n = checked_victim(p, tier, list_no, childless, limit)
                    if n != NIL:
                        if best == NIL or klass < best_class or p.fates[n].last_use < p.fates[best].last_use:
                            best, best_class, best_limit = n, klass, limit[0]
                        break
            klass += 1
    limit[0] = best_limit
    return best
