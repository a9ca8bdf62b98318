# cython: language_level=3
"""An eviction policy of one's own: ``lfu``, which gives up what was hit least often.

Of the 64 coldest runs of a list that may go, the one with the fewest hits goes first, the coldest where several have as few.
Hits are halved each time a run is passed over, so that yesterday's favourites go, too.
"""

from libc.stdint cimport int32_t

from pagedkv._core.links cimport Links, coldest
from pagedkv._core.place cimport POLICY_VERSION, Fate, Place, Policy
from pagedkv._core.policies.choosing cimport may_go
from pagedkv._core.policies.registry cimport register_policy
from pagedkv._core.types cimport NIL

cdef enum:
    LOOKED_AT = 64
    MOST_HITS = 255             # Fate.frequency is a policy's own byte, 0 in a new run


cdef void on_hit(Place* p, int32_t n) noexcept nogil:
    cdef Fate* fate = &p.fates[n]
    if fate.frequency < MOST_HITS:
        fate.frequency += 1


cdef int32_t victim(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int32_t n = coldest(links, list_no), best = NIL, seen = 0
    while n >= 0 and seen < LOOKED_AT:
        if may_go(p, tier, n, childless):
            if best == NIL or p.fates[n].frequency < p.fates[best].frequency:
                if best != NIL:
                    p.fates[best].frequency >>= 1
                best = n
            elif p.fates[n].frequency > p.fates[best].frequency:
                p.fates[n].frequency >>= 1
            seen += 1
        n = links.next[n]
    return best


cdef Policy LFU
LFU.version, LFU.size = POLICY_VERSION, sizeof(Policy)
LFU.victim, LFU.on_hit = victim, on_hit
register_policy("lfu", &LFU)
