"""A table of sessions with four places for each hash. Decides nothing."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free

cdef enum:
    PLACES = 4


cdef uint64_t session_key(int32_t root, int64_t session) noexcept nogil:
    cdef uint64_t key = <uint64_t>session * 0x9E3779B97F4A7C15U ^ <uint64_t>(root + 1) * 0xC2B2AE3D27D4EB4FU
    key = (key ^ (key >> 32)) * 0xD6E8FEB86659FD93U
    key ^= key >> 29
    return key if key else 1


cdef inline Session* places_of(Sessions* s, uint64_t key) noexcept nogil:
    return s.at + key % (NUM_SESSIONS // PLACES) * PLACES


cdef Session* session_find(Sessions* s, uint64_t key) noexcept nogil:
    cdef Session* places
    cdef int32_t i
    if s.at == NULL:
        return NULL
    places = places_of(s, key)
    for i in range(PLACES):
        if places[i].key == key:
            return &places[i]
    return NULL


cdef void session_note(Sessions* s, uint64_t key, int64_t serial, int32_t end, int32_t generation) noexcept nogil:
    cdef Session* places
    cdef Session* place
    cdef int32_t i
    if s.at == NULL:
        s.at = <Session*>calloc(NUM_SESSIONS, sizeof(Session))
        if s.at == NULL:
            return                          # a hint that cannot be kept is no hint
    place = session_find(s, key)
    if place == NULL:
        places = place = places_of(s, key)
        for i in range(1, PLACES):
            if places[i].serial < place.serial:
                place = &places[i]
    place.key, place.serial, place.end, place.generation = key, serial, end, generation


cdef void sessions_close(Sessions* s) noexcept nogil:
    free(s.at)
    s.at = NULL


cdef int64_t sessions_bytes(const Sessions* s) noexcept nogil:
    return NUM_SESSIONS * sizeof(Session) if s.at != NULL else 0
