# Which runs are to be copied to a closed tier while they stay where they are, and when. The caller holds the cache's mutex.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place

cdef enum:
    NO_BATCH = 0x7FFFFFFFFFFFFFFF   # Place.batch while nothing is being decided

# A request has found the path to run n, which is its second use at least since it was committed.
cdef void want_found(Place* p, int32_t n) noexcept nogil
# The same of run n alone: another request has computed it again.
cdef void want_reused(Place* p, int32_t n) noexcept nogil
# The path to run n was committed.
cdef void want_committed(Place* p, int32_t n) noexcept nogil
# Run n's copy in `tier` could not be read, and stays because others hang on it: it is to be written again.
cdef void want_copy(Place* p, int32_t n, int32_t tier) noexcept nogil
# Starts copies of what is wanted, `most` blocks at most, unless some are under way or something is being read from a closed
# tier. Blocks that are to be copied now.
cdef int64_t copy_wanted(Place* p, int32_t most) noexcept nogil
# Starts copies of what `tier` lacks of the path that ends with run n, `most` blocks at most, in the place of what is colder
# there. Blocks to be copied now; 0 where the tier lacks nothing, or has no room; UNDER_WAY to be asked again later.
cdef int64_t copy_asked(Place* p, int32_t n, int32_t tier, int32_t most) noexcept nogil
