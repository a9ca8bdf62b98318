# One tier's block ids and their reference counts.
#
# The owners of a block are the holders of its references: the prefix tree (one, marked by TREE), sequences, moves in flight.
#     free           refs == 0, id on the free stack or never handed out
#     live           refs  > 0, with an owner besides the tree
#     cached         refs == TREE | 1: the tree alone owns it, so it may be evicted
#     num_free + num_live + num_cached == capacity, at every moment
# Ids [0, fresh) have been handed out at least once; [fresh, capacity) never. Arrays are sized for max_capacity and
# touched lazily by the operating system, so growth moves nothing.
#
# Pools of several groups of layers share one memory in *extents*, each of which belongs to one pool at a time and holds
# `per_extent` of its blocks. A pool takes an extent when it has no free block left, and gives it back with its last block in
# use. Its ids go over the whole memory: those of an extent that it does not have are not free, and never handed out.
# An extent with a live block is *held*: eviction alone cannot empty it. Where memory is only counted, a block may take several
# extents, `span`, that need not lie side by side: then it is alone in them, and the first one names it.
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagedkv._core.lock cimport Lock

cdef enum:
    TREE = 0x80000000       # the tree holds one of the references counted in the low 31 bits
    COUNT = 0x7FFFFFFF
    UNNAMEABLE = 0x7FFFFFFF  # a generation: the block goes on in use, but no handle names it any more

cdef struct Extents:
    int32_t num
    int32_t num_free
    int32_t* free           # [num], a stack
    int8_t* owner           # [num], the number of the pool that has it, NIL: none
    int32_t* after          # [num], the next extent of the same block, NIL at the end

cdef struct Pool:
    int32_t capacity
    int32_t max_capacity
    int32_t chunk           # growth step in blocks; 0 for a fixed pool
    int32_t fresh
    int32_t num_stack       # ids on the free stack
    int32_t num_cached      # kept by pool_cache and pool_uncache, which only Placement calls
    int32_t num_reserved    # promised to reservations, not to be handed out otherwise
    int32_t watermark       # num_available never counts these last blocks
    uint32_t* refs          # [max_capacity]
    uint32_t* generations   # [max_capacity], raised each time a block becomes free, up to UNNAMEABLE
    int32_t* stack          # [max_capacity]; with extents: the next free block of the same extent, NIL at the end
    Extents* extents        # shared with other pools; NULL: all blocks are the pool's own
    int8_t number           # among those
    int32_t per_extent      # blocks
    uint64_t reciprocal     # of per_extent, for extent_of
    int32_t shift
    int32_t span            # extents that a block takes; 1 unless per_extent is 1
    int32_t num_own         # extents that the pool has, `span` of them counted as one, as in the next two
    int32_t lowest          # none of the extents before it has a free block
    int32_t* free_in        # [num], the first free block of an extent, or NIL
    int32_t* used_in        # [num], blocks of an extent in use
    int32_t* live_in        # [num], of these the live ones
    int32_t num_held        # extents that are held
    uint8_t* has_free       # [num], whether the pool has it with free blocks
    uint32_t* marks         # [max_capacity] of a short group: points that need the block, of its references; else NULL
    uint8_t* leaving        # [max_capacity] of a short group: a bit for each colder tier to which a transfer copies the block

# Blocks that `pool_alloc` could hand out now, growth included.
cdef inline int32_t pool_available(Pool* p) noexcept nogil:
    cdef int32_t n = p.num_stack + (p.max_capacity - p.fresh) - p.num_reserved - p.watermark
    if p.extents != NULL:
        n += p.extents.num_free // p.span * p.per_extent
    return n if n > 0 else 0

# All or nothing. The new blocks have one reference each, the caller's.
cdef int pool_alloc(Pool* p, int32_t n, int32_t* out) noexcept nogil
# Blocks that the tree holds are out of bounds for the next two: their references belong to owners of a Placement.
# Gives back one reference for each entry of ids; an id may stand in it as often as the caller holds references.
# All or nothing: E_RANGE or E_UNDERFLOW change nothing, *bad is the index of the entry at fault.
cdef int pool_free(Pool* p, const int32_t* ids, int32_t n, int32_t* bad) noexcept nogil
cdef int pool_incref(Pool* p, const int32_t* ids, int32_t n, int32_t* bad) noexcept nogil

# A live block of an extent is free; with the extent's last one the extent is.
cdef void block_to_extent(Pool* p, int32_t block) noexcept nogil

# block // per_extent, without a division: the reciprocal is rounded up at 31 bits more than per_extent has.
cdef inline int32_t extent_of(Pool* p, int32_t block) noexcept nogil:
    return <int32_t>((<uint64_t>block * p.reciprocal) >> p.shift)

cdef inline void block_live(Pool* p, int32_t block) noexcept nogil:
    cdef int32_t extent = extent_of(p, block)
    p.num_held += p.live_in[extent] == 0
    p.live_in[extent] += 1

cdef inline void block_not_live(Pool* p, int32_t block) noexcept nogil:
    cdef int32_t extent = extent_of(p, block)
    p.live_in[extent] -= 1
    p.num_held -= p.live_in[extent] == 0

# Live blocks are cached from now on; and cached ones are live again, or are about to be freed.
cdef inline void pool_cache(Pool* p, const int32_t* ids, int32_t n) noexcept nogil:
    cdef int32_t* live_in = p.live_in
    cdef int32_t i, extent, held = 0            # in locals: a store to the pool in each turn takes four times as long
    p.num_cached += n
    if p.extents != NULL:
        for i in range(n):
            extent = extent_of(p, ids[i])
            live_in[extent] -= 1
            held += live_in[extent] == 0
        p.num_held -= held

cdef inline void pool_uncache(Pool* p, const int32_t* ids, int32_t n) noexcept nogil:
    cdef int32_t* live_in = p.live_in
    cdef int32_t i, extent, held = 0
    p.num_cached -= n
    if p.extents != NULL:
        for i in range(n):
            extent = extent_of(p, ids[i])
            held += live_in[extent] == 0
            live_in[extent] += 1
        p.num_held += held

# Live blocks of a pool in extents.
cdef inline int64_t pool_live(Pool* p) noexcept nogil:
    return <int64_t>p.num_own * p.per_extent - p.num_stack - p.num_cached

# Extents that hold so many blocks.
cdef inline int64_t extents_for(Pool* p, int64_t blocks) noexcept nogil:
    return (blocks + p.per_extent - 1) // p.per_extent * p.span

# Extents that are held, and those that a pool needs beside them for `more` blocks, once all that is cached is evicted.
cdef inline int64_t extents_needed(Pool* p, int64_t more) noexcept nogil:
    more += pool_live(p) + (p.num_reserved + p.watermark if more > 0 else 0) - <int64_t>p.num_held * p.per_extent
    return <int64_t>p.num_held * p.span + (extents_for(p, more) if more > 0 else 0)

# Inside the core: ids are known to be live, so these only assert.
cdef inline uint32_t pool_count(Pool* p, int32_t block) noexcept nogil:
    return p.refs[block] & COUNT

cdef inline void pool_drop_one(Pool* p, int32_t block) noexcept nogil:
    assert 0 <= block < p.fresh and p.refs[block] & COUNT > 0, "a reference without a holder"
    if p.refs[block] & COUNT == 0:      # a caller freed what a sequence held: the block is free, and stays so
        return
    p.refs[block] -= 1
    if p.refs[block] & COUNT == 0:
        p.refs[block] = 0
        p.generations[block] += p.generations[block] < UNNAMEABLE
        if p.extents != NULL:
            block_to_extent(p, block)
        else:
            p.stack[p.num_stack] = block
            p.num_stack += 1

cdef class ExtentPool:
    cdef Extents extents
    cdef readonly tuple pools
    cdef int64_t obtainable(self, Pool* pool) except -1

cdef class BlockPool:
    cdef Pool pool
    cdef Lock lock
    cdef bint attached      # to a Placement, which then owns num_cached and the TREE marks
    cdef ExtentPool shared  # keeps the memory of `pool.extents`
    cdef object __weakref__
    cdef int share(self, ExtentPool shared, int8_t number, int32_t per_extent, int32_t span) except -1
