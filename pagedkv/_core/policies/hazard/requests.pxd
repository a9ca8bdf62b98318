# What the policy learns of requests; when each is called: owners.pxd.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place

cdef void arrive(Place* p, int32_t owner, const int32_t* tokens, int64_t num_tokens, int64_t found) noexcept nogil
cdef void begin(Place* p, int32_t owner) noexcept nogil
cdef void hint(Place* p, int32_t owner, int64_t session, double seconds) noexcept nogil
cdef int64_t depart(Place* p, int32_t owner, bint used, int64_t output, bint later) noexcept nogil
cdef void end_moved(Place* p, int32_t n) noexcept nogil         # a run's end is another one now
