"""The prefix tree: which blocks hold the KV of which token prefix, per namespace.

``RadixTree.match`` only looks. A request's prompt is matched by ``place_acquire`` (owners.pyx), which owns its blocks.

Path compression over whole blocks, as in SGLang's RadixAttention (Zheng et al., 2023), with two differences: a child is
found by a hash of its whole first block but accepted only after its tokens compare equal, and a run is at most MAX_RUN
blocks long so that no split, trim or move costs more than that.
"""
# Over 400 lines: match, insert, split, merge and trim keep one set of invariants over one array of nodes.

cimport cython
cimport numpy as cnp
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

import os

from pagedkv._core.arrays cimport index_input, count_input, handle_input, i32, int32_input, new_int32, tokens_input
from pagedkv._core.types cimport (
    E_MEMORY, MAX_BLOCK_SIZE, MAX_RUN, OK, handle_generation, handle_slot, make_handle, next_generation,
)
from pagedkv.errors import InvalidArgument, StaleHandle, WrongType

cnp.import_array()

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static inline uint64_t pkv_fold(uint64_t a, uint64_t b) {
        __uint128_t r = (__uint128_t)a * b;
        return (uint64_t)r ^ (uint64_t)(r >> 64);
    }
    /* Seeded multiply-and-fold over n int32 values: spreads, does not authenticate. The tree always compares tokens. */
    static inline uint64_t pkv_hash(const int32_t* p, int32_t n, uint64_t seed) {
        uint64_t h = seed ^ 0x9E3779B97F4A7C15ull, a, b;
        int32_t i = 0;
        for (; i + 4 <= n; i += 4) {
            memcpy(&a, p + i, 8); memcpy(&b, p + i + 2, 8);
            h = pkv_fold(a ^ 0xA0761D6478BD642Full ^ h, b ^ 0xE7037ED1A0B428DBull) + h;
        }
        for (; i < n; i++) h = pkv_fold(h ^ (uint32_t)p[i], 0x8EBC6AF09C88C6E3ull);
        return pkv_fold(h ^ (uint64_t)n, 0x589965CC75374CC3ull);
    }
    """
    uint64_t pkv_fold(uint64_t a, uint64_t b) noexcept nogil
    uint64_t pkv_hash(const int32_t* p, int32_t n, uint64_t seed) noexcept nogil


cdef inline uint32_t child_hash(Tree* t, int32_t parent, const int32_t* block) noexcept nogil:
    return <uint32_t>(pkv_hash(block, t.block_size, t.seed ^ (<uint64_t>parent * <uint64_t>0xD6E8FEB86659FD93)) >> 32)


# What the chains of a namespace begin with: of its name, so that a namespace that was forgotten knows its evicted blocks again.
cdef uint64_t salt_of(bytes key, uint64_t seed) noexcept:
    cdef uint64_t salt = seed
    cdef const unsigned char* text = key
    cdef Py_ssize_t i
    for i in range(len(key)):
        salt = pkv_fold(salt ^ text[i], 0x2D358DCCAA6C78A5) + text[i] + 1
    return pkv_fold(salt ^ <uint64_t>len(key), 0x589965CC75374CC3)


cdef int table_grow(Tree* t) noexcept nogil:
    cdef int64_t i, slot, size = (t.table_mask + 1) * 2 if t.table != NULL else 64
    cdef int32_t* table = <int32_t*>malloc(size * sizeof(int32_t))
    if table == NULL:
        return E_MEMORY
    memset(table, 0xFF, size * sizeof(int32_t))
    if t.table != NULL:
        for i in range(t.table_mask + 1):
            if t.table[i] != NIL:
                slot = t.nodes[t.table[i]].hash & (size - 1)
                while table[slot] != NIL:
                    slot = (slot + 1) & (size - 1)
                table[slot] = t.table[i]
        free(t.table)
    t.table = table
    t.table_mask = size - 1
    return OK


cdef void table_put(Tree* t, int32_t n) noexcept nogil:
    cdef int64_t slot = t.nodes[n].hash & t.table_mask
    while t.table[slot] != NIL:
        slot = (slot + 1) & t.table_mask
    t.table[slot] = n
    t.table_used += 1


cdef int64_t table_find(Tree* t, int32_t n) noexcept nogil:
    cdef int64_t slot = t.nodes[n].hash & t.table_mask
    while t.table[slot] != n:
        slot = (slot + 1) & t.table_mask
    return slot


cdef void table_drop(Tree* t, int32_t n) noexcept nogil:
    # Linear probing without tombstones: close the gap by moving back what may move.
    cdef int64_t gap = table_find(t, n), slot = gap, home
    while True:
        slot = (slot + 1) & t.table_mask
        if t.table[slot] == NIL:
            break
        home = t.nodes[t.table[slot]].hash & t.table_mask
        if ((slot - home) & t.table_mask) >= ((slot - gap) & t.table_mask):
            t.table[gap] = t.table[slot]
            gap = slot
    t.table[gap] = NIL
    t.table_used -= 1


cdef int tree_ensure(Tree* t, int32_t extra) noexcept nogil:
    cdef int64_t want = <int64_t>t.num_live + t.num_retired + extra, capacity
    cdef Node* nodes
    if want > t.nodes_capacity:
        capacity = t.nodes_capacity * 2 if t.nodes_capacity * 2 > want else want
        if capacity > 0x7FFFFFF0:
            return E_MEMORY
        nodes = <Node*>realloc(t.nodes, capacity * sizeof(Node))
        if nodes == NULL:
            return E_MEMORY
        memset(nodes + t.nodes_capacity, 0, (capacity - t.nodes_capacity) * sizeof(Node))
        t.nodes = nodes
        t.nodes_capacity = <int32_t>capacity
    while (t.table_used + extra) * 2 > t.table_mask:
        if table_grow(t) != OK:
            return E_MEMORY
    return OK


cdef int32_t node_take(Tree* t) noexcept nogil:
    cdef int32_t n = t.free_node
    if n != NIL:
        t.free_node = t.nodes[n].next_sibling
    else:
        n = t.num_nodes
        t.num_nodes += 1
    t.num_live += 1
    return n


cdef void buffers_free(Node* node) noexcept nogil:
    free(node.tokens)
    free(node.ids)
    free(node.pages)
    free(node.chain)
    free(node.names)
    node.tokens = node.ids = node.pages = NULL
    node.chain = node.names = NULL


cdef void node_give(Tree* t, int32_t n) noexcept nogil:
    cdef Node* node = &t.nodes[n]
    cdef int32_t i, generation = node.generation
    cdef bint again = next_generation(&generation)
    buffers_free(node)
    for i in range(CHAINS):
        free(node.keys[i])
    memset(node, 0, sizeof(Node))
    node.generation = generation
    node.parent = NIL
    node.root = NIL
    t.num_live -= 1
    if again:
        node.next_sibling = t.free_node
        t.free_node = n
    else:
        t.num_retired += 1


cdef void child_link(Tree* t, int32_t parent, int32_t n) noexcept nogil:
    cdef int32_t first = t.nodes[parent].first_child
    t.nodes[n].parent = parent
    t.nodes[n].prev_sibling = NIL
    t.nodes[n].next_sibling = first
    if first != NIL:
        t.nodes[first].prev_sibling = n
    t.nodes[parent].first_child = n


cdef void child_unlink(Tree* t, int32_t n) noexcept nogil:
    cdef Node* node = &t.nodes[n]
    if node.prev_sibling != NIL:
        t.nodes[node.prev_sibling].next_sibling = node.next_sibling
    else:
        t.nodes[node.parent].first_child = node.next_sibling
    if node.next_sibling != NIL:
        t.nodes[node.next_sibling].prev_sibling = node.prev_sibling


cdef bint buffers_new(Tree* t, Node* node, int32_t capacity) noexcept nogil:
    node.tokens = <int32_t*>malloc(<size_t>capacity * t.block_size * sizeof(int32_t))
    node.ids = <int32_t*>malloc(<size_t>capacity * t.num_tiers * sizeof(int32_t))
    node.pages = <int32_t*>malloc(<size_t>capacity * t.num_tiers * t.num_short * sizeof(int32_t)) if t.num_short else NULL
    node.chain = <uint64_t*>malloc(<size_t>capacity * sizeof(uint64_t)) if t.keep_chain else NULL
    node.names = <uint64_t*>malloc(<size_t>capacity * sizeof(uint64_t)) if t.keep_names else NULL
    if (node.tokens == NULL or node.ids == NULL or (t.keep_chain and node.chain == NULL)
            or (t.keep_names and node.names == NULL) or (t.num_short and node.pages == NULL)):
        buffers_free(node)                          # giving the node back frees the rest
        return False
    node.capacity = capacity
    if t.num_short:
        memset(node.pages, 0xFF, <size_t>capacity * t.num_tiers * t.num_short * sizeof(int32_t))
    return True


# Copies `count` blocks of `src` from block `at` to block `to` of `dst`.
cdef void buffers_copy(Tree* t, Node* src, int32_t at, Node* dst, int32_t to, int32_t count) noexcept nogil:
    cdef int32_t tier
    memmove(dst.tokens + <int64_t>to * t.block_size, src.tokens + <int64_t>at * t.block_size,
            <size_t>count * t.block_size * sizeof(int32_t))
    for tier in range(t.num_tiers):
        memmove(dst.ids + <int64_t>tier * dst.capacity + to, src.ids + <int64_t>tier * src.capacity + at,
                count * sizeof(int32_t))
    for tier in range(t.num_tiers * t.num_short):
        memmove(dst.pages + <int64_t>tier * dst.capacity + to, src.pages + <int64_t>tier * src.capacity + at,
                count * sizeof(int32_t))
    if t.keep_chain:
        memmove(dst.chain + to, src.chain + at, count * sizeof(uint64_t))
    if t.keep_names:
        memmove(dst.names + to, src.names + at, count * sizeof(uint64_t))


# Gives a node buffers of another capacity, holding `count` of its blocks from block `at` on.
cdef bint buffers_resize(Tree* t, Node* node, int32_t capacity, int32_t at, int32_t count) noexcept nogil:
    cdef Node fresh = node[0]
    if not buffers_new(t, &fresh, capacity):
        return False
    buffers_copy(t, node, at, &fresh, 0, count)
    buffers_free(node)
    node[0] = fresh
    return True


cdef int32_t tree_child(Tree* t, int32_t parent, const int32_t* block) noexcept nogil:
    cdef uint32_t hash = child_hash(t, parent, block)
    cdef int64_t slot = hash & t.table_mask
    cdef int32_t n
    cdef Node* node
    while t.table[slot] != NIL:
        n = t.table[slot]
        node = &t.nodes[n]
        if (node.hash == hash and node.parent == parent
                and memcmp(node.tokens, block, t.block_size * sizeof(int32_t)) == 0):
            return n
        slot = (slot + 1) & t.table_mask
    return NIL


cdef int32_t tree_common(Tree* t, int32_t n, const int32_t* tokens, int64_t num_blocks) noexcept nogil:
    cdef int32_t k, length = t.nodes[n].length
    cdef const int32_t* run = t.nodes[n].tokens
    cdef size_t width = t.block_size * sizeof(int32_t)
    if num_blocks < length:
        length = <int32_t>num_blocks
    if memcmp(run, tokens, length * width) == 0:
        return length
    for k in range(length):
        if memcmp(run + <int64_t>k * t.block_size, tokens + <int64_t>k * t.block_size, width) != 0:
            return k
    return length


cdef uint64_t chain_step(Tree* t, uint64_t before, const int32_t* block) noexcept nogil:
    return pkv_hash(block, t.block_size, before ^ t.seed)


cdef uint64_t chain_before(Tree* t, int32_t n, int32_t k) noexcept nogil:
    cdef Node* node = &t.nodes[n]
    if k > 0:
        return node.chain[k - 1]
    if node.parent == NIL:
        return node.chain[0]
    node = &t.nodes[node.parent]
    if node.length == 0:
        return chain_before(t, node.root, 0)
    return node.chain[node.length - 1]


cdef uint64_t name_before(Tree* t, int32_t n, int32_t k) noexcept nogil:
    cdef Node* node = &t.nodes[n]
    cdef Node* above
    if k > 0:
        return node.names[k - 1]
    above = &t.nodes[node.parent]
    return above.names[above.length - 1 if above.length else 0]


# The names of `count` blocks of run n from block `first` on, whose tokens are there.
cdef void name_blocks(Tree* t, int32_t n, int32_t first, int32_t count) noexcept nogil:
    cdef uint64_t name = name_before(t, n, first)
    cdef int32_t i
    for i in range(first, first + count):
        name = pkv_hash(node_tokens(t, n, i), t.block_size, name ^ t.name_seed)
        t.nodes[n].names[i] = name


cdef int32_t tree_new(Tree* t, int32_t parent, const int32_t* tokens, int32_t length) noexcept nogil:
    cdef int32_t n, i
    cdef uint64_t chain
    cdef Node* node
    cdef Node* above
    if tree_ensure(t, 1) != OK:
        return NIL
    n = node_take(t)
    node = &t.nodes[n]
    if not buffers_new(t, node, length):
        node_give(t, n)
        return NIL
    above = &t.nodes[parent]
    memcpy(node.tokens, tokens, <size_t>length * t.block_size * sizeof(int32_t))
    node.length = length
    node.first_child = NIL
    node.root = above.root
    node.depth = above.depth + above.length
    node.tiers = 0
    node.hash = child_hash(t, parent, tokens)
    child_link(t, parent, n)
    table_put(t, n)
    t.num_blocks += length
    if t.keep_chain:
        chain = chain_before(t, n, 0)
        for i in range(length):
            chain = chain_step(t, chain, tokens + <int64_t>i * t.block_size)
            node.chain[i] = chain
    if t.keep_names:
        name_blocks(t, n, 0, length)
    return n


cdef int32_t tree_extend(Tree* t, int32_t n, const int32_t* tokens, int32_t length) noexcept nogil:
    cdef Node* node = &t.nodes[n]
    cdef int32_t capacity, i
    if length > t.max_run - node.length:
        length = t.max_run - node.length
    if length <= 0:
        return 0
    if node.length + length > node.capacity:
        capacity = node.length + length if node.length < 4 else node.length + node.length // 2 + length
        if capacity > t.max_run:
            capacity = t.max_run
        if not buffers_resize(t, node, capacity, 0, node.length):
            return 0
    memcpy(node_tokens(t, n, node.length), tokens, <size_t>length * t.block_size * sizeof(int32_t))
    if t.keep_chain:
        for i in range(length):
            node.chain[node.length + i] = chain_step(
                t, chain_before(t, n, node.length + i), tokens + <int64_t>i * t.block_size)
    if t.keep_names:
        name_blocks(t, n, node.length, length)
    for i in range(t.num_tiers * t.num_short):
        memset(node.pages + <int64_t>i * node.capacity + node.length, 0xFF, length * sizeof(int32_t))
    node.length += length
    t.num_blocks += length
    return length


cdef int32_t tree_split(Tree* t, int32_t n, int32_t k) noexcept nogil:
    cdef int32_t upper, parent, rest, i
    cdef Node* low
    cdef Node* up
    assert 0 < k < t.nodes[n].length, "a split leaves two runs"
    if tree_ensure(t, 1) != OK:
        return NIL
    upper = node_take(t)
    up = &t.nodes[upper]
    low = &t.nodes[n]
    if not buffers_new(t, up, k):
        node_give(t, upper)
        return NIL
    parent = low.parent
    rest = low.length - k
    buffers_copy(t, low, 0, up, 0, k)
    up.length = k
    up.root, up.depth, up.tiers, up.hash = low.root, low.depth, low.tiers, low.hash
    up.first_child = NIL
    for i in range(CHAINS):
        up.keys[i], low.keys[i] = low.keys[i], NULL
    t.table[table_find(t, n)] = upper           # same parent, same first block: the upper half takes the place
    child_unlink(t, n)
    child_link(t, parent, upper)
    if low.capacity > 2 * rest and buffers_resize(t, low, rest, k, rest):
        pass                                    # the lower half now owns buffers of its own size
    else:
        buffers_copy(t, low, k, low, 0, rest)
    low.length = rest
    low.depth += k
    low.hash = child_hash(t, upper, low.tokens)
    child_link(t, upper, n)
    table_put(t, n)
    return upper


cdef bint tree_merge(Tree* t, int32_t n) noexcept nogil:
    cdef int32_t parent = t.nodes[n].parent
    cdef Node* low = &t.nodes[n]
    cdef Node* up = &t.nodes[parent]
    cdef Node joined = low[0]
    cdef int32_t i
    if not buffers_new(t, &joined, up.length + low.length):
        return False
    buffers_copy(t, up, 0, &joined, 0, up.length)
    buffers_copy(t, low, 0, &joined, up.length, low.length)
    table_drop(t, n)
    child_unlink(t, n)
    buffers_free(low)
    low.tokens, low.ids, low.pages, low.capacity = joined.tokens, joined.ids, joined.pages, joined.capacity
    low.chain, low.names = joined.chain, joined.names
    for i in range(CHAINS):
        free(low.keys[i])
        low.keys[i], up.keys[i] = up.keys[i], NULL
    low.length += up.length
    low.depth = up.depth
    low.hash = up.hash
    t.table[table_find(t, parent)] = n
    child_unlink(t, parent)
    child_link(t, up.parent, n)
    node_give(t, parent)
    return True


cdef void tree_trim(Tree* t, int32_t n, int32_t k) noexcept nogil:
    cdef Node* node = &t.nodes[n]
    assert 0 < k <= node.length and (k < node.length or node.first_child == NIL), "only a leaf's last blocks go"
    node.length -= k
    t.num_blocks -= k
    if node.length == 0:
        table_drop(t, n)
        child_unlink(t, n)
        node_give(t, n)
    elif node.capacity > 2 * node.length + 4:
        buffers_resize(t, node, node.length, 0, node.length)


cdef void tree_remove(Tree* t, int32_t n) noexcept nogil:
    if t.nodes[n].parent == NIL:
        node_give(t, n)
    else:
        tree_trim(t, n, t.nodes[n].length)


cdef int32_t tree_root(Tree* t, uint64_t salt, uint64_t name) noexcept nogil:
    cdef int32_t n
    cdef Node* node
    cdef uint64_t* chain = <uint64_t*>malloc(sizeof(uint64_t)) if t.keep_chain else NULL
    cdef uint64_t* names = <uint64_t*>malloc(sizeof(uint64_t)) if t.keep_names else NULL
    if (t.keep_chain and chain == NULL) or (t.keep_names and names == NULL) or tree_ensure(t, 1) != OK:
        free(chain)
        free(names)
        return NIL
    if t.keep_chain:
        chain[0] = salt
    if t.keep_names:
        names[0] = name
    n = node_take(t)
    node = &t.nodes[n]
    node.chain, node.names = chain, names
    node.parent, node.first_child, node.next_sibling, node.prev_sibling, node.root = NIL, NIL, NIL, NIL, n
    return n


cdef int32_t tree_next(Tree* t, int32_t n, int32_t top) noexcept nogil:
    if t.nodes[n].first_child != NIL:
        return t.nodes[n].first_child
    while n != top:
        if t.nodes[n].next_sibling != NIL:
            return t.nodes[n].next_sibling
        n = t.nodes[n].parent
    return NIL


cdef int32_t tree_remainder(Tree* t, int32_t n, const int32_t* tokens, int32_t* fill) noexcept nogil:
    cdef int32_t block[MAX_BLOCK_SIZE]
    cdef int32_t i, child
    if fill[0] >= t.block_size:
        fill[0] = t.block_size - 1
    memcpy(block, tokens, fill[0] * sizeof(int32_t))
    for i in range(fill[0], t.block_size):
        block[i] = NO_TOKEN
    while fill[0] > 0:
        if block[fill[0] - 1] != NO_TOKEN:
            child = tree_child(t, n, block)
            if child != NIL:
                return child
        fill[0] -= 1
        block[fill[0]] = NO_TOKEN
    return NIL


cdef int32_t tree_partial(
    Tree* t, int32_t n, int32_t k, const int32_t* tokens, int32_t num_tokens, int32_t scan, int32_t* where
) noexcept nogil:
    cdef int32_t best = 0, common, child, limit
    cdef const int32_t* block
    limit = num_tokens if num_tokens < t.block_size else t.block_size
    if k < t.nodes[n].length:
        block = node_tokens(t, n, k)
        while best < limit and block[best] == tokens[best] and tokens[best] != NO_TOKEN:
            best += 1
        where[0], where[1] = n, k
        return best
    child = t.nodes[n].first_child
    for _ in range(scan):
        if child == NIL or best == limit:
            break
        block = t.nodes[child].tokens
        common = 0
        while common < limit and block[common] == tokens[common]:
            common += 1
        if common > best:
            best = common
            where[0], where[1] = child, 0
        child = t.nodes[child].next_sibling
    while best > 0 and tokens[best - 1] == NO_TOKEN:
        best -= 1
    if child != NIL and best < limit:               # not all of them were looked at
        common = limit
        child = tree_remainder(t, n, tokens, &common)
        if common > best:
            best = common
            where[0], where[1] = child, 0
    return best


@cython.final
@cython.no_gc_clear      # what dies in the same circle may still have to let go of what is in here
cdef class RadixTree:
    """Prefixes of tokens, in whole blocks, mapped to block ids.

    Parameters
    ----------
    block_size : int
        Tokens per block, 1..256.
    num_tiers : int
        Tiers in which a run may have copies, 1..4.
    max_run : int
        Blocks in one node at most, 1..256.
    keep_chain : bool
        Keep an 8-byte running hash per block, which the `arc` and `s3fifo` policies need to know an evicted
        block again.
    seed : int, optional
        Seed of the child table; random by default, so that no client can aim at its collisions.
    keep_names : bool
        Keep an 8-byte hash per block that names it in events: of its namespace's name and all tokens up to its end.
    name_seed : int
        Seed of the names. They are the same in all processes with the same seed, before and after a purge.

    Notes
    -----
    Tokens are int32 and compared in full. Memory: 4 x block_size + 4 x num_tiers bytes a block (+ 8 with keep_chain, + 8
    with keep_names) and about 100 bytes a node. Thread-safe. A tree that belongs to a :class:`Placement` is changed only
    through it.
    """

    def __cinit__(self, block_size, num_tiers=1, *, max_run=MAX_RUN, keep_chain=False, seed=None, keep_names=False,
                  name_seed=0):
        self.lock = Lock()
        self.namespaces, self.names = {}, {}
        self.tree.block_size = count_input(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        self.tree.num_tiers = count_input(num_tiers, "num_tiers", 1, MAX_TIERS)
        self.tree.max_run = count_input(max_run, "max_run", 1, MAX_RUN)
        self.tree.keep_chain = bool(keep_chain)
        self.tree.seed = (int.from_bytes(os.urandom(8), "little") if seed is None
                          else <uint64_t>(index_input(seed, "seed") & (2**64 - 1)))
        self.tree.keep_names = bool(keep_names)
        self.tree.name_seed = <uint64_t>(index_input(name_seed, "name_seed") & (2**64 - 1))
        self.tree.free_node = NIL
        if tree_ensure(&self.tree, 16) != OK:
            raise MemoryError("no memory for an empty tree")
        self.namespace(b"")                         # root 0: of requests without a namespace

    def __dealloc__(self):
        cdef int32_t n, i
        for n in range(self.tree.num_nodes):
            buffers_free(&self.tree.nodes[n])
            for i in range(CHAINS):
                free(self.tree.nodes[n].keys[i])
        free(self.tree.nodes)
        free(self.tree.table)

    @property
    def block_size(self):
        """Tokens per block."""
        return self.tree.block_size

    @property
    def num_tiers(self):
        """Tiers a run may have copies in."""
        return self.tree.num_tiers

    @property
    def num_blocks(self):
        """Blocks in the tree."""
        cdef int64_t count
        self.lock.acquire()
        count = self.tree.num_blocks
        self.lock.release()
        return count

    @property
    def num_nodes(self):
        """Nodes in the tree, roots included."""
        cdef int64_t count
        self.lock.acquire()
        count = self.tree.num_live
        self.lock.release()
        return count

    def namespace(self, key=b""):
        """The namespace called `key` (bytes), made at its first use.

        An int, which names nothing else once it is forgotten.
        """
        cdef uint64_t salt, name
        cdef int32_t n
        cdef int64_t handle = -1
        cdef bint kept = False
        own = None
        if not isinstance(key, bytes):
            raise WrongType(f"a namespace key is bytes, not {type(key).__name__}")
        known = self.namespaces.get(key)
        if known is not None:
            return known
        salt = salt_of(key, self.tree.seed ^ self.purges * 0xA0761D6478BD642FU)
        name = salt_of(key, self.tree.name_seed)
        self.lock.acquire()
        n = tree_root(&self.tree, salt, name)
        if n != NIL:
            handle = make_handle(n, self.tree.nodes[n].generation)
        self.lock.release()
        if n == NIL:
            raise MemoryError("no memory for another namespace")
        try:
            own = handle
            self.names[own] = key
            known = self.namespaces.setdefault(key, own)
            kept = known is own
        finally:
            if not kept:                        # another thread was first, or there is no memory for its name
                if own is not None:
                    self.names.pop(own, None)
                self.lock.acquire()
                tree_remove(&self.tree, n)
                self.lock.release()
        return known

    def find(self, key=b""):
        """The namespace called `key` (bytes) if there is one; makes nothing. An int, or None."""
        if not isinstance(key, bytes):
            raise WrongType(f"a namespace key is bytes, not {type(key).__name__}")
        return self.namespaces.get(key)

    def name(self, namespace):
        """The key (bytes) that a namespace was made with, also after it was dropped.

        Raises
        ------
        StaleHandle
            It was forgotten, or never existed.
        """
        key = self.names.get(namespace)
        if key is None:
            raise StaleHandle(f"namespace {namespace} was forgotten, or never existed")
        return key

    @property
    def num_namespaces(self):
        """Namespaces that are called by some key now."""
        return len(self.namespaces)

    # Its key names it no more. Allocates nothing.
    cdef object unname(self, handle):
        key = self.names.get(handle)
        if key is not None and self.namespaces.get(key) == handle:
            del self.namespaces[key]

    cdef object unnamed(self, int64_t handle):
        cdef int32_t n = handle_slot(handle)
        if 0 <= n < self.tree.num_nodes and (self.tree.nodes[n].generation > handle_generation(handle)
                                             or self.tree.nodes[n].root == NIL):
            return StaleHandle(f"namespace {handle:#x} was forgotten: ask namespace(key) again")
        return InvalidArgument(f"namespace {handle} is not one of this tree: use what namespace(key) returned")

    cdef object path_tokens_of(self, int32_t node, int32_t blocks):
        # Tokens of the prefix that ends with the first `blocks` blocks of `node`. Takes the lock; retries if the path
        # grew meanwhile.
        cdef Tree* t = &self.tree
        cdef int32_t n, length
        cdef int64_t total
        cdef cnp.ndarray out
        while True:
            self.lock.acquire()
            total = <int64_t>(t.nodes[node].depth + blocks) * t.block_size
            self.lock.release()
            out = new_int32(total)
            self.lock.acquire()
            if <int64_t>(t.nodes[node].depth + blocks) * t.block_size == total:
                n, length = node, blocks
                while t.nodes[n].parent != NIL:
                    memcpy(i32(out) + <int64_t>t.nodes[n].depth * t.block_size, t.nodes[n].tokens,
                           <size_t>length * t.block_size * sizeof(int32_t))
                    n = t.nodes[n].parent
                    length = t.nodes[n].length
                self.lock.release()
                return out
            self.lock.release()

    @staticmethod
    def tokens(tokens):
        """`tokens` as a C-contiguous int32 array [n]: itself if it is one, else a checked copy.

        Raises
        ------
        WrongType, InvalidArgument
            Not one row of integers, or one of them does not fit in int32.
        """
        return tokens_input(tokens)

    def match(self, tokens, namespace=0, tier=0):
        """Look up the longest cached prefix of `tokens` in whole blocks: int32 [n], ids in `tier`.

        Changes nothing, and owns nothing: requests are matched by ``Placement.acquire``.
        """
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int32_t want = count_input(tier, "tier", 0, self.tree.num_tiers - 1)
        cdef int64_t total = cnp.PyArray_SIZE(array) // self.tree.block_size
        cdef cnp.ndarray out = new_int32(total)
        cdef const int32_t* at = i32(array)
        cdef int32_t* ids = i32(out)
        cdef int64_t done = 0
        cdef int32_t n, k, root
        cdef Tree* t = &self.tree
        self.lock.acquire()
        with nogil:
            n = root = tree_named(t, named)
            while root != NIL and done < total:
                n = tree_child(t, n, at + done * t.block_size)
                if n == NIL or not (t.nodes[n].tiers >> want) & 1:
                    break
                k = tree_common(t, n, at + done * t.block_size, total - done)
                memcpy(ids + done, node_ids(t, n, want), k * sizeof(int32_t))
                done += k
                if k < t.nodes[n].length:
                    break
        self.lock.release()
        if root == NIL:
            raise self.unnamed(named)
        return out[:done]

    def insert(self, tokens, blocks, namespace=0, tier=0):
        """Put the whole blocks of `tokens` into the tree, with `blocks` as their ids in `tier`.

        Where the tree already holds a block of this prefix, that one stays and `blocks` (int32 [n], writeable) is
        rewritten to name it.

        Returns
        -------
        int
            How many of the blocks are new; ``n - new`` leading ones were adopted from the tree.
        """
        self._standalone("insert")
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef cnp.ndarray ids = int32_input(blocks, "blocks")
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int32_t into = count_input(tier, "tier", 0, self.tree.num_tiers - 1)
        cdef int64_t total = cnp.PyArray_SIZE(array) // self.tree.block_size, done = 0, adopted = 0
        if cnp.PyArray_SIZE(ids) != total:
            raise InvalidArgument(f"{cnp.PyArray_SIZE(array)} tokens are {total} whole blocks, but {len(ids)} ids were given")
        if ids is not blocks or not ids.flags.writeable:
            raise WrongType("blocks must be a writeable int32 array: it is rewritten where the tree already has a block")
        cdef int32_t n, child, k, upper
        cdef bint there
        cdef Tree* t = &self.tree
        cdef const int32_t* data = i32(array)
        cdef const int32_t* at
        cdef int32_t* given = i32(ids)
        self.lock.acquire()
        with nogil:
            n = tree_named(t, named)
            there = n != NIL
            while there and done < total:
                at = data + done * t.block_size
                child = tree_child(t, n, at)
                if child != NIL:
                    k = tree_common(t, child, at, total - done)
                    if k < t.nodes[child].length:
                        upper = tree_split(t, child, k)
                        if upper == NIL:
                            break
                        child = upper
                    if (t.nodes[child].tiers >> into) & 1:
                        memcpy(given + done, node_ids(t, child, into), k * sizeof(int32_t))
                        adopted += k
                    else:
                        memcpy(node_ids(t, child, into), given + done, k * sizeof(int32_t))
                        t.nodes[child].tiers |= 1 << into
                else:
                    k = t.max_run if total - done > t.max_run else <int32_t>(total - done)
                    child = tree_new(t, n, at, k)
                    if child == NIL:
                        break
                    t.nodes[child].tiers = 1 << into
                    memcpy(node_ids(t, child, into), given + done, k * sizeof(int32_t))
                n = child
                done += k
        self.lock.release()
        if not there:
            raise self.unnamed(named)
        if done < total:
            raise MemoryError(f"the tree took {done} of {total} blocks")
        return total - adopted

    def trim(self, tokens, namespace=0, *, keep=0):
        """Remove this exact prefix's blocks beyond its first `keep`.

        As far as nothing else continues them.

        Returns
        -------
        ndarray of int32 [n]
            Ids in the hottest tier of the blocks taken out, deepest first.
        """
        self._standalone("trim")
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int64_t total = cnp.PyArray_SIZE(array) // self.tree.block_size, done = 0
        cdef int64_t floor = count_input(keep, "keep", 0, 2**31 - 1)
        cdef cnp.ndarray out = new_int32(total)
        cdef int32_t n, root, child, k = 0, i, parent
        cdef int64_t taken = 0
        cdef Tree* t = &self.tree
        self.lock.acquire()
        n = root = tree_named(t, named)
        while root != NIL and done < total:
            child = tree_child(t, n, i32(array) + done * t.block_size)
            if child == NIL:
                break
            k = tree_common(t, child, i32(array) + done * t.block_size, total - done)
            n = child
            done += k
            if k < t.nodes[n].length:
                break
        # only a prefix that ends exactly at the end of a leaf's run can be trimmed without orphans
        while n != root and k == t.nodes[n].length and t.nodes[n].first_child == NIL and t.nodes[n].depth + k > floor:
            parent = t.nodes[n].parent
            k = t.nodes[n].length if t.nodes[n].depth >= floor else <int32_t>(t.nodes[n].depth + t.nodes[n].length - floor)
            for i in range(k):
                i32(out)[taken] = node_ids(t, n, node_top(t, n))[t.nodes[n].length - 1 - i]
                taken += 1
            if k < t.nodes[n].length:
                tree_trim(t, n, k)
                break
            tree_trim(t, n, k)
            n = parent
            k = t.nodes[n].length
        self.lock.release()
        if root == NIL:
            raise self.unnamed(named)
        return out[:taken]

    def prefixes(self, namespace=0):
        """Every cached prefix that nothing continues, longest runs spelled out.

        A list of int32 token arrays.
        """
        cdef int64_t named = handle_input(namespace, "namespace"), count = 0
        cdef int32_t n, root
        cdef list leaves = []
        self.lock.acquire()
        root = tree_named(&self.tree, named)
        n = tree_next(&self.tree, root, root) if root != NIL else NIL
        while n != NIL:
            count += self.tree.nodes[n].first_child == NIL
            n = tree_next(&self.tree, n, root)
        self.lock.release()
        if root == NIL:
            raise self.unnamed(named)
        cdef cnp.ndarray found = new_int32(count + 16)
        self.lock.acquire()
        count = 0
        root = tree_named(&self.tree, named)        # it may have been forgotten meanwhile: then it holds nothing
        n = tree_next(&self.tree, root, root) if root != NIL else NIL
        while n != NIL and count < cnp.PyArray_SIZE(found):
            if self.tree.nodes[n].first_child == NIL:
                i32(found)[count] = n
                count += 1
            n = tree_next(&self.tree, n, root)
        self.lock.release()
        for i in range(count):
            leaves.append(self.path_tokens_of(i32(found)[i], self.tree.nodes[i32(found)[i]].length))
        return leaves

    def _standalone(self, verb):
        if self.attached:
            raise InvalidArgument(f"this tree belongs to a Placement: {verb} through it")

    def check_integrity(self):
        """Every child is found where its tokens say, depths add up, counts agree.

        AssertionError where not.
        """
        cdef Tree* t = &self.tree
        cdef int32_t n, c
        cdef int64_t blocks = 0, live = 0, children = 0, used, expected, alive
        problems = []
        cdef bint collecting = self.lock.begin_audit()
        try:
            for n in range(t.num_nodes):
                if t.nodes[n].root == NIL:
                    continue
                live += 1
                blocks += t.nodes[n].length
                if t.nodes[n].parent == NIL:
                    continue
                children += 1
                if not 0 < t.nodes[n].length <= t.nodes[n].capacity or t.nodes[n].length > t.max_run:
                    problems.append((n, "length"))
                if tree_child(t, t.nodes[n].parent, t.nodes[n].tokens) != n:
                    problems.append((n, "not found under its parent"))
                c = t.nodes[n].parent
                if t.nodes[n].depth != t.nodes[c].depth + t.nodes[c].length or t.nodes[n].root != t.nodes[c].root:
                    problems.append((n, "depth or root"))
                if t.nodes[n].tiers == 0:
                    problems.append((n, "in no tier"))
            used, expected, alive = t.table_used, t.num_blocks, t.num_live
        finally:
            self.lock.end_audit(collecting)
        if problems or blocks != expected or live != alive or used != children:
            raise AssertionError(f"{problems[:5]} blocks {blocks}/{expected} nodes {live}/{alive} table {used}/{children}")

    def dump(self):
        """All nodes, for tests: id -> (parent, depth, tokens, {tier: ids})."""
        cdef Tree* t = &self.tree
        cdef int32_t n, i, tier
        out = {}
        for n in range(t.num_nodes):
            if t.nodes[n].root == NIL:
                continue
            tokens, ids = [], {}
            for i in range(t.nodes[n].length * t.block_size):
                tokens.append(t.nodes[n].tokens[i])
            for tier in range(t.num_tiers):
                if (t.nodes[n].tiers >> tier) & 1:
                    blocks = ids[tier] = []
                    for i in range(t.nodes[n].length):
                        blocks.append(node_ids(t, n, tier)[i])
            out[n] = (t.nodes[n].parent, t.nodes[n].depth, tuple(tokens), ids)
        return out

    def __repr__(self):
        return f"<RadixTree {self.tree.num_blocks} blocks in {self.tree.num_live} nodes, {len(self.namespaces)} namespaces>"
