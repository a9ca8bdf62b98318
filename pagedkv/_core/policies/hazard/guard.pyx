"""The bound of the policy ``hazard``.

An account of the hits won and lost beside plain LRU, and what it leaves.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

cdef double NO_BOUND = 1e9          # a stake of so much: none


cdef void guard_open(Guard* g, double slack, double stake, int64_t window) noexcept nogil:
    cdef int32_t i
    memset(g, 0, sizeof(Guard))             # what was won so far is not at stake any more
    g.slack, g.stake, g.window = slack, stake, window
    for i in range(WINDOW_PARTS + 1):
        g.low[i], g.high[i] = 1e300, -1e300


cdef void guard_arrival(Guard* g, int64_t accesses, int64_t lru_hits, int64_t hits) noexcept nogil:
    cdef int64_t each = g.window // WINDOW_PARTS
    cdef int32_t part = <int32_t>((g.arrivals // each) % (WINDOW_PARTS + 1)), oldest = (part + 1) % (WINDOW_PARTS + 1), i
    cdef double low = 1e300, high = -1e300
    if g.arrivals % each == 0:
        g.recent -= g.accesses[oldest]
        g.accesses[oldest] = 0
        g.low[part] = g.high[part] = g.behind
    g.arrivals += 1
    g.accesses[part] += accesses
    g.recent += accesses
    g.total += accesses
    g.behind += lru_hits - hits
    g.low[part] = min(g.low[part], g.behind)
    g.high[part] = max(g.high[part], g.behind)
    for i in range(WINDOW_PARTS + 1):
        low = min(low, g.low[i])
        if i != oldest:
            high = max(high, g.high[i])
    if g.stake >= NO_BOUND:
        g.room = 1e18
        return
    g.room = g.slack * g.recent - (g.behind - low) + g.stake * (high - g.behind)
    g.room = min(g.room, g.slack * g.total - g.behind)  # over all that came no more either, whatever was won in between


cdef int64_t guard_room(const Guard* g, int64_t lacking) noexcept nogil:
    cdef double room = g.room - lacking
    return <int64_t>room if room > 0 else 0
