# Copies of runs: taken on, given up, and moved between tiers by transfers that succeed or fail as a whole.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place
from pagedkv._core.types cimport Reason

# References on the copy in `tier`, by owners besides the tree.
cdef void copy_own(Place* p, int32_t n, int32_t tier) noexcept nogil
cdef void copy_disown(Place* p, int32_t n, int32_t tier) noexcept nogil
# `ids` (one reference each, which becomes the tree's) are now the run's copy in `tier`; linked by the caller.
cdef void copy_add(Place* p, int32_t n, int32_t tier, const int32_t* ids) noexcept nogil
# The tree gives up its copy in `tier`, which has no other owner; the blocks become free.
cdef void copy_remove(Place* p, int32_t n, int32_t tier) noexcept nogil
# The last k blocks of a leaf leave every tier; a run of none leaves the tree. Counted as lost.
cdef void drop_tail(Place* p, int32_t n, int32_t k) noexcept nogil
# Drops the subtree under n as far as it has no owner and nothing of it is in flight; True if all of it went.
cdef bint drop_subtree(Place* p, int32_t n) noexcept nogil
cdef bint drop_children(Place* p, int32_t n) noexcept nogil
cdef int32_t split(Place* p, int32_t n, int32_t k) noexcept nogil
# Frees `want` more blocks of `tier`, or starts transfers that will. False when it could not.
cdef void make_room(Place* p, int32_t tier, int64_t want, int32_t domain) noexcept nogil
# Frees `want` more blocks of `tier` at once, as far as that can be: what would be demoted is dropped.
cdef void drop_for(Place* p, int32_t tier, int64_t want, int32_t domain) noexcept nogil
# The next colder tier to which runs are demoted from `tier`, or NIL.
cdef int32_t colder_tier(Place* p, int32_t tier) noexcept nogil
# Gives up `k` blocks of run n's copy in `tier` where another copy stays. False without memory.
cdef bint give_up_copy(Place* p, int32_t n, int32_t tier, int32_t k) noexcept nogil
# A slot for a transfer, with room for its moves; NIL without memory. And its end: the slot is free.
cdef int32_t transfer_new(Place* p, int32_t num_blocks) noexcept nogil
cdef void transfer_end(Place* p, int32_t slot) noexcept nogil
cdef enum:
    UNDER_WAY = -1
    UNABLE = -2
# Blocks of the path to n that `tier` lacks and that this decision (Place.batch) does not bring there. UNDER_WAY where one is
# on its way down since before, and may arrive later than what is decided now; UNABLE where one lies in a colder tier only, or
# could not be read.
cdef int32_t lacking(Place* p, int32_t n, int32_t tier) noexcept nogil
# Starts copies of what `tier` lacks of the path to n, root first, `most` blocks at most; it must have room for them. False
# without memory, and where a run that moves would have to be cut: what was started stays so. *group: what they belong to, set
# by the first one where it is -1.
cdef bint copy_path(Place* p, int32_t n, int32_t tier, int32_t most, Reason reason, int64_t* group) noexcept nogil
# As make_room, for more[0] blocks behind the path to run n in `tier`, of which nothing goes; of groups of layers, for more[g]
# pages, too, in the place of points and runs alone that were last used before that clock: for
# INT64_MAX any, and those that are over a quota. False if n went all the same.
cdef bint make_room_behind(Place* p, int32_t n, int32_t tier, const int64_t* more, int64_t before) noexcept nogil
# Whether a copy that is not needed otherwise has to stay: it is being read, or others hang on it.
cdef bint must_stay(Place* p, int32_t n, int32_t tier) noexcept nogil
# Starts a transfer of the whole run n; the destination must have room. OK or a Code with nothing changed. A transfer to a
# hotter tier promotes; `copies`: the run stays where it is. `group`: as in Move; -1: this one begins a group.
cdef int start(Place* p, int32_t n, int32_t src, int32_t dst, bint copies, int64_t group, Reason reason) noexcept nogil
# Starts bringing run n to the device; needs n.length free blocks there. OK or a Code.
cdef int promote_run(Place* p, int32_t n) noexcept nogil
# E_STALE when there is no such transfer in flight.
cdef int finish(Place* p, int64_t transfer, bint succeeded) noexcept nogil
# The same; without `tried` the transfer was given up before it began, and says nothing against its source.
cdef int finish_as(Place* p, int64_t transfer, bint succeeded, bint tried) noexcept nogil
# Whether a transfer is decided, and nothing can have moved as its moves were not taken yet.
cdef bint is_not_taken(const Place* p, int64_t transfer) noexcept nogil
# Device blocks, of all groups of layers, that transfers under way free; and those that they bring there for no owner any more.
cdef int64_t leaving_device(Place* p) noexcept nogil
cdef int64_t read_for_nobody(Place* p) noexcept nogil
cdef int64_t* usage_of(Place* p, int32_t n, int32_t tier) noexcept nogil
cdef int64_t quota_left(Place* p, int32_t n, int32_t tier) noexcept nogil
cdef int32_t quota_of(Place* p, int32_t n, int32_t tier) noexcept nogil
