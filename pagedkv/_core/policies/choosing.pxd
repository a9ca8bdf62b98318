# What every policy asks of a run before it may go.
from libc.stdint cimport int32_t, uint32_t

from pagedkv._core.links cimport Links, coldest
from pagedkv._core.place cimport Fate, Place
from pagedkv._core.radix_tree cimport node_top
from pagedkv._core.recency cimport is_owned
from pagedkv._core.types cimport NIL

# Children of run n that are as hot as `tier` or hotter.
cdef inline int32_t hot_children(Place* p, int32_t tier, int32_t n) noexcept nogil:
    cdef int32_t u, children = 0
    for u in range(tier + 1):
        children += p.fates[n].kids[u]
    return children


# Whether nothing continues run n but claims that can be dropped with it.
cdef inline bint ends_here(Place* p, int32_t tier, int32_t n) noexcept nogil:
    cdef int32_t first = p.tree.nodes[n].first_child, claims = p.coldest + 1
    if first == NIL or claims == p.num_tiers:
        return first == NIL and p.fates[n].tails == 0    # no point there, and none on its way
    return tier < claims and hot_children(p, p.coldest, n) == 0 and p.num_reading[claims] == 0


cdef inline bint may_go(Place* p, int32_t tier, int32_t n, bint childless) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    if f.transfer >= 0 or f.copying >= 0:
        return False
    if p.closed[tier] and f.below[tier] > 0:    # what hangs on it there would not be found any more
        return False
    if node_top(p.tree, n) < tier:              # a hotter copy exists: this one is redundant
        return True
    if is_owned(p, n, tier):
        return False
    if f.failed or (childless and p.tree.nodes[n].tiers == <uint32_t>1 << tier):    # it would be lost
        return ends_here(p, tier, n)
    return hot_children(p, tier, n) == 0


# The coldest run of a list that may go, NIL if none.
cdef inline int32_t first_that_may_go(Place* p, int32_t tier, int32_t list_no, bint childless) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int32_t n = coldest(links, list_no)
    while n >= 0 and not may_go(p, tier, n, childless):
        n = links.next[n]
    return n if n >= 0 else NIL
