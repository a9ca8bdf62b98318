# cython: language_level=3
"""Registers policies, right and wrong ones, as another package would."""

from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport POLICY_VERSION, Place, Policy
from pagedkv._core.policies.choosing cimport first_that_may_go
from pagedkv._core.policies.registry cimport register_policy

cdef Policy[4] given            # register_policy keeps the address


cdef int32_t victim(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
    return first_that_may_go(p, tier, list_no, childless)


cdef void begin(Place* p, int32_t owner) noexcept nogil:
    pass


cdef int64_t[1] told            # times that the clock of a policy was called


cdef void clock(Place* p, int64_t now_ns) noexcept nogil:
    told[0] += 1


def times_told():
    return told[0]


def register(name, int slot=0, *, version=POLICY_VERSION, size=sizeof(Policy), chooses=True, learns_by_half=False, ticks=False):
    cdef Policy* policy = &given[slot]
    policy.version, policy.size = version, size
    policy.victim = NULL
    policy.begin = NULL
    policy.clock = NULL
    if ticks:
        policy.clock = clock
    if chooses:
        policy.victim = victim
    if learns_by_half:
        policy.begin = begin
    register_policy(name, policy)


def register_nothing(name):
    register_policy(name, NULL)
