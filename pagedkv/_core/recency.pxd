# Recency lists: which run goes next from a tier, as its policy says. Decides only; frees and moves nothing.
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._core.place cimport Place

# Room in fates and links for every node the tree has room for, after tree_ensure(extra).
cdef int place_ensure(Place* p, int32_t extra) noexcept nogil
cdef int domain_new(Place* p, int32_t root) noexcept nogil
# The domain of a namespace that is forgotten, and has nothing in it, is free for another.
cdef void domain_free(Place* p, int32_t d) noexcept nogil
cdef void fate_new(Place* p, int32_t n, int32_t top, int32_t klass, int64_t born) noexcept nogil
# After tree_split(n) -> upper: the halves share one fate and stand next to each other in every list.
cdef void fate_split(Place* p, int32_t upper, int32_t n) noexcept nogil
cdef void set_top(Place* p, int32_t n, int32_t top) noexcept nogil
cdef int32_t list_of(Place* p, int32_t tier, int32_t n) noexcept nogil
cdef void recency_link(Place* p, int32_t tier, int32_t n) noexcept nogil        # at the hot end
cdef void recency_link_demoted(Place* p, int32_t tier, int32_t n) noexcept nogil  # but not hotter than its parent
cdef void recency_unlink(Place* p, int32_t tier, int32_t n) noexcept nogil
cdef bint is_owned(Place* p, int32_t n, int32_t tier) noexcept nogil            # by anybody besides the tree
cdef void set_queue(Place* p, int32_t tier, int32_t n, int32_t queue) noexcept nogil
# The run to evict from `tier` and, in *limit, how many of its blocks at most; NIL when there is none. `childless`: only
# runs that nothing in any tier continues. `domain` -1: any.
cdef int32_t pick_victim(Place* p, int32_t tier, int32_t domain, bint childless, int32_t* limit) noexcept nogil

# ---- told to the policy

cdef inline void may_be_chosen(Place* p, int32_t tier, int32_t n) noexcept nogil:
    if p.policy.on_link != NULL:
        p.policy.on_link(p, tier, n)

# Before node n is given back or changes its list: no victim any more. It may stay in its recency list.
cdef inline void must_not_be_chosen(Place* p, int32_t tier, int32_t n) noexcept nogil:
    if p.policy.on_unlink != NULL:
        p.policy.on_unlink(p, tier, n)

# A child of n is no more, or colder.
cdef inline void child_left(Place* p, int32_t n) noexcept nogil:
    if p.policy.on_child_left != NULL:
        p.policy.on_child_left(p, n)

# Run n's end has moved.
cdef inline void end_moved(Place* p, int32_t n) noexcept nogil:
    if p.policy.on_end_moved != NULL:
        p.policy.on_end_moved(p, n)

cdef inline void on_hit(Place* p, int32_t n) noexcept nogil:
    if p.policy.on_hit != NULL:
        p.policy.on_hit(p, n)

cdef inline void on_evict(Place* p, int32_t tier, int32_t n, int32_t first, int32_t count) noexcept nogil:
    if p.policy.on_evict != NULL:
        p.policy.on_evict(p, tier, n, first, count)

cdef inline int32_t queue_of(Place* p, int32_t tier, uint64_t chain, bint use_up) noexcept nogil:
    return p.policy.queue_of(p, tier, chain, use_up) if p.policy.queue_of != NULL else 0
