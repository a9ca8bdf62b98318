"""Telling: turns changes of the tree into events.

A block's hash is its name in the tree.
"""

from libc.stdint cimport int32_t

from pagedkv._core.events cimport (
    EVENT_NOT_RESUMABLE, EVENT_REMOVED, EVENT_RESUMABLE, EVENT_STORED, Ring, ring_put,
)
from pagedkv._core.place cimport Place
from pagedkv._core.radix_tree cimport Node, is_remainder, name_before, node_ids, node_tokens, node_top, tree_next
from pagedkv._core.types cimport NIL


cdef bint is_told(Place* p, int32_t n) noexcept nogil:
    return not p.fates[n].failed and not p.fates[p.tree.nodes[n].root].failed and not is_remainder(p.tree, n)


cdef void tell(Place* p, Ring* r, int32_t kind, int32_t n, int32_t tier, int32_t first, int32_t count) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef int32_t parent_block = NIL
    cdef bint named = p.tree.keep_names
    if first > 0:
        parent_block = node_ids(p.tree, n, tier)[first - 1]
    elif p.tree.nodes[node.parent].length and (p.tree.nodes[node.parent].tiers >> tier) & 1:
        parent_block = node_ids(p.tree, node.parent, tier)[p.tree.nodes[node.parent].length - 1]
    ring_put(r, kind, tier, node.root, p.tree.nodes[node.root].generation, parent_block, node.depth + first,
             node_ids(p.tree, n, tier) + first, count,
             node.names + first if named else NULL, name_before(p.tree, n, first) if named else 0,
             node_tokens(p.tree, n, first), count * p.tree.block_size if kind == EVENT_STORED else 0)


cdef void event(Place* p, int32_t kind, int32_t n, int32_t tier, int32_t first, int32_t count) noexcept nogil:
    if p.events.words == NULL or p.beside[tier] or not is_told(p, n):
        return
    tell(p, &p.events, kind, n, tier, first, count)
    p.fates[p.tree.nodes[n].root].last_use = p.events.tail


cdef void tell_point(Place* p, Ring* r, int32_t kind, int32_t n, int32_t tier) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef int32_t last = node.length - 1
    cdef bint named = p.tree.keep_names
    ring_put(r, kind, tier, node.root, p.tree.nodes[node.root].generation, NIL, node.depth + last,
             node_ids(p.tree, n, node_top(p.tree, n)) + last, 1, node.names + last if named else NULL,
             name_before(p.tree, n, last) if named else 0, NULL, 0)


cdef void event_point(Place* p, int32_t kind, int32_t n, int32_t tier) noexcept nogil:
    if p.events.words == NULL or not is_told(p, n):
        return
    tell_point(p, &p.events, kind, n, tier)
    p.fates[p.tree.nodes[n].root].last_use = p.events.tail


cdef void event_stored(Place* p, int32_t n, int32_t tier, int32_t first) noexcept nogil:
    event(p, EVENT_STORED, n, tier, first, p.tree.nodes[n].length - first)


cdef void event_of_all(Place* p, int32_t kind, int32_t n) noexcept nogil:
    cdef int32_t tier
    for tier in range(p.num_tiers):
        if (p.tree.nodes[n].tiers >> tier) & 1:
            event(p, kind, n, tier, 0, p.tree.nodes[n].length)
    for tier in range(p.num_tiers):
        if (p.fates[n].tails >> tier) & 1:
            event_point(p, EVENT_RESUMABLE if kind == EVENT_STORED else EVENT_NOT_RESUMABLE, n, tier)


cdef void event_hidden(Place* p, int32_t n) noexcept nogil:
    event_of_all(p, EVENT_REMOVED, n)


cdef void event_shown(Place* p, int32_t n) noexcept nogil:
    event_of_all(p, EVENT_STORED, n)


cdef void events_hidden_below(Place* p, int32_t root) noexcept nogil:
    cdef int32_t n = tree_next(p.tree, root, root)
    while n != NIL and p.events.words != NULL:
        event_hidden(p, n)
        n = tree_next(p.tree, n, root)


cdef void tell_all(Place* p, Ring* r) noexcept nogil:
    cdef int32_t root, n, tier
    for root in range(p.tree.num_nodes):
        if p.tree.nodes[root].root != root:
            continue
        n = tree_next(p.tree, root, root)
        while n != NIL:
            for tier in range(p.num_tiers):
                if (p.tree.nodes[n].tiers >> tier) & 1 and not p.beside[tier] and is_told(p, n):
                    tell(p, r, EVENT_STORED, n, tier, 0, p.tree.nodes[n].length)
            for tier in range(p.num_tiers):
                if (p.fates[n].tails >> tier) & 1 and is_told(p, n):
                    tell_point(p, r, EVENT_RESUMABLE, n, tier)
            n = tree_next(p.tree, n, root)
