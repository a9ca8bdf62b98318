"""The coldest run of a list that may be evicted."""

from pagedkv._core.links cimport Links, coldest


cdef int32_t first_that_may_go(Place* p, int32_t tier, int32_t list_no, bint childless) noexcept nogil:
    cdef Links* links = &p.links[tier]
    cdef int32_t n = coldest(links, list_no)
    while n >= 0 and not may_go(p, tier, n, childless):
        n = links.next[n]
    return n if n >= 0 else NIL
