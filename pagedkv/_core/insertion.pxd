# The caller holds the cache's mutex.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place

# The tree takes `num_blocks` device blocks that continue the owned path; see Placement.insert. How many it took.
cdef int32_t place_insert(Place* p, int32_t owner, const int32_t* tokens, int32_t* blocks, int32_t num_blocks) noexcept nogil
# A run of `k` blocks under `parent`, each the caller's alone; the owner's and the tree's then. NIL when out of memory.
cdef int32_t new_run(Place* p, int32_t owner, int32_t parent, const int32_t* tokens, const int32_t* blocks, int32_t k,
                     int32_t queue) noexcept nogil
# How many of `want` more blocks after run n its namespace's quota admits, after evicting its own cold ones.
cdef int32_t quota_room(Place* p, int32_t n, int32_t want) noexcept nogil
# A cold copy of a prefix found in `tier` (a reopened store, a lookup): ids [num_blocks], one reference each, which passes to
# the tree where it takes the block. Runs of at most `piece` blocks. The path has no owner afterwards. How many leading blocks
# are in the tree, and in *taken the first one that the tree took; -i - 1 if block i is not the caller's alone (nothing has
# changed then).
cdef int32_t place_restore(Place* p, int32_t root, const int32_t* tokens, const int32_t* ids, int32_t num_blocks,
                           int32_t tier, int32_t piece, int32_t* taken) noexcept nogil
# The same for a whole forest: run s is blocks [first[s], first[s + 1]), hangs on run parents[s] (an earlier one, or -1: on
# roots[s]) and is the hotter the earlier it stands. done[s]: its leading blocks that are in the tree now; tails[s]: its last
# node, where done[s] > 0. A run whose parent is not there as a whole, or whose place is taken, is left out.
cdef int64_t place_restore_forest(
    Place* p, const int32_t* roots, const int32_t* parents, const int64_t* first, int32_t num_runs,
    const int32_t* tokens, const int32_t* ids, int32_t tier, int32_t* tails, int32_t* done) noexcept nogil
