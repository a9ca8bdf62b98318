# The policy "hazard": what is remembered of prefixes, what is learned from it, and how far evictions may leave LRU's.
#
#     arrive      a request has matched: its prefix was used again; what that teaches is noted
#     take        its blocks are computed: LRU makes room for them at the same time
#     depart      it has let go: its path waits for its next use from now on
#     report      how much it generated, where that becomes known only later
#     session, expect     what the caller knows beside that: whose request it is, when it expects the next use
#     study       learn from what was noted, a bounded number of samples at a time
#     rate        the index of a run: expected hits per second of holding one of its blocks
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._core.policies.hazard.candidates cimport Candidates
from pagedkv._core.policies.hazard.guard cimport Guard, guard_room
from pagedkv._core.policies.hazard.model cimport Model, Sample
from pagedkv._core.policies.hazard.history cimport History
from pagedkv._core.policies.hazard.sessions cimport Sessions
from pagedkv._core.policies.hazard.visits cimport Visits
from pagedkv._core.types cimport MAX_TIERS

cdef enum:
    MAX_KINDS = 8               # of namespaces: each has its own model

cdef struct HazardCounters:
    int64_t lru_hits            # blocks that plain LRU would have hit
    int64_t hits                # blocks that were matched
    int64_t samples_lost        # never learned: too many at once
    int64_t visits_lost         # not remembered: out of memory
    int64_t clock_steps_back
    int64_t outputs_clamped
    int64_t left_behind         # runs that their session went on without
    int64_t held_back           # victims chosen in LRU's order because of the bound

cdef struct Hazard:
    History history
    Model* models               # [MAX_KINDS], owned; one without weights has not been needed yet
    Guard guard
    const double* edges         # of the bins of age
    int64_t looked_at           # number of the arrival for which candidates were last taken at random
    Sample* samples             # ring [num_samples], owned
    int64_t samples_head
    int64_t samples_tail
    Visits visits
    Sessions sessions
    uint64_t* keys              # scratch: hashes of one path
    int64_t keys_capacity
    int32_t* path               # scratch: pasts of one path
    int64_t path_capacity
    double now                  # seconds
    double weight_sum
    int64_t weight_count
    uint64_t seed
    HazardCounters counters
    Candidates* candidates[MAX_TIERS]   # [num_domains * NUM_CLASSES], owned by policy.pyx, and what they hold
    int32_t* seats[MAX_TIERS]       # [fates_capacity], by node

cdef Hazard* hazard_open(int64_t capacity, int64_t max_history) noexcept nogil      # NULL: no memory
cdef void hazard_close(Hazard* z) noexcept nogil
# A namespace was dropped: nothing of it is remembered any more. All blocks without an owner were dropped, as from LRU.
cdef void hazard_purged(Hazard* z, int32_t root) noexcept nogil
cdef void hazard_cleared(Hazard* z) noexcept nogil
cdef void hazard_bound(Hazard* z, double slack, double stake, int64_t window) noexcept nogil
cdef void hazard_clock(Hazard* z, int64_t now_ns) noexcept nogil
# The path's hashes are in z.keys[:num_blocks]. A visit, or NIL without memory. `hits`: blocks matched.
cdef uint64_t* hazard_keys(Hazard* z, int64_t num_blocks) noexcept nogil            # room for them, or NULL
# `kept`: leading ones that others hold or a caller keeps, in LRU too.
cdef int32_t hazard_arrive(Hazard* z, int32_t num_blocks, int32_t hits, int32_t kept) noexcept nogil
# The visit's first blocks are there: from now on LRU has the request too, and made room for it.
cdef void hazard_take(Hazard* z, int32_t visit) noexcept nogil
# `later`: the output will be reported, and the visit lives until then. z.path[: result] are the pasts of the path, from its
# beginning; 0 where nothing was remembered.
cdef int32_t hazard_depart(Hazard* z, int32_t visit, int32_t root, int32_t kind, int32_t num_blocks, bint used,
                           int64_t output, bint later) noexcept nogil
# Hints, while the visit is under way. The session: by session_key, the first time counts. Seconds: infinity for never.
cdef void hazard_session(Hazard* z, int32_t visit, uint64_t session) noexcept nogil
cdef void hazard_expect(Hazard* z, int32_t visit, double seconds) noexcept nogil
cdef void hazard_report(Hazard* z, int32_t visit, int64_t output) noexcept nogil    # and ends the visit
cdef int64_t hazard_study(Hazard* z, int64_t budget) noexcept nogil                 # samples learned
cdef double hazard_rate(Hazard* z, int32_t past, int32_t generation, int32_t depth) noexcept nogil  # < 0: not known
cdef double hazard_chance(Hazard* z, int32_t past, int32_t generation, int32_t depth, double seconds) noexcept nogil
# Leading blocks [.., depth) of a path that LRU has too, of those in the past that block depth - 1 lies in.
cdef int32_t hazard_lru_depth(Hazard* z, int32_t past, int32_t generation, int32_t depth) noexcept nogil
# Blocks before `depth` that are rated as one with the block at depth - 1.
cdef int32_t hazard_span(Hazard* z, int32_t past, int32_t generation, int32_t depth) noexcept nogil
cdef void hazard_lost(Hazard* z, int32_t past, int32_t generation, int32_t depth, int32_t count) noexcept nogil
# A run that ends at `depth` now, or whose past was cut: the past that its last block lies in. One below may be forgotten.
cdef void hazard_follow(Hazard* z, int32_t* past, int32_t* generation, int32_t depth) noexcept nogil
cdef int64_t hazard_bytes(Hazard* z) noexcept nogil         # of memory, all in all
cdef uint64_t hazard_random(Hazard* z) noexcept nogil

cdef inline int64_t hazard_room(Hazard* z) noexcept nogil:   # blocks that may be evicted out of LRU's order now
    return guard_room(&z.guard, z.history.lacking)
