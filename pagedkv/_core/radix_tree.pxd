# Token prefixes -> runs of whole blocks, one root per namespace.
#
# A node is a run of 1..MAX_RUN consecutive blocks of one prefix. All blocks of a run share one fate: the same owners,
# the same tiers, the same recency. Code that treats a part of a run differently splits it first. The lower half of a split
# keeps the node's id, so an owner that holds the deepest node of its path never has to be told.
#
#     node.depth      blocks of the prefix before this run; a root has depth 0 and length 0
#     node.tokens     int32 [capacity][block_size], owned; compared on every match, never trusted by hash
#     node.ids        int32 [num_tiers][capacity], owned; valid for tiers in the mask `tiers`
#     node.pages      int32 [num_tiers][num_short][capacity] or NULL, owned; pages of short groups of layers, NIL where there is
#                     a hole (tails.pxd)
#     node.chain      uint64 [capacity] or NULL, owned; a running hash of the prefix, only for ghosts of evicted blocks
#     node.names      uint64 [capacity] or NULL, owned; the name of each block in events: a hash of its namespace's name and the
#                     prefix up to its end, the same in every process
#     node.keys       32 bytes or NULL for each chain, owned; the durable chain key of the prefix before the run, once it
#                     has been computed
#     A root has no tokens and no ids; its chain and its names are one number each, made of the namespace's name, with which
#     those below begin.
#     children        found through one open-addressing table keyed by (parent, first block); also a sibling list
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from pagedkv._core.lock cimport Lock
from pagedkv._core.types cimport MAX_TIERS, NIL, NO_TOKEN, handle_generation, handle_slot

cdef enum:
    CHAINS = 2              # of durable names: the disk's and the remote store's, whose secrets differ
    SCANNED = 256           # youngest children that are looked at for one that begins as some tokens do

cdef struct Node:
    int32_t parent
    int32_t first_child
    int32_t next_sibling
    int32_t prev_sibling
    int32_t root
    int32_t depth
    int32_t length
    int32_t capacity
    int32_t generation      # raised when the id is given back
    uint32_t hash
    uint32_t tiers
    int32_t* tokens
    int32_t* ids
    int32_t* pages
    uint64_t* chain
    uint64_t* names
    uint8_t* keys[CHAINS]

cdef struct Tree:
    int32_t block_size
    int32_t num_tiers
    int32_t num_short       # groups of layers that do not see everything
    int32_t max_run
    bint keep_chain
    uint64_t seed
    bint keep_names
    uint64_t name_seed
    Node* nodes
    int32_t num_nodes       # ids below this have been used
    int32_t nodes_capacity
    int32_t free_node       # list through next_sibling
    int32_t num_live        # nodes in use, roots included
    int32_t num_retired     # ids whose generations are used up: never handed out again
    int64_t num_blocks      # blocks in all runs
    int32_t* table
    int64_t table_mask
    int64_t table_used

cdef inline int32_t* node_tokens(Tree* t, int32_t n, int32_t i) noexcept nogil:
    return t.nodes[n].tokens + <int64_t>i * t.block_size

cdef inline int32_t* node_ids(Tree* t, int32_t n, int32_t tier) noexcept nogil:
    return t.nodes[n].ids + <int64_t>tier * t.nodes[n].capacity

# Of the short group `group`, 1 and on.
cdef inline int32_t* node_pages(Tree* t, int32_t n, int32_t tier, int32_t group) noexcept nogil:
    return t.nodes[n].pages + <int64_t>(tier * t.num_short + group - 1) * t.nodes[n].capacity

# The hottest tier of a mask with a bit for each; MAX_TIERS if it has none.
cdef inline int32_t hottest_of(uint32_t mask) noexcept nogil:
    cdef int32_t tier = 0
    while tier < MAX_TIERS and not (mask >> tier) & 1:
        tier += 1
    return tier

# The hottest tier that has a copy of the run.
cdef inline int32_t node_top(Tree* t, int32_t n) noexcept nogil:
    return hottest_of(t.nodes[n].tiers)

# Whether a block's last token is none: it is partly filled.
cdef inline bint lacks_tokens(Tree* t, const int32_t* block) noexcept nogil:
    return block[t.block_size - 1] == NO_TOKEN

# Whether the run is a partly filled block (remainders.pyx). Such a block is a run of its own.
cdef inline bint is_remainder(Tree* t, int32_t n) noexcept nogil:
    return t.nodes[n].length == 1 and lacks_tokens(t, t.nodes[n].tokens)

# Leading blocks, up to the first one that is partly filled.
cdef inline int32_t whole_blocks(Tree* t, const int32_t* tokens, int32_t num_blocks) noexcept nogil:
    cdef int32_t i
    for i in range(num_blocks):
        if lacks_tokens(t, tokens + <int64_t>i * t.block_size):
            return i
    return num_blocks

# Room for `extra` more nodes: after OK that many tree_new calls and splits cannot fail for want of a node.
cdef int tree_ensure(Tree* t, int32_t extra) noexcept nogil
# Child of `parent` whose run begins with this block, or NIL.
cdef int32_t tree_child(Tree* t, int32_t parent, const int32_t* block) noexcept nogil
# Leading whole blocks of the run that equal `tokens` (num_blocks available).
cdef int32_t tree_common(Tree* t, int32_t n, const int32_t* tokens, int64_t num_blocks) noexcept nogil
# Cuts run n before its block k (0 < k < length): the new upper node's id, which stands between n and n's old parent.
# NIL when out of memory, with nothing changed.
cdef int32_t tree_split(Tree* t, int32_t n, int32_t k) noexcept nogil
# A new leaf under parent with `length` blocks; ids are left to the caller. NIL when out of memory.
cdef int32_t tree_new(Tree* t, int32_t parent, const int32_t* tokens, int32_t length) noexcept nogil
# Appends blocks to the run of a leaf, up to max_run; how many were appended.
cdef int32_t tree_extend(Tree* t, int32_t n, const int32_t* tokens, int32_t length) noexcept nogil
# Takes the last k blocks off a leaf's run; a run of none is removed.
cdef void tree_trim(Tree* t, int32_t n, int32_t k) noexcept nogil
# Joins n with its parent into one run under n's id (the parent must have no other child). False when out of memory.
cdef bint tree_merge(Tree* t, int32_t n) noexcept nogil
cdef void tree_remove(Tree* t, int32_t n) noexcept nogil
# A root without children; NIL when out of memory. The chains below it begin with `salt`, their names with `name`.
cdef int32_t tree_root(Tree* t, uint64_t salt, uint64_t name) noexcept nogil
# The root that a namespace's handle names, or NIL: forgotten, or none.
cdef inline int32_t tree_named(Tree* t, int64_t handle) noexcept nogil:
    cdef int32_t n = handle_slot(handle)
    if n < 0 or n >= t.num_nodes or t.nodes[n].root != n or t.nodes[n].generation != handle_generation(handle):
        return NIL
    return n
# Next node of the subtree under `top` in preorder after n, NIL at the end.
cdef int32_t tree_next(Tree* t, int32_t n, int32_t top) noexcept nogil
# Longest common prefix, in tokens, of `tokens` with the block after the first k of node n (n == root or k == length:
# with a child's first block, of the `scan` youngest children); NO_TOKEN is common to none. where[0], where[1]: the node and
# index of the block found.
# The longest partly filled block behind run n of these tokens alone, of the first fill[0] at most. NIL and 0 without one.
cdef int32_t tree_remainder(Tree* t, int32_t n, const int32_t* tokens, int32_t* fill) noexcept nogil
cdef int32_t tree_partial(Tree* t, int32_t n, int32_t k, const int32_t* tokens, int32_t num_tokens, int32_t scan,
                          int32_t* where) noexcept nogil
# Running hash of the prefix that ends with each of these blocks; `before` is the hash of what precedes.
cdef uint64_t chain_step(Tree* t, uint64_t before, const int32_t* block) noexcept nogil
cdef uint64_t chain_before(Tree* t, int32_t n, int32_t k) noexcept nogil
# The name of the block before block k of run n; of the namespace before the first.
cdef uint64_t name_before(Tree* t, int32_t n, int32_t k) noexcept nogil

cdef class RadixTree:
    cdef Tree tree
    cdef Lock lock
    cdef dict namespaces    # name (bytes) -> handle of its root, an int
    cdef dict names         # the other way round, with those that were dropped and are not forgotten yet
    cdef uint64_t purges    # namespaces dropped so far: what comes after a purge knows nothing again by its chain
    cdef bint attached      # to a Placement: then only it changes the tree
    cdef object __weakref__
    cdef object unnamed(self, int64_t handle)
    cdef object unname(self, handle)
    cdef object path_tokens_of(self, int32_t node, int32_t blocks)
