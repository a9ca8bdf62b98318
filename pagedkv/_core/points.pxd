# Points: boundaries that stay usable (tails.pxd). The caller holds the cache's mutex.
from libc.stdint cimport int32_t

from pagedkv._core.place cimport Place

# The boundary behind `num_blocks` blocks of an owner's path is a point now, or used again. False: a page of its tail is a hole,
# or there is no memory to cut the run there.
cdef bint point_make(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil
