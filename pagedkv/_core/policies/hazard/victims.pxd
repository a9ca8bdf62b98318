# Which runs may be chosen, kept as candidates, and the choice among them.
from libc.stdint cimport int32_t

from pagedkv._core.place cimport Place
from pagedkv._core.policies.hazard.learner cimport Hazard

cdef inline Hazard* hazard_of(Place* p) noexcept nogil:
    return <Hazard*>p.state

cdef void link(Place* p, int32_t tier, int32_t n) noexcept nogil
cdef void unlink(Place* p, int32_t tier, int32_t n) noexcept nogil
cdef void child_left(Place* p, int32_t n) noexcept nogil
cdef int32_t least_hazard(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil
