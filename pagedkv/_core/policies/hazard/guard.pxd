# How far evictions may leave LRU's order, so that hits stay near plain LRU's.
#
# Let LRU be plain LRU over the same capacity in all, `behind` its hits minus ours so far, and `lacking` the
# blocks that it has and we have not. Whatever comes, evicting in LRU's order from here on can lose at most `lacking`
# hits to it: each lost hit brings its block back, and what we have and LRU has not goes first. So an eviction may leave
# LRU's order only while `lacking` stays below the lesser of
#     SLACK * (accesses of the last WINDOW requests) - (behind - its least value in the window)
#                                             + stake * (its largest value in the window - behind)
#     SLACK * (all accesses since the account began) - behind.
# By the second, hits are at no time more than SLACK of all accesses so far below LRU's. By the first, any WINDOW requests
# lose no more to LRU than SLACK of the accesses, and stake times what was won, in the WINDOW requests up to the last eviction
# that left LRU's order: not always the same ones, so where requests become shorter, what was risked with the long ones
# can still be lost. This holds on one tier, also for requests that overlap and hold what they use (LRU's would hold the
# same), but for new prefixes that several compute at once; over several it is what is aimed at. A stake of infinity: no
# bound. See docs/policies.md.
from libc.stdint cimport int64_t

cdef enum:
    WINDOW_PARTS = 100

cdef struct Guard:
    double slack
    double stake
    int64_t window              # requests
    int64_t arrivals            # since the account began
    double behind               # LRU's hits - ours
    double low[101]             # by parts of the window, the present one among them
    double high[101]
    int64_t accesses[101]
    int64_t total               # accesses since the account began
    int64_t recent              # sum of accesses, the oldest part's left out: those of WINDOW requests at most
    double room                 # what `lacking` may be

cdef void guard_open(Guard* g, double slack, double stake, int64_t window) noexcept nogil  # the account begins anew
cdef void guard_arrival(Guard* g, int64_t accesses, int64_t lru_hits, int64_t hits) noexcept nogil
cdef int64_t guard_room(const Guard* g, int64_t lacking) noexcept nogil    # blocks that may be evicted out of LRU's order now
