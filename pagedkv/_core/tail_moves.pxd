# Tails on their way between tiers: transfers of pages, beside those of runs (transfers.pxd). The caller holds the cache's mutex.
#
# A transfer of a tail marks the pages that it reads, as a point does, so that they stay when others let go of them. It
# holds the pages that it writes, and they are the tree's once all have arrived. Pages that the destination has already stay
# as they are. A tail that is demoted takes its point along, unless a request has come back for that since.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place, Transfer
from pagedkv._core.types cimport Reason

# Pages of each short group, more[1] and on, that `tier` lacks of the tail at the end of run n; more[0] is 0.
cdef void tail_lacks(Place* p, int32_t n, int32_t tier, int64_t* more) noexcept nogil
# The same for the device, of pages that no transfer brings there.
cdef void tail_cold(Place* p, int32_t n, int64_t* more) noexcept nogil
# Starts bringing the tail at the end of run n from `src` to `dst`. OK, or a Code with nothing changed: E_BLOCKS where there is
# no room for what `dst` lacks of it, E_STATE where another transfer copies a page of it down to `dst`, so that each page goes
# once. `copies`: the point stays where it is. `group_id`: as copy_path of transfers.pxd; NULL: a group of its own. `until`: as in
# Transfer.
cdef int start_tail(
    Place* p, int32_t n, int32_t src, int32_t dst, bint copies, int64_t* group_id, Reason reason, int64_t until
) noexcept nogil
# Starts bringing the tail at the end of run n to the device, from wherever its pages are. Transfers started, or a Code.
cdef int promote_tail(Place* p, int32_t n, int64_t until) noexcept nogil
# Whether the tail at the end of run n is on its way to the device; and the transfer that brings it.
cdef bint tail_rises(Place* p, int32_t n) noexcept nogil
cdef int64_t rising_tail(Place* p, int32_t n) noexcept nogil
# Of the pages that a transfer moves, those whose source no owner holds.
cdef int32_t unowned_pages(Place* p, Transfer* t) noexcept nogil
# As finish_as of transfers.pxd.
cdef int finish_tail(Place* p, int32_t slot, bint succeeded, bint tried) noexcept nogil
