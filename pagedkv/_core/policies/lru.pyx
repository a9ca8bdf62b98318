"""The policy ``lru``: the coldest leaf."""

from libc.stdint cimport int32_t

from pagedkv._core.place cimport POLICY_VERSION, Place
from pagedkv._core.policies.choosing cimport first_that_may_go


cdef int32_t victim(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
    return first_that_may_go(p, tier, list_no, childless)


LRU.version, LRU.size = POLICY_VERSION, sizeof(Policy)
LRU.joins_requests = True
LRU.victim = victim
