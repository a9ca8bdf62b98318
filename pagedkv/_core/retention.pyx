"""Retention: priority, time to live, and a namespace's own lists when it has a quota."""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport realloc

from pagedkv._core.block_pool cimport COUNT
from pagedkv._core.links cimport Links, coldest, is_linked, link_hottest, unlink
from pagedkv._core.place cimport EXPIRED, NUM_CLASSES, NUM_LISTS, Expiry, Place
from pagedkv._core.radix_tree cimport node_ids, node_top, tree_next
from pagedkv._core.recency cimport recency_link, recency_unlink
from pagedkv._core.tails cimport point_link, point_unlink
from pagedkv._core.types cimport MAX_TIERS, NIL, handle_slot


# ---- time to live: a heap by (expires, deepest first); an entry whose node has moved on is skipped

cdef inline bint earlier(Expiry* a, Expiry* b) noexcept nogil:
    return a.expires < b.expires or (a.expires == b.expires and a.depth > b.depth)


cdef void expiry_push(Place* p, int32_t n) noexcept nogil:
    cdef int64_t i, up, capacity
    cdef Expiry* grown
    cdef Expiry entry
    if p.num_expiries == p.expiries_capacity:
        capacity = p.expiries_capacity * 2 if p.expiries_capacity else 64
        grown = <Expiry*>realloc(p.expiries, capacity * sizeof(Expiry))
        if grown == NULL:
            return                                  # then the run simply keeps its priority
        p.expiries = grown
        p.expiries_capacity = capacity
    entry.expires, entry.depth, entry.node = p.fates[n].expires, p.tree.nodes[n].depth, n
    entry.generation = p.tree.nodes[n].generation
    i = p.num_expiries
    p.num_expiries += 1
    while i > 0:
        up = (i - 1) >> 1
        if not earlier(&entry, &p.expiries[up]):
            break
        p.expiries[i] = p.expiries[up]
        i = up
    p.expiries[i] = entry


cdef void expiry_pop(Place* p) noexcept nogil:
    cdef int64_t i = 0, kid
    cdef Expiry last
    p.num_expiries -= 1
    last = p.expiries[p.num_expiries]
    while True:
        kid = 2 * i + 1
        if kid >= p.num_expiries:
            break
        if kid + 1 < p.num_expiries and earlier(&p.expiries[kid + 1], &p.expiries[kid]):
            kid += 1
        if not earlier(&p.expiries[kid], &last):
            break
        p.expiries[i] = p.expiries[kid]
        i = kid
    p.expiries[i] = last


cdef void set_class(Place* p, int32_t n, int32_t klass) noexcept nogil:
    cdef int32_t tier
    cdef bint linked[MAX_TIERS]
    cdef bint is_point = point_unlink(p, n)
    for tier in range(p.num_tiers):
        linked[tier] = is_linked(&p.links[tier], n)
        if linked[tier]:
            recency_unlink(p, tier, n)
    p.fates[n].klass = <uint8_t>klass
    if is_point:
        point_link(p, n)
    for tier in range(p.num_tiers):
        if linked[tier]:
            recency_link(p, tier, n)


cdef int64_t expire_until(Place* p, int64_t now) noexcept nogil:
    cdef int32_t n
    cdef int64_t blocks = 0
    while p.num_expiries > 0 and p.expiries[0].expires <= now:
        n = p.expiries[0].node
        if (p.tree.nodes[n].root != NIL and p.tree.nodes[n].generation == p.expiries[0].generation
                and p.fates[n].expires == p.expiries[0].expires):
            set_class(p, n, EXPIRED)
            p.fates[n].expires = 0
            blocks += p.tree.nodes[n].length
        expiry_pop(p)
    p.counters.expired += blocks
    return blocks


# Priority and time to live of the owned path. A prefix shared with others keeps the higher of the two values, and an
# ancestor never has less than what hangs on it.
cdef void retain(Place* p, int32_t owner, int32_t klass, int64_t expires) noexcept nogil:
    cdef int32_t n = p.owners[owner].node, child = NIL, floor = 0
    cdef int64_t latest = expires
    cdef bint alone
    p.owners[owner].klass = <uint8_t>klass
    p.owners[owner].expires = expires
    while p.tree.nodes[n].length > 0:
        alone = (p.pools[node_top(p.tree, n)].refs[node_ids(p.tree, n, node_top(p.tree, n))[0]] & COUNT) == 2 and (
            p.tree.nodes[n].first_child == child and (child == NIL or p.tree.nodes[child].next_sibling == NIL))
        if not alone and p.fates[n].klass > klass:
            floor = p.fates[n].klass if p.fates[n].klass > floor else floor
        set_class(p, n, klass if klass > floor else floor)
        if not alone and (p.fates[n].expires == 0 or (latest != 0 and p.fates[n].expires > latest)):
            latest = p.fates[n].expires
        if latest and p.fates[n].expires != latest:
            p.fates[n].expires = latest
            expiry_push(p, n)
        p.fates[n].expires = latest
        child = n
        n = p.tree.nodes[n].parent


cdef void change_domain(Place* p, int32_t root, int32_t domain) noexcept nogil:
    # Relinks the namespace's runs in their old order, list by list from cold to hot.
    cdef int32_t tier, i, n, hotter
    cdef Links* links
    for tier in range(p.num_tiers):
        links = &p.links[tier]
        for i in range(NUM_LISTS):
            n = coldest(links, i)
            while n >= 0:
                hotter = links.next[n]
                if p.tree.nodes[n].root == root:
                    recency_unlink(p, tier, n)
                    p.domain_of[root] = domain
                    recency_link(p, tier, n)
                    p.domain_of[root] = 0
                n = hotter
    for tier in range(p.num_tiers if p.groups != NULL else 0):
        links = &p.groups.points[tier]
        for i in range(NUM_CLASSES):
            n = coldest(links, i)
            while n >= 0:
                hotter = links.next[n]
                if p.tree.nodes[n].root == root:
                    unlink(links, n)
                    link_hottest(links, domain * NUM_CLASSES + i, n)
                n = hotter
    n = tree_next(p.tree, root, root)
    while n != NIL:
        for tier in range(p.num_tiers):
            if (p.tree.nodes[n].tiers >> tier) & 1:
                p.domains[0].usage[tier] -= p.tree.nodes[n].length
                p.domains[domain].usage[tier] += p.tree.nodes[n].length
        if p.fates[n].transfer >= 0:
            tier = p.transfers[handle_slot(p.fates[n].transfer)].dst
            p.domains[0].usage[tier] -= p.tree.nodes[n].length
            p.domains[domain].usage[tier] += p.tree.nodes[n].length
            if not p.transfers[handle_slot(p.fates[n].transfer)].promotes:
                tier = p.transfers[handle_slot(p.fates[n].transfer)].src    # which it has left already
                p.domains[0].usage[tier] += p.tree.nodes[n].length
                p.domains[domain].usage[tier] -= p.tree.nodes[n].length
        n = tree_next(p.tree, n, root)
    for i in range(p.transfers_capacity):
        if (p.transfers[i].node != NIL and p.transfers[i].copies and not p.transfers[i].is_tail
                and p.tree.nodes[p.transfers[i].node].root == root):
            p.domains[0].usage[p.transfers[i].dst] -= p.transfers[i].num_blocks
            p.domains[domain].usage[p.transfers[i].dst] += p.transfers[i].num_blocks
    p.domain_of[root] = domain
