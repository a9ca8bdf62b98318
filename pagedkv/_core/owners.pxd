# Owners of prefixes. The caller holds the cache's mutex.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place
from pagedkv._core.types cimport NIL
from pagedkv._core.write_behind cimport want_found

# Owns the longest cached prefix of `tokens`, at most max_blocks (-1: no limit), in whatever tiers it lies. The owner's
# slot, or a Code. The owner's `blocked` names a transfer that ended the match early, or -1.
cdef int32_t place_acquire(Place* p, int32_t root, const int32_t* tokens, int64_t num_tokens,
                           int64_t max_blocks) noexcept nogil
# The owner stands for a request with this prompt, which has just come. `found`: blocks of it that were cached, where that
# is more than the owner holds.
cdef inline void place_arrive(Place* p, int32_t owner, const int32_t* tokens, int64_t num_tokens,
                              int64_t found) noexcept nogil:
    if p.owners[owner].visit == NIL:
        want_found(p, p.owners[owner].node)
    if p.policy.arrive != NULL and p.owners[owner].visit == NIL:
        p.policy.arrive(p, owner, tokens, num_tokens, found)

# The request is about to be computed, and room made for it. Without this, with the owner's first insertion.
cdef inline void place_begin(Place* p, int32_t owner) noexcept nogil:
    if p.owners[owner].visit != NIL:
        p.policy.begin(p, owner)

# What the caller knows of the request that an owner stands for: its session (-1: nothing), the time until its prefix is used
# again (seconds; infinity: never; -1: nothing). Nothing happens where it stands for none.
cdef inline void place_hint(Place* p, int32_t owner, int64_t session, double seconds) noexcept nogil:
    if p.owners[owner].visit != NIL:
        p.policy.hint(p, owner, session, seconds)

# The request is over; its owner is to be released next. `used`: it computed something. `output`: the tokens it generated, -1
# if that is not known; with `later` they will be reported, and the result is the visit's handle (-1: nothing to report).
cdef inline int64_t place_depart(Place* p, int32_t owner, bint used, int64_t output, bint later) noexcept nogil:
    return p.policy.depart(p, owner, used, output, later) if p.owners[owner].visit != NIL else -1

# An owner of the path that ends with run n, or E_MEMORY.
cdef int32_t place_own_run(Place* p, int32_t n) noexcept nogil
# Another owner of the same path.
cdef int32_t place_share(Place* p, int32_t owner) noexcept nogil
cdef void place_release(Place* p, int32_t owner) noexcept nogil
# Owns more of `tokens`, at most num_blocks blocks that continue the path, as far as the tree has them on the device and
# none of them is moving. How many; their ids, in `ids`.
cdef int32_t place_follow(Place* p, int32_t owner, const int32_t* tokens, int32_t num_blocks, int32_t* ids) noexcept nogil
# Over groups of layers the same of blocks that the caller computes again, because it cannot go on from there. The owner holds
# the path alone from now on, and no pages.
cdef int32_t place_retrace(Place* p, int32_t owner, const int32_t* tokens, int32_t num_blocks) noexcept nogil
cdef void owns_no_pages(Place* p, int32_t owner) noexcept nogil
# Ids of the owned path in each run's hottest tier, [num_blocks].
cdef void place_blocks(Place* p, int32_t owner, int32_t* ids) noexcept nogil
# Lets go of the path beyond its first `num_blocks` blocks; with groups of layers, beyond the longest prefix of those that may be
# used. OK or a Code; E_STATE where a run in flight would be cut.
cdef int place_shorten(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil
# The most blocks, no more than `num_blocks`, to which the path can be shortened now.
cdef int32_t place_uncut(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil
# The slot behind an owner's handle, or E_STALE.
cdef int32_t place_owner(Place* p, int64_t handle) noexcept nogil
# One owner more, one less, on run n alone.
cdef void run_own(Place* p, int32_t n) noexcept nogil
cdef void run_disown(Place* p, int32_t n) noexcept nogil
