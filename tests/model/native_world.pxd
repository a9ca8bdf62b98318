# What the native driver knows by itself: who holds what, and what every block of every tier contains.
#
# The memory of a tier is one number per token slot: memory[tier][block * block_size + offset] is the hash of the
# namespace and of the whole prefix up to and including the token written there, or POISON. It is written when a
# sequence writes, copied when a transfer copies, and poisoned when its block has been free since the last look.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagedkv._core.block_pool cimport Pool
from pagedkv._core.block_table cimport BlockTable
from pagedkv._core.place cimport Place
from pagedkv._core.placement cimport Placement
from pagedkv._core.radix_tree cimport Tree
from pagedkv._core.types cimport Move

cdef enum:
    POISON = 0
    TIERS = 3
    MAX_POOL = 256          # blocks of one tier
    MAX_BLOCK = 4           # tokens of one block
    MAX_TOKENS = 512        # of one sequence
    MAX_OWNERS = 6
    MAX_ROWS = 6
    MAX_ROOTS = 48
    MAX_KNOWN = 24

cdef struct Text:           # a namespace and a prefix; hashes[i] stands for the namespace and tokens[0..i]
    int32_t root
    uint64_t salt
    int32_t num_tokens
    int32_t tokens[MAX_TOKENS]
    uint64_t hashes[MAX_TOKENS]

cdef struct Holder:         # an owner, whose path is all of `text`, or a row
    int64_t handle
    int32_t pinned
    int32_t computed        # of a row; its tokens [computed, computed + scheduled) are in a step that is under way
    int32_t scheduled
    bint in_step
    int64_t slots[MAX_TOKENS]   # where the step wants the scheduled tokens
    Text text

cdef struct Flight:         # a block that is being moved
    Move move
    bint copied             # its bytes have arrived; otherwise they will at the end

cdef uint64_t mixed(uint64_t before, uint64_t value) noexcept nogil
cdef void text_push(Text* text, int32_t token) noexcept nogil
cdef void text_copy(Text* to, const Text* text, int32_t num_tokens) noexcept nogil

cdef class World:
    cdef readonly int64_t seed
    cdef readonly int64_t operations
    cdef readonly str doing
    cdef readonly int64_t reads
    cdef readonly Placement placement
    cdef readonly BlockTable table
    cdef Place* place
    cdef Tree* tree
    cdef Pool* pools[TIERS]
    cdef int32_t num_tiers
    cdef int32_t block_size
    cdef uint64_t* memory[TIERS]
    cdef uint32_t seen[TIERS][MAX_POOL]         # generation of each block at the last look
    cdef int32_t references[TIERS][MAX_POOL]    # as counted by `audit`
    cdef uint8_t in_tree[TIERS][MAX_POOL]
    cdef uint64_t* ends                         # [ends_capacity], by node: hash of the prefix that ends with it
    cdef int32_t ends_capacity
    cdef int32_t roots[MAX_ROOTS]               # nodes; what Python calls them is `named`
    cdef uint64_t salts[MAX_ROOTS]
    cdef int32_t num_roots
    cdef Holder owners[MAX_OWNERS]
    cdef int32_t num_owners
    cdef Holder rows[MAX_ROWS]
    cdef int32_t num_rows
    cdef int32_t held[MAX_POOL]                 # device blocks that the driver itself has a reference on
    cdef int32_t num_held
    cdef Flight flights[TIERS * MAX_POOL]
    cdef int32_t num_flights

    cdef object wrong(self, object what)
    cdef int64_t named(self, int32_t root) noexcept nogil
    cdef void sweep(self) noexcept nogil
    cdef void write(self, int32_t block, const Text* text, int32_t first, int32_t count) noexcept nogil
    cdef void copy(self, int32_t src_tier, int32_t src, int32_t dst_tier, int32_t dst) noexcept nogil
    cdef void poison(self, int32_t tier, int32_t block) noexcept nogil
    cdef int read(self, int32_t tier, int32_t block, const uint64_t* hashes, int32_t count, object whose) except -1
    cdef int read_path(self, int32_t node, const Text* text, object whose) except -1
    cdef bint carries_hotter(self, int32_t node, int32_t tier) noexcept nogil
    cdef int everything_is_held(self, int32_t tier) except -1
    cdef int audit(self) except -1
    cdef int audit_tree(self) except -1
    cdef int audit_owners(self) except -1
    cdef int audit_rows(self) except -1
    cdef int audit_pools(self) except -1
