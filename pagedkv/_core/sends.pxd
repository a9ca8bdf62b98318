# Which runs are to be sent to the store of the tier of claims, and when. The caller holds the cache's mutex.
#
# A ring of wishes, which hold nothing: a run that leaves the device before its turn is not sent. `Fate.sent` counts the leading
# blocks of a run that were handed out, or came from the store.
from libc.stdint cimport int32_t

from pagedkv._core.place cimport Place, Write

# Unsent blocks of the path to run n are to be sent, if the cache's rule is `least` or more: WRITE_ALL after a commit,
# WRITE_REUSED after a second use, WRITE_NEVER in any case.
cdef void want_send(Place* p, int32_t n, Write least) noexcept nogil
# Takes the oldest wish that can be met: the run that ends a path whose unsent blocks all lie on the device, and in *first the
# first of those. NIL without one.
cdef int32_t next_unsent(Place* p, int32_t* first) noexcept nogil
# The blocks of the path to run n from `first` on count as sent, or do not.
cdef void mark_sent(Place* p, int32_t n, int32_t first, bint sent) noexcept nogil
