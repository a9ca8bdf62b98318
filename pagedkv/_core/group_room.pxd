# Room in a tier whose memory groups of layers share: points and runs leave it, coldest first. The caller holds the cache's mutex.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place

# Has points and runs leave `tier` until so many more blocks of each group can be had there (more[0] of the spine). False where
# they cannot be had now: transfers under way will make the room (`is_leaving`), or all else is held.
cdef bint make_room_for(Place* p, int32_t tier, const int64_t* more) noexcept nogil
# The same, of points and runs alone that were last used before that clock.
cdef bint make_room_before(Place* p, int32_t tier, const int64_t* more, int64_t before) noexcept nogil
# Whether transfers under way will free anything in `tier`.
cdef bint is_leaving(Place* p, int32_t tier) noexcept nogil
# Has `want` blocks of the spine leave `tier`, of namespaces of one domain (-1: any), as far as that can be.
cdef void evict_blocks(Place* p, int32_t tier, int64_t want, int32_t domain) noexcept nogil
# From run n upwards, a run that ends with no child, no owner, no point and no boundary without need goes: nothing is hit there.
cdef void drop_dead_end(Place* p, int32_t n) noexcept nogil
