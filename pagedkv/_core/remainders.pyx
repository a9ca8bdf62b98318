"""Remainders: the last, partly filled blocks of sequences that have ended.

A remainder is a run of one block. Its first tokens are computed, and NO_TOKEN stands for the others. It is a leaf and stays
a run of its own. No prompt matches it as a whole block: it serves partial hits, which copy its computed tokens. In all else
it is a block like others: it is evicted, written behind its path, restored, and promoted for an owner.
"""

from libc.stdint cimport int32_t, uint64_t

from pagedkv._core.insertion cimport new_run, quota_room
from pagedkv._core.place cimport Place
from pagedkv._core.radix_tree cimport SCANNED, Tree, chain_before, chain_step, tree_partial, tree_remainder
from pagedkv._core.recency cimport place_ensure, queue_of, recency_link
from pagedkv._core.transfers cimport drop_subtree
from pagedkv._core.types cimport NIL, OK
from pagedkv._core.write_behind cimport want_committed


cdef bint place_keep_remainder(Place* p, int32_t owner, const int32_t* block, int32_t fill, int32_t id) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t n = p.owners[owner].node, child, queue = 0
    cdef int32_t where[2]
    cdef uint64_t chain = 0
    if p.fates[t.nodes[n].root].failed or p.fates[n].failed or p.pools[0].refs[id] != 1:
        return False
    if tree_partial(t, n, t.nodes[n].length, block, fill, SCANNED, where) == fill:
        return False
    drop_outgrown(p, owner, block)
    if quota_room(p, n, 1) == 0 or place_ensure(p, 1) != OK:    # making room may have split runs
        return False
    if t.keep_chain:
        chain = chain_step(t, chain_before(t, n, t.nodes[n].length), block)
        queue = queue_of(p, 0, chain, False)
    child = new_run(p, owner, n, block, &id, 1, queue)
    if child == NIL:
        return False
    if t.keep_chain and p.policy.queue_of != NULL:
        queue_of(p, 0, chain, True)
    p.owners[owner].node = child
    p.owners[owner].num_blocks += 1
    p.counters.inserted += 1
    p.has_remainders = True
    want_committed(p, child)
    if p.policy.keeps_owned:
        recency_link(p, 0, child)
    return True


cdef void drop_outgrown(Place* p, int32_t owner, const int32_t* block) noexcept nogil:
    cdef int32_t child, fill = p.tree.block_size - 1
    while fill > 0:
        child = tree_remainder(p.tree, p.owners[owner].node, block, &fill)
        if child != NIL:
            drop_subtree(p, child)                  # but for one that is owned or in flight
        fill -= 1
