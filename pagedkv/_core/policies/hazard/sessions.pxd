# What each session that callers name used last. Bounded: one that is forgotten only teaches less.
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef enum:
    NUM_SESSIONS = 16384        # remembered at most

cdef struct Session:
    uint64_t key                # of namespace and session together; 0: none
    int64_t serial              # of the request of it that was over last
    int32_t end                 # the deepest past that this one used
    int32_t generation          # of that past

cdef struct Sessions:
    Session* at                 # [NUM_SESSIONS], owned; NULL before the first is named

cdef uint64_t session_key(int32_t root, int64_t session) noexcept nogil         # never 0
cdef Session* session_find(Sessions* s, uint64_t key) noexcept nogil            # NULL: not remembered
# Its request with this serial is over. The session that had its place and whose last request was over longest ago is forgotten.
cdef void session_note(Sessions* s, uint64_t key, int64_t serial, int32_t end, int32_t generation) noexcept nogil
cdef void sessions_close(Sessions* s) noexcept nogil
cdef int64_t sessions_bytes(const Sessions* s) noexcept nogil
