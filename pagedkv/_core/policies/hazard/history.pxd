# What is remembered of prefixes, cached or not: a radix tree of pasts, bounded, without tokens and without blocks.
#
# A past is a run of consecutive blocks of one prefix that were last used by the same request. Blocks are known by the
# running hash of their prefix (RadixTree's chain), 8 bytes each: good for decisions, never for identity. As in the
# prefix tree, a path that ends inside a past cuts it, and the lower half keeps the id.
#
# Beside it, exactly what plain LRU over the same total capacity would hold now: of each past its first `lru` blocks.
# `kept` counts its leading blocks that are really cached in some tier. Both caches lose blocks leaf-first, so both are
# prefixes, and the blocks that LRU has and the cache has not are the sum of max(0, lru - kept): `lacking`. What a request
# under way holds, LRU cannot evict; and what is not cached of it is being computed, so nothing of it counts as lacking.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from pagedkv._core.policies.hazard.model cimport NUM_BINS, NUM_FEATURES
from pagedkv._core.links cimport Links
from pagedkv._core.types cimport NIL

cdef enum:
    NUM_STAGES = 12             # ages at which what has happened so far is learned, and one for all that is older

cdef struct Past:
    int32_t parent              # NIL above the first run of a prefix
    int32_t first_child
    int32_t next_sibling
    int32_t prev_sibling
    int32_t depth               # blocks of the prefix before it
    int32_t length
    int32_t capacity
    uint64_t* keys              # [capacity], owned; prefix hash of each block
    int32_t generation          # raised when the id is given back
    int32_t lru
    int32_t had                 # of it, LRU had so many when the first of its users came
    int32_t kept
    int32_t tail                # blocks between its end and the end of the path that used it last
    int32_t uses
    int32_t users               # requests under way that hold it; 0: its next use is being waited for
    int32_t turn
    float last_gap              # seconds between uses; < 0: none yet
    float mean_gap              # exponential mean, 0.3 of the newest
    float least_gap
    float output                # tokens that the last request generated; < 0: not known
    double born                 # seconds: end of the last use
    int64_t visit               # serial of the request that used it last
    int32_t root                # its namespace
    uint8_t x[NUM_FEATURES]
    uint8_t learned             # bins of age below this are learned
    uint8_t stage
    uint8_t bin                 # of its age when it was last looked at
    uint8_t kind                # of its namespace: which model it teaches and asks
    int64_t rated               # number of the arrival after which `index` was computed; < 0: never
    float index[NUM_BINS]

cdef struct History:
    Past* pasts
    int32_t num_pasts           # ids below this have been used
    int32_t capacity
    int32_t free_past           # list through `parent`
    int32_t num_live
    int32_t num_retired         # ids whose generations are used up
    int32_t* of_root            # [roots_capacity], owned: pasts of each namespace
    int32_t roots_capacity
    int64_t num_blocks
    int64_t max_blocks          # remembered at most, when nothing holds more
    int32_t* table              # open addressing by the first block's hash
    int64_t mask
    int64_t used
    Links ages                  # NUM_STAGES lists: each past in the list of its stage, coldest first
    Links recency               # one list: the pasts with lru > 0 that are not held
    int64_t lru_blocks
    int64_t lru_capacity
    int64_t lru_reserved        # of it, for new blocks of requests under way
    int64_t lacking             # blocks that LRU has and the cache has not

cdef int history_open(History* h, int64_t max_blocks, int64_t lru_capacity) noexcept nogil     # OK or E_MEMORY
cdef void history_close(History* h) noexcept nogil
# Room for `extra` more pasts and links: E_MEMORY with nothing changed.
cdef int history_ensure(History* h, int32_t extra) noexcept nogil
cdef int history_roots(History* h, int32_t capacity) noexcept nogil    # roots below this may come: OK or E_MEMORY
# The child of `parent` (NIL: the first run of a prefix) that begins with this block, or NIL.
cdef int32_t history_child(History* h, int32_t parent, uint64_t key) noexcept nogil
# Leading blocks of past p that the path `keys` (num_blocks of them left) goes through.
cdef int32_t history_common(History* h, int32_t p, const uint64_t* keys, int32_t num_blocks) noexcept nogil
# Cuts past p before its block k (0 < k < length): the new upper past's id, with the same story. After history_ensure(1).
cdef int32_t history_split(History* h, int32_t p, int32_t k) noexcept nogil
# Joins p with its only child under the child's id and story, which is longer then. False: no memory, nothing changed.
cdef bint history_join(History* h, int32_t p) noexcept nogil
# A new past of a namespace, without a story, linked nowhere yet; NIL without memory. After history_ensure(1).
cdef int32_t history_new(History* h, int32_t root, int32_t parent, const uint64_t* keys, int32_t length) noexcept nogil
# A request under way holds it from now on, in LRU what it has of it; and it lets go, which makes it LRU's hottest: both to be
# called from the end of a path up to its beginning.
cdef void history_hold(History* h, int32_t p) noexcept nogil
cdef void history_let_go(History* h, int32_t p) noexcept nogil
cdef void history_lru_set(History* h, int32_t p, int32_t lru) noexcept nogil       # LRU has so many of its blocks, which is held
cdef void history_keep(History* h, int32_t p, int32_t kept) noexcept nogil      # that many of its blocks are cached now
# LRU has all of p, and it is the hottest, unless it is held; to be called from the end of a path up to its beginning.
cdef void history_touch(History* h, int32_t p) noexcept nogil
# LRU evicts what is not held, down to what is not reserved. Blocks that it holds and reserves beyond its capacity.
cdef int64_t history_lru_fit(History* h) noexcept nogil
cdef void history_wait(History* h, int32_t p, double now) noexcept nogil    # its next use is awaited from now on
cdef void history_stage(History* h, int32_t p, int32_t stage) noexcept nogil    # moves it to the hot end of that stage
# Forgets the coldest pasts while there are too many blocks; what is held, cached, or in LRU, or has children stays.
cdef void history_forget(History* h) noexcept nogil
cdef void history_purge(History* h, int32_t root) noexcept nogil    # forgets a namespace, whatever of it is cached
cdef void history_lru_clear(History* h) noexcept nogil      # LRU has lost what the cache has lost
cdef int64_t history_bytes(History* h) noexcept nogil

# The past above or at p that block `depth` of the path lies in, or NIL.
cdef inline int32_t history_at(History* h, int32_t p, int32_t depth) noexcept nogil:
    while p != NIL and h.pasts[p].depth > depth:
        p = h.pasts[p].parent
    return p
