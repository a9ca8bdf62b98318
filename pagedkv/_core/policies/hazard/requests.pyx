"""Requests as the policy meets them: a path that is matched, computed, let go of."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy

from pagedkv._core.block_pool cimport COUNT
from pagedkv._core.place cimport Place
from pagedkv._core.policies.hazard.history cimport History
from pagedkv._core.policies.hazard.learner cimport (
    hazard_arrive, hazard_depart, hazard_expect, hazard_follow, hazard_keys, hazard_session, hazard_take,
)
from pagedkv._core.policies.hazard.sessions cimport session_key
from pagedkv._core.policies.hazard.victims cimport hazard_of
from pagedkv._core.radix_tree cimport Tree, chain_before, chain_step, node_ids, node_top
from pagedkv._core.retention cimport DEFAULT_CLASS
from pagedkv._core.types cimport NIL, make_handle


cdef void end_moved(Place* p, int32_t n) noexcept nogil:
    hazard_follow(hazard_of(p), &p.fates[n].past, &p.fates[n].past_generation,
                  p.tree.nodes[n].depth + p.tree.nodes[n].length)


# Others than the tree and one owner hold run n, or a caller wants it kept longer than others: no policy can evict it.
cdef bint is_kept(Place* p, int32_t n) noexcept nogil:
    cdef int32_t tier = node_top(p.tree, n)
    return p.fates[n].klass > DEFAULT_CLASS or p.pools[tier].refs[node_ids(p.tree, n, tier)[0]] & COUNT > 2


cdef void arrive(
    Place* p, int32_t owner, const int32_t* tokens, int64_t num_tokens, int64_t found
) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t n = p.owners[owner].node, done = p.owners[owner].num_blocks, i
    cdef int32_t total = <int32_t>(num_tokens // t.block_size)
    cdef int32_t kept = 0
    cdef uint64_t chain
    cdef uint64_t* keys
    keys = hazard_keys(hazard_of(p), total)
    if keys == NULL:
        return
    path_keys(p, n, keys)
    chain = chain_before(t, n, t.nodes[n].length)
    for i in range(done, total):
        chain = chain_step(t, chain, tokens + <int64_t>i * t.block_size)
        keys[i] = chain
    while t.nodes[n].length > 0 and not is_kept(p, n):
        n = t.nodes[n].parent
    kept = t.nodes[n].depth + t.nodes[n].length
    n = p.owners[owner].node
    p.owners[owner].visit = hazard_arrive(hazard_of(p), total, max(done, <int32_t>min(found, <int64_t>total)), kept)
    while t.nodes[n].length > 0:        # a past that goes on otherwise was cut
        end_moved(p, n)
        n = t.nodes[n].parent


cdef void begin(Place* p, int32_t owner) noexcept nogil:
    hazard_take(hazard_of(p), p.owners[owner].visit)


cdef void hint(Place* p, int32_t owner, int64_t session, double seconds) noexcept nogil:
    cdef int32_t visit = p.owners[owner].visit
    if session >= 0:
        hazard_session(hazard_of(p), visit, session_key(p.tree.nodes[p.owners[owner].node].root, session))
    if seconds >= 0:
        hazard_expect(hazard_of(p), visit, seconds)


cdef int64_t depart(Place* p, int32_t owner, bint used, int64_t output, bint later) noexcept nogil:
    cdef int32_t n = p.owners[owner].node, visit = p.owners[owner].visit, count, end
    cdef int64_t handle = -1
    cdef History* h
    p.owners[owner].visit = NIL
    if p.fates[p.tree.nodes[n].root].failed:        # the namespace was dropped: nothing of it is remembered
        used = False
    if hazard_keys(hazard_of(p), p.owners[owner].num_blocks) == NULL:
        used = False
    else:
        path_keys(p, n, hazard_of(p).keys)
    count = hazard_depart(hazard_of(p), visit, p.tree.nodes[n].root, p.kind_of[p.tree.nodes[n].root],
                          p.owners[owner].num_blocks if used else 0, used, output, later)
    if later and hazard_of(p).visits.at[visit].live:
        handle = make_handle(visit, hazard_of(p).visits.at[visit].generation)
    h = &hazard_of(p).history
    while count > 0 and p.tree.nodes[n].length > 0:     # the runs of the path learn what is remembered of their ends
        end = p.tree.nodes[n].depth + p.tree.nodes[n].length
        while count > 0 and h.pasts[hazard_of(p).path[count - 1]].depth >= end:
            count -= 1
        if count > 0 and h.pasts[hazard_of(p).path[count - 1]].depth + h.pasts[hazard_of(p).path[count - 1]].length >= end:
            p.fates[n].past = hazard_of(p).path[count - 1]
            p.fates[n].past_generation = h.pasts[hazard_of(p).path[count - 1]].generation
        n = p.tree.nodes[n].parent
    return handle


cdef void path_keys(Place* p, int32_t n, uint64_t* keys) noexcept nogil:
    while p.tree.nodes[n].length > 0:
        memcpy(keys + p.tree.nodes[n].depth, p.tree.nodes[n].chain, p.tree.nodes[n].length * sizeof(uint64_t))
        n = p.tree.nodes[n].parent
