# The caller holds the cache's mutex.
from libc.stdint cimport int32_t

from pagedkv._core.place cimport Place

# The tree takes the block behind the owned path, of which the first `fill` tokens are computed: block [block_size] has
# NO_TOKEN for the others. False, with nothing changed but for blocks evicted within a quota: the tree has these tokens
# already, or may not take it. On True the caller's reference is the owner's.
cdef bint place_keep_remainder(Place* p, int32_t owner, const int32_t* block, int32_t fill, int32_t id) noexcept nogil
# Remainders behind the owned path that say no more than this block does, which is about to be inserted there, are dropped.
cdef void drop_outgrown(Place* p, int32_t owner, const int32_t* block) noexcept nogil
