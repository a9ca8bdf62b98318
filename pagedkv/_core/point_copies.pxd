# Points written to a closed tier while they stay where they are: the path from the root on, as far as the tier lacks it, and
# the tail before the path's last blocks. The caller holds the cache's mutex.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place
from pagedkv._core.types cimport Reason

# Whether a point at the end of run n cannot be gone on from in `tier`: the run or the tail is not there.
cdef bint lacks_point(Place* p, int32_t n, int32_t tier) noexcept nogil
# As copy_one of write_behind.pyx, for the point at the end of run n: moves of all groups; 0 without a point, too. Room is made
# in the place of points and runs last used before that clock.
cdef int64_t copy_point(Place* p, int32_t n, int32_t tier, int32_t most, Reason reason, int64_t before) noexcept nogil
