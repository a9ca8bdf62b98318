# Events of the tree: they tell copies of runs that a match can find, by their whole blocks. They leave out partly filled blocks,
# claims (hearsay), runs whose copy could not be read, and the rest of a dropped namespace. The caller holds the cache's mutex.
from libc.stdint cimport int32_t

from pagedkv._core.events cimport Ring
from pagedkv._core.place cimport Place

# `count` blocks of run n from block `first` on became visible in a tier, or leave it (an EventKind).
cdef void event(Place* p, int32_t kind, int32_t n, int32_t tier, int32_t first, int32_t count) noexcept nogil
# All blocks of run n from block `first` on became visible in a tier.
cdef void event_stored(Place* p, int32_t n, int32_t tier, int32_t first) noexcept nogil
# The point at the end of run n has its tail in a tier from now on, or no more (an EventKind).
cdef void event_point(Place* p, int32_t kind, int32_t n, int32_t tier) noexcept nogil
# A match finds none of run n's copies any more, though they stay for now: before the run, or its namespace, counts as failed.
cdef void event_hidden(Place* p, int32_t n) noexcept nogil
# A match finds run n's copies again: after it counts as failed no more.
cdef void event_shown(Place* p, int32_t n) noexcept nogil
# The same for each run below `root`, whose namespace is about to be dropped.
cdef void events_hidden_below(Place* p, int32_t root) noexcept nogil
# All that a match can find, as if it were stored now: parents before what continues them, and hotter tiers first.
cdef void tell_all(Place* p, Ring* r) noexcept nogil
