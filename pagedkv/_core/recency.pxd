# Recency lists and eviction policies: which run goes next from a tier. Decides only; frees and moves nothing.
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
cdef void past_follow(Place* p, int32_t n) noexcept nogil                        # with hazard: after run n's end has moved
cdef void set_top(Place* p, int32_t n, int32_t top) noexcept nogil
# Before node n is given back or changes its list: no victim any more. It may stay in its recency list.
cdef void must_not_be_chosen(Place* p, int32_t tier, int32_t n) noexcept nogil
cdef void child_left(Place* p, int32_t n) noexcept nogil                         # a child of n is no more, or colder
cdef int32_t list_of(Place* p, int32_t tier, int32_t n) noexcept nogil
cdef void recency_link(Place* p, int32_t tier, int32_t n) noexcept nogil        # at the hot end
cdef void recency_link_demoted(Place* p, int32_t tier, int32_t n) noexcept nogil  # but not hotter than its parent
cdef void recency_unlink(Place* p, int32_t tier, int32_t n) noexcept nogil
cdef bint is_owned(Place* p, int32_t n, int32_t tier) noexcept nogil            # by anybody besides the tree
# What a policy learns: a hit on a run, a miss of blocks that follow `chain`, an eviction.
cdef void on_hit(Place* p, int32_t n) noexcept nogil
cdef void on_miss(Place* p, uint64_t chain, const int32_t* tokens, int64_t num_blocks) noexcept nogil
cdef void on_evict(Place* p, int32_t tier, int32_t n, int32_t first, int32_t count) noexcept nogil
# The queue a block with this prefix hash is inserted into; use_up forgets its ghost.
cdef int32_t ghost_queue(Place* p, int32_t tier, uint64_t chain, bint use_up) noexcept nogil
cdef void set_queue(Place* p, int32_t tier, int32_t n, int32_t queue) noexcept nogil
# The run to evict from `tier` and, in *limit, how many of its blocks at most; NIL when there is none. `childless`: only
# runs that nothing in any tier continues. `domain` -1: any.
cdef int32_t pick_victim(Place* p, int32_t tier, int32_t domain, bint childless, int32_t* limit) noexcept nogil
cdef void ghosts_free(Place* p) noexcept nogil
