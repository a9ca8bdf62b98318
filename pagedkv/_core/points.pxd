# Points: boundaries that stay usable (tails.pxd). The caller holds the cache's mutex.
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagedkv._core.place cimport Place

# The boundary behind `num_blocks` blocks of an owner's path is a point now, or used again. False: a page of its tail is a hole,
# or there is no memory to cut the run there.
cdef bint point_make(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil
# The run at whose end that boundary is a point, or NIL.
cdef int32_t point_at(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil
# Pages that the device lacks for the tail of that boundary: adds them to more[group].
cdef void point_lacks(Place* p, int32_t owner, int32_t num_blocks, int64_t* more) noexcept nogil
# As point_make, with a caller's pages where the tail has holes on the device: pages[g - 1] of short group g, as many as
# point_lacks counts, the last block's first. Their references, one each, pass on; where the answer is False the pages are free.
cdef bint point_give(Place* p, int32_t owner, int32_t num_blocks, int32_t** pages) noexcept nogil
# Of a forest that place_restore_forest has taken (insertion.pxd): run s, whose last node is ends[s], has done[s] blocks in the
# tree. Where that is all of them, the tree takes their pages: pages[g - 1] of short group g by block, NIL for a hole, one
# reference each. Where points[s] it ends in a point, whose tail is then there as a whole. Pages of no tail are free. An earlier
# run's point is hotter than a later one's.
cdef void points_restore(
    Place* p, const int64_t* first, const int32_t* ends, const int32_t* done, int32_t num_runs, int32_t tier,
    int32_t** pages, const uint8_t* points
) noexcept nogil
