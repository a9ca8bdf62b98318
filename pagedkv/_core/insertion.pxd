# The caller holds the cache's mutex.
from libc.stdint cimport int32_t

from pagedkv._core.place cimport Place

# The tree takes `num_blocks` device blocks that continue the owned path; see Placement.insert. How many it took.
cdef int32_t place_insert(Place* p, int32_t owner, const int32_t* tokens, int32_t* blocks, int32_t num_blocks) noexcept nogil
