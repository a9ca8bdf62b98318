"""One tier's block ids.

Allocation, reference counts, generations, growth in chunks, reservations.

Counts are 32-bit and checked in every build: without the checks, one double release would make a count negative, and the
pool would give the block to two owners.
"""
# Over 400 lines: one struct, all that may change it, and its Python face: each relies on the others' invariants.

cimport cython
cimport numpy as cnp
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memchr, memcpy, memset

import numpy as np

from pagedkv._core.arrays cimport blocks_input, i32, i64, int32_input, int64_input, new_int32
from pagedkv._core.types cimport (
    E_BLOCKS, E_OVERFLOW, E_RANGE, E_UNDERFLOW, MAX_GROUPS, NIL, OK, handle_generation, handle_slot, make_handle,
)
from pagedkv.errors import DoubleRelease, InvalidArgument, OutOfBlocks, PagedKVError, StaleHandle

cnp.import_array()


# ---- extents

cdef inline void with_free(Pool* p, int32_t extent) noexcept nogil:
    p.has_free[extent] = 1
    p.lowest = min(p.lowest, extent)


cdef inline void without_free(Pool* p, int32_t extent) noexcept nogil:
    p.has_free[extent] = 0


# The first of the `span` extents that a block takes, or of one.
cdef inline int32_t extent_pop(Pool* p) noexcept nogil:
    cdef Extents* e = p.extents
    cdef int32_t i, extent, after = NIL
    e.num_free -= p.span
    for i in range(p.span - 1, 0, -1):
        extent = e.free[e.num_free + i]
        e.owner[extent] = p.number
        e.after[extent] = after
        after = extent
    extent = e.free[e.num_free]
    if p.span > 1:
        e.after[extent] = after
    return extent


# An extent is free again, with those that its block took beside it.
cdef inline void extent_push(Pool* p, int32_t extent) noexcept nogil:
    cdef Extents* e = p.extents
    cdef int32_t _i
    for _i in range(p.span):
        e.owner[extent] = NIL
        e.free[e.num_free] = extent
        e.num_free += 1
        if p.span > 1:
            extent = e.after[extent]


cdef void extent_take_at(Pool* p, int32_t extent) noexcept nogil:
    cdef int32_t block, last
    p.extents.owner[extent] = p.number
    block, last = extent * p.per_extent, (extent + 1) * p.per_extent - 1
    p.free_in[extent] = block
    while block < last:
        p.stack[block] = block + 1
        block += 1
    p.stack[last] = NIL
    p.used_in[extent] = 0
    p.num_stack += p.per_extent
    p.num_own += 1
    with_free(p, extent)


# From the lowest extent that has room: the highest ones drain, and change hands as a whole.
cdef int32_t block_from_extent(Pool* p) noexcept nogil:
    cdef int32_t extent, block
    cdef uint8_t* lowest
    if p.per_extent == 1:               # it is in use or free as a whole, and in no list: half of the books stay untouched
        extent = extent_pop(p)
        p.extents.owner[extent] = p.number
        p.live_in[extent] = 1
        p.num_held += 1
        p.num_own += 1
        return extent
    if p.num_stack == 0:
        extent_take_at(p, extent_pop(p))
    lowest = <uint8_t*>memchr(p.has_free + p.lowest, 1, p.extents.num - p.lowest)
    p.lowest = extent = <int32_t>(lowest - p.has_free)
    block = p.free_in[extent]
    p.free_in[extent] = p.stack[block]
    p.used_in[extent] += 1
    p.num_stack -= 1
    block_live(p, block)
    if p.free_in[extent] == NIL:
        without_free(p, extent)
    return block


cdef void block_to_extent(Pool* p, int32_t block) noexcept nogil:
    cdef int32_t extent = extent_of(p, block)
    block_not_live(p, block)
    if p.per_extent == 1:
        p.num_own -= 1
        extent_push(p, extent)
        return
    if p.free_in[extent] == NIL:
        with_free(p, extent)
    p.stack[block] = p.free_in[extent]
    p.free_in[extent] = block
    p.used_in[extent] -= 1
    p.num_stack += 1
    if p.used_in[extent] == 0:
        without_free(p, extent)
        p.num_stack -= p.per_extent
        p.num_own -= 1
        extent_push(p, extent)


# Of an extent that the pool has just taken these n blocks are in use, with one reference each.
cdef void extent_claim(Pool* p, int32_t extent, const int32_t* blocks, int32_t n) noexcept nogil:
    cdef int32_t i, block
    for i in range(n):
        p.refs[blocks[i]] = 1
        block_live(p, blocks[i])
    p.used_in[extent] = n
    p.num_stack -= n
    p.free_in[extent] = NIL
    for block in range((extent + 1) * p.per_extent - 1, extent * p.per_extent - 1, -1):
        if p.refs[block] == 0:
            p.stack[block] = p.free_in[extent]
            p.free_in[extent] = block
    if p.free_in[extent] == NIL:
        without_free(p, extent)


cdef int pool_alloc(Pool* p, int32_t n, int32_t* out) noexcept nogil:
    cdef uint32_t* counts = p.refs              # in locals, and unsigned: a third fewer instructions
    cdef uint32_t* taken = <uint32_t*>out
    cdef int32_t i, from_stack
    cdef int64_t grown
    if n > pool_available(p):
        return E_BLOCKS
    if p.extents != NULL:
        for i in range(n):
            out[i] = block_from_extent(p)
            counts[taken[i]] = 1
        return OK
    from_stack = n if n < p.num_stack else p.num_stack
    p.num_stack -= from_stack
    memcpy(out, p.stack + p.num_stack, from_stack * sizeof(int32_t))
    for i in range(from_stack, n):
        out[i] = p.fresh
        p.fresh += 1
    if p.fresh > p.capacity:
        grown = p.capacity + (<int64_t>p.fresh - p.capacity + p.chunk - 1) // p.chunk * p.chunk
        p.capacity = <int32_t>grown if grown < p.max_capacity else p.max_capacity
    for i in range(n):
        counts[taken[i]] = 1
    return OK


cdef int pool_free(Pool* p, const int32_t* ids, int32_t n, int32_t* bad) noexcept nogil:
    cdef uint32_t* counts = p.refs
    cdef uint32_t* generations = p.generations
    cdef uint32_t* stack = <uint32_t*>p.stack
    cdef uint32_t left, raised, highest = 0
    cdef size_t block, top = p.num_stack, fresh = <uint32_t>p.fresh
    cdef int32_t i, j
    cdef int code = OK
    if p.extents != NULL:
        return free_one_by_one(p, ids, n, bad)
    for i in range(n):
        block = <uint32_t>ids[i]
        if block >= fresh:
            code = E_RANGE
            break
        left = counts[block] - 1
        if left >= COUNT:                       # there was none, or only a Placement may let go of it
            code = E_UNDERFLOW
            break
        counts[block] = left
        stack[top] = block                      # kept only if that was the last reference
        top += (left == 0)
    if code == OK:
        for i in range(p.num_stack, <int32_t>top):
            raised = generations[stack[i]] + 1
            generations[stack[i]] = raised
            highest |= raised
        if highest > UNNAMEABLE:                # at least one was there already: it stays there
            for i in range(p.num_stack, <int32_t>top):
                if generations[stack[i]] > UNNAMEABLE:
                    generations[stack[i]] = UNNAMEABLE
        p.num_stack = <int32_t>top
        return OK
    bad[0] = i
    for j in range(i):
        counts[ids[j]] += 1
    return code


# As pool_free, of blocks in extents: counts go down first, and blocks become free once all entries are good.
cdef int free_one_by_one(Pool* p, const int32_t* ids, int32_t n, int32_t* bad) noexcept nogil:
    cdef int32_t i, j
    for i in range(n):
        if <uint32_t>ids[i] >= <uint32_t>p.fresh or p.refs[ids[i]] - 1 >= COUNT:
            for j in range(i):
                p.refs[ids[j]] += 1
            bad[0] = i
            return E_RANGE if <uint32_t>ids[i] >= <uint32_t>p.fresh else E_UNDERFLOW
        p.refs[ids[i]] -= 1
    for i in range(n):
        p.refs[ids[i]] += 1
        pool_drop_one(p, ids[i])
    return OK


cdef int pool_incref(Pool* p, const int32_t* ids, int32_t n, int32_t* bad) noexcept nogil:
    cdef int32_t i, j, block
    cdef uint32_t count
    cdef int code = OK
    for i in range(n):
        block = ids[i]
        if <uint32_t>block >= <uint32_t>p.fresh:
            code = E_RANGE
            break
        count = p.refs[block]
        if count == 0 or count >= COUNT:            # free; or at its limit, or the tree's: share an owner instead
            code = E_UNDERFLOW if count != COUNT else E_OVERFLOW
            break
        p.refs[block] += 1
    if code != OK:
        bad[0] = i
        for j in range(i):
            p.refs[ids[j]] -= 1
    return code


# Blocks that the pool has or could have now; with extents as many as its own and the free ones hold.
cdef int64_t pool_now(Pool* p) noexcept nogil:
    if p.extents == NULL:
        return p.capacity
    return (<int64_t>p.num_own + p.extents.num_free // p.span) * p.per_extent


# Blocks that are free now, growth not counted.
cdef int64_t pool_free_now(Pool* p) noexcept nogil:
    if p.extents == NULL:
        return p.num_stack + p.capacity - p.fresh
    return p.num_stack + <int64_t>(p.extents.num_free // p.span) * p.per_extent


@cython.final
cdef class ExtentPool:
    """The memory that pools of several groups of layers share.

    Parameters
    ----------
    num_extents : int
    per_extent : sequence of int
        By pool: its blocks in one extent.
    span : sequence of int, optional
        By pool: extents that one block takes, where it has one block in an extent. They lie anywhere: this is for memory
        that is only counted, in units that all blocks are multiples of.

    Attributes
    ----------
    pools : tuple of BlockPool
        Block i of pool g lies at i times the g-th part of an extent, where none spans several. Give all of them to one
        Placement.

    Raises
    ------
    InvalidArgument, WrongType
    """

    def __cinit__(self, num_extents, per_extent, span=None):
        cdef int32_t i, count, extents
        cdef BlockPool pool
        self.extents.num = self.extents.num_free = blocks_input(num_extents, "num_extents", 0, 2**31 - 1)
        sizes = []
        for size in per_extent:
            sizes.append(blocks_input(size, "per_extent", 1, 2**31 - 1))
        if not 1 <= len(sizes) <= MAX_GROUPS or max(sizes, default=0) * self.extents.num > 2**31 - 1:
            raise InvalidArgument(f"{len(sizes)} pools of {self.extents.num} extents of {max(sizes, default=0)} blocks: "
                                  f"1 to {MAX_GROUPS} pools are needed, each of less than 2**31 blocks")
        spans = []
        for size in [1] * len(sizes) if span is None else span:
            spans.append(blocks_input(size, "span", 1, 2**31 - 1))
        if len(spans) != len(sizes) or any(extents > 1 and count > 1 for extents, count in zip(spans, sizes, strict=True)):
            raise InvalidArgument(f"spans {spans} for {sizes} blocks in an extent: each pool has one, which is 1 where an "
                                  "extent has several blocks")
        self.extents.free = <int32_t*>malloc(max(1, self.extents.num) * sizeof(int32_t))
        self.extents.owner = <int8_t*>malloc(max(1, self.extents.num))
        self.extents.after = <int32_t*>malloc(max(1, self.extents.num) * sizeof(int32_t))
        if self.extents.free == NULL or self.extents.owner == NULL or self.extents.after == NULL:
            raise MemoryError(f"no memory for {self.extents.num} extents")
        for i in range(self.extents.num):
            self.extents.free[i] = self.extents.num - 1 - i
            self.extents.owner[i] = self.extents.after[i] = NIL
        pools = []
        for i in range(len(sizes)):
            count, extents = sizes[i], spans[i]
            pool = BlockPool(self.extents.num * count)
            pool.share(self, <int8_t>i, count, extents)
            pools.append(pool)
        self.pools = tuple(pools)

    def __dealloc__(self):
        free(self.extents.free)
        free(self.extents.owner)
        free(self.extents.after)

    # Blocks that a pool could hand out if all that is cached were evicted.
    cdef int64_t obtainable(self, Pool* pool) except -1:
        cdef BlockPool each
        cdef int64_t extents = self.extents.num
        for each in self.pools:
            extents -= <int64_t>each.pool.num_held * each.pool.span
        extents = extents // pool.span + pool.num_held
        return max(0, extents * pool.per_extent - pool_live(pool) - pool.num_reserved - pool.watermark)

    def claim(self, number, blocks):
        """Take these very blocks, one reference each, for the caller: those of a reopened store.

        Parameters
        ----------
        number : int
            Of their pool.
        blocks : int32 [n]
            Each once; their extents, which are the pool's from now on, belong to none yet.

        Raises
        ------
        InvalidArgument
            No such pool or block, one that stands there twice, or an extent that a pool has. Nothing was changed.
        """
        cdef cnp.ndarray ids = np.sort(int32_input(blocks, "blocks"))
        cdef BlockPool pool
        cdef int32_t i, of = blocks_input(number, "number", 0, len(self.pools) - 1), extent, kept
        cdef set extents
        pool = self.pools[of]
        cdef Pool* p = &pool.pool
        if len(ids) and not 0 <= ids.min() <= ids.max() < p.max_capacity:
            raise InvalidArgument(f"pool {of} has blocks 0 to {p.max_capacity - 1}, not {ids.min()} to {ids.max()}")
        if len(np.unique(ids)) != len(ids):
            raise InvalidArgument("a block is named twice")
        if p.span > 1:
            raise InvalidArgument(f"a block of pool {of} takes {p.span} extents, and only the first one has its name")
        extents = set((ids // p.per_extent).tolist())
        ordered = sorted(extents)
        cdef cnp.ndarray edges = np.searchsorted(ids // p.per_extent, ordered + [2**31 - 1]).astype(np.int64)
        cdef const int64_t* edge = i64(edges)
        pool.lock.acquire()
        try:
            for i in extents:
                if self.extents.owner[i] != NIL:
                    raise InvalidArgument(f"extent {i} belongs to pool {self.extents.owner[i]}")
            kept = 0
            for i in range(self.extents.num_free):      # the others, in their order
                extent = self.extents.free[i]
                if extent not in extents:
                    self.extents.free[kept] = extent
                    kept += 1
            self.extents.num_free = kept
            i = 0
            for extent in ordered:
                extent_take_at(p, extent)
                extent_claim(p, extent, i32(ids) + edge[i], <int32_t>(edge[i + 1] - edge[i]))
                i += 1
        finally:
            pool.lock.release()

    @property
    def num_extents(self):
        """Extents in all."""
        return self.extents.num

    @property
    def per_extent(self):
        """By pool: its blocks in one extent, a tuple."""
        cdef BlockPool each
        sizes = []
        for each in self.pools:
            sizes.append(each.pool.per_extent)
        return tuple(sizes)

    @property
    def span(self):
        """By pool: extents that one of its blocks takes, a tuple."""
        cdef BlockPool each
        spans = []
        for each in self.pools:
            spans.append(each.pool.span)
        return tuple(spans)

    @property
    def num_free(self):
        """Extents that no pool has."""
        return self.extents.num_free

    def owners(self):
        """The number of the pool that has each extent, -1 where none has: a list."""
        cdef int32_t i
        out = []
        for i in range(self.extents.num):
            out.append(self.extents.owner[i])
        return out

    def check_integrity(self):
        """Recompute from the counts which blocks are in use, and who has which extent.

        Raise AssertionError where it does not hold.
        """
        cdef BlockPool each
        cdef Pool* p
        cdef int32_t extent, block, used, unused, own, named, live, held, unowned = 0
        cdef bint collecting
        problems = []
        each = self.pools[0]                        # their lock is one, once they belong to a Placement
        cdef Lock lock = each.lock
        collecting = lock.begin_audit()
        try:
            for extent in range(self.extents.num):
                unowned += self.extents.owner[extent] == NIL
            for each in self.pools:
                p = &each.pool
                own = unused = live = held = named = 0
                for extent in range(self.extents.num):
                    used = 0
                    for block in range(extent * p.per_extent, (extent + 1) * p.per_extent):
                        used += p.refs[block] & COUNT != 0
                    named += self.extents.owner[extent] == p.number
                    if (self.extents.owner[extent] == p.number) != (used > 0) and (p.span == 1 or used):
                        problems.append(f"extent {extent} has {used} blocks of pool {p.number} and owner "
                                        f"{self.extents.owner[extent]}")
                    live += p.live_in[extent]
                    held += p.live_in[extent] > 0
                    if not 0 <= p.live_in[extent] <= used:
                        problems.append(f"extent {extent} of pool {p.number}: {p.live_in[extent]} of {used} blocks are live")
                    if self.extents.owner[extent] == p.number and used:
                        own += 1
                        unused += p.per_extent - used
                        block = p.free_in[extent]
                        while block != NIL and used <= p.per_extent:
                            used += 1
                            block = p.stack[block] if p.refs[block] & COUNT == 0 else NIL
                        if used != p.per_extent:
                            problems.append(f"extent {extent} of pool {p.number} lists other free blocks than it has")
                if p.num_held != held or live != own * p.per_extent - unused - p.num_cached:
                    problems.append(f"pool {p.number}: {p.num_held} extents are held and {live} blocks live, really {held}, "
                                    f"{own * p.per_extent - unused - p.num_cached}")
                if p.num_own != own or p.num_stack != unused:
                    problems.append(f"pool {p.number}: {p.num_own} extents and {p.num_stack} free blocks, really {own}, {unused}")
                if named != own * p.span:
                    problems.append(f"pool {p.number} has {named} extents, and {own} blocks of {p.span} extents each")
            if self.extents.num_free != unowned:
                problems.append(f"{self.extents.num_free} extents are free, really others")
        finally:
            lock.end_audit(collecting)
        if problems:
            raise AssertionError("; ".join(problems[:8]))


@cython.final
@cython.no_gc_clear      # what dies in the same circle may still have to let go of what is in here
cdef class BlockPool:
    """Block ids of one tier, with reference counts.

    Parameters
    ----------
    num_blocks : int
        Blocks to begin with, 0 or more.
    max_blocks : int, optional
        Grow up to this many, in chunks, when blocks run out. Default: `num_blocks`, a fixed pool.
    chunk : int
        Blocks by which the pool grows. Default 512 (Aule's growing pool).
    watermark : int
        Blocks kept back: `alloc` never hands out the last `watermark` free blocks.

    Notes
    -----
    Ids are int32 in ``[0, max_blocks)``. Thread-safe. Bookkeeping costs 12 bytes a block, lazily touched.

    Raises
    ------
    InvalidArgument, WrongType
        For sizes that are negative, beyond 2**31 - 1, or not integers.
    """

    def __cinit__(self, num_blocks, *, max_blocks=None, chunk=512, watermark=0):
        cdef Py_ssize_t limit = 2**31 - 1
        self.lock = Lock()
        self.pool.capacity = blocks_input(num_blocks, "num_blocks", 0, limit)
        self.pool.max_capacity = (
            self.pool.capacity if max_blocks is None else blocks_input(max_blocks, "max_blocks", 0, limit)
        )
        self.pool.chunk = blocks_input(chunk, "chunk", 1, limit)
        if self.pool.max_capacity < self.pool.capacity:
            raise InvalidArgument(f"max_blocks = {self.pool.max_capacity} is less than num_blocks = {self.pool.capacity}")
        self.pool.watermark = blocks_input(watermark, "watermark", 0, self.pool.max_capacity)
        cdef size_t n = max(1, <size_t>self.pool.max_capacity)
        self.pool.refs = <uint32_t*>calloc(n, sizeof(uint32_t))
        self.pool.generations = <uint32_t*>calloc(n, sizeof(uint32_t))
        self.pool.stack = <int32_t*>malloc((n + 1) * sizeof(int32_t))
        if self.pool.refs == NULL or self.pool.generations == NULL or self.pool.stack == NULL:
            raise MemoryError(f"bookkeeping for {n} blocks needs {12 * n} bytes")

    def __dealloc__(self):
        free(self.pool.refs)
        free(self.pool.generations)
        free(self.pool.stack)
        free(self.pool.free_in)
        free(self.pool.used_in)
        free(self.pool.live_in)
        free(self.pool.has_free)
        free(self.pool.marks)
        free(self.pool.leaving)

    # The pool's blocks lie in extents that it shares with others from now on; it has none yet.
    cdef int share(self, ExtentPool shared, int8_t number, int32_t per_extent, int32_t span) except -1:
        cdef Pool* p = &self.pool
        cdef size_t n = max(1, shared.extents.num)
        p.free_in, p.used_in = <int32_t*>malloc(n * sizeof(int32_t)), <int32_t*>calloc(n, sizeof(int32_t))
        p.live_in = <int32_t*>calloc(n, sizeof(int32_t))
        p.has_free = <uint8_t*>calloc(n, 1)
        if number > 0:
            p.marks = <uint32_t*>calloc(max(1, p.max_capacity), sizeof(uint32_t))
            p.leaving = <uint8_t*>calloc(max(1, p.max_capacity), 1)
        if (p.free_in == NULL or p.used_in == NULL or p.live_in == NULL or p.has_free == NULL
                or (number > 0 and (p.marks == NULL or p.leaving == NULL))):
            raise MemoryError(f"no memory for {n} extents")
        memset(p.free_in, 0xFF, n * sizeof(int32_t))
        self.shared = shared
        p.extents, p.number, p.per_extent, p.span = &shared.extents, number, per_extent, span
        p.lowest, p.fresh = shared.extents.num, p.max_capacity
        p.shift = 31
        while <int64_t>1 << (p.shift - 31) < per_extent:
            p.shift += 1
        p.reciprocal = ((<uint64_t>1 << p.shift) + <uint64_t>per_extent - 1) // <uint64_t>per_extent
        return 0

    def alloc(self, n):
        """Take `n` blocks with one reference each.

        Returns
        -------
        ndarray of int32 [n]

        Raises
        ------
        OutOfBlocks
            Fewer than `n` are free; nothing was taken.
        """
        cdef Py_ssize_t wanted = blocks_input(n, "n", 0, 2**31 - 1)
        cdef int code
        if wanted > self.pool.max_capacity:
            raise self._out_of_blocks(wanted)
        cdef cnp.ndarray out = new_int32(wanted)
        self.lock.acquire()
        code = pool_alloc(&self.pool, <int32_t>wanted, i32(out))
        self.lock.release()
        if code != OK:
            raise self._out_of_blocks(wanted)
        return out

    def free(self, ids):
        """Give back one reference on each of `ids` (int32 [n]).

        Blocks without references become free.

        Raises
        ------
        DoubleRelease
            More references were given back than the caller can hold. Nothing has changed.
        InvalidArgument
            An id is not of this pool. Nothing has changed.
        """
        cdef cnp.ndarray array = int32_input(ids, "ids")
        cdef int32_t bad = 0
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(array)
        self.lock.acquire()
        cdef int code = pool_free(&self.pool, i32(array), n, &bad)
        self.lock.release()
        if code != OK:
            self._raise(code, array, bad)

    def incref(self, ids):
        """Take one more reference on each of `ids` (int32 [n]), which must be owned already.

        Raises
        ------
        StaleHandle
            A block is free, so it cannot be shared. Nothing has changed.
        InvalidArgument
            An id is not of this pool, or its count would pass 2**31 - 1. Nothing has changed.
        """
        cdef cnp.ndarray array = int32_input(ids, "ids")
        cdef int32_t bad = 0
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(array)
        cdef int code
        self.lock.acquire()
        code = pool_incref(&self.pool, i32(array), n, &bad)
        self.lock.release()
        if code == E_UNDERFLOW:
            raise StaleHandle(f"block {i32(array)[bad]} (entry {bad}) is free, or the prefix tree holds it "
                              f"(share an owner of its prefix instead): nothing was changed")
        if code != OK:
            self._raise(code, array, bad)

    def refs(self, ids):
        """Reference counts of `ids`, int32 [n] -> int32 [n].

        The tree's own reference counts as one.
        """
        cdef cnp.ndarray array = int32_input(ids, "ids")
        cdef cnp.ndarray out = new_int32(cnp.PyArray_SIZE(array))
        cdef int32_t i, bad = -1
        self.lock.acquire()
        for i in range(cnp.PyArray_SIZE(array)):
            if <uint32_t>i32(array)[i] >= <uint32_t>self.pool.max_capacity:
                bad = i
                break
            i32(out)[i] = <int32_t>pool_count(&self.pool, i32(array)[i])
        self.lock.release()
        if bad >= 0:
            self._raise(E_RANGE, array, bad)
        return out

    def handles(self, ids):
        """Handles int64 [n] that name these blocks only until each becomes free.

        Raises
        ------
        InvalidArgument
            An id is not of this pool.
        StaleHandle
            A block has become free 2**31 - 1 times: it goes on in use, but no handle can name it any more.
        """
        cdef cnp.ndarray array = int32_input(ids, "ids")
        cdef cnp.ndarray out = np.empty(cnp.PyArray_SIZE(array), np.int64)
        cdef int32_t i, block, bad = -1, used_up = -1
        self.lock.acquire()
        for i in range(cnp.PyArray_SIZE(array)):
            block = i32(array)[i]
            if <uint32_t>block >= <uint32_t>self.pool.max_capacity:
                bad = i
                break
            if self.pool.generations[block] == UNNAMEABLE:
                used_up = block
            i64(out)[i] = make_handle(block, <int32_t>self.pool.generations[block])
        self.lock.release()
        if used_up >= 0:
            raise StaleHandle(f"block {used_up} has become free 2**31 - 1 times, and no handle can name it any more: "
                              f"take another block, or hold a reference instead of a handle")
        if bad >= 0:
            self._raise(E_RANGE, array, bad)
        return out

    def check(self, handles):
        """Ids int32 [n] of `handles`.

        Raises
        ------
        StaleHandle
            A block was freed since its handle was made.
        """
        cdef cnp.ndarray array = int64_input(handles, "handles")
        cdef cnp.ndarray out = new_int32(cnp.PyArray_SIZE(array))
        cdef int32_t i, block, bad = -1
        self.lock.acquire()
        for i in range(cnp.PyArray_SIZE(array)):
            block = handle_slot(i64(array)[i])
            if (<uint32_t>block >= <uint32_t>self.pool.fresh or pool_count(&self.pool, block) == 0
                    or self.pool.generations[block] != <uint32_t>handle_generation(i64(array)[i])
                    or self.pool.generations[block] == UNNAMEABLE):
                bad = i
                break
            i32(out)[i] = block
        self.lock.release()
        if bad >= 0:
            raise StaleHandle(f"handle {i64(array)[bad]:#x} (entry {bad}) names a block that was freed since")
        return out

    def reserve(self, n):
        """Promise `n` of the free blocks to a later ``alloc_reserved``.

        Others can no longer take them.

        Raises
        ------
        OutOfBlocks
            Fewer than `n` are available; nothing was promised.
        """
        cdef Py_ssize_t wanted = blocks_input(n, "n", 0, 2**31 - 1)
        self.lock.acquire()
        cdef bint enough = wanted <= pool_available(&self.pool)
        if enough:
            self.pool.num_reserved += <int32_t>wanted
        self.lock.release()
        if not enough:
            raise self._out_of_blocks(wanted)

    def unreserve(self, n):
        """Take back a promise of `n` blocks."""
        cdef Py_ssize_t wanted = blocks_input(n, "n", 0, 2**31 - 1)
        self.lock.acquire()
        cdef bint enough = wanted <= self.pool.num_reserved
        if enough:
            self.pool.num_reserved -= <int32_t>wanted
        self.lock.release()
        if not enough:
            raise DoubleRelease(f"asked to unreserve {wanted} blocks, {self.pool.num_reserved} are reserved")

    def alloc_reserved(self, n):
        """Like :meth:`alloc`, out of blocks promised by :meth:`reserve` (which it uses up)."""
        cdef Py_ssize_t wanted = blocks_input(n, "n", 0, 2**31 - 1)
        if wanted > self.pool.num_reserved:
            raise InvalidArgument(f"asked for {wanted} reserved blocks, {self.pool.num_reserved} are reserved")
        cdef cnp.ndarray out = new_int32(wanted)
        self.lock.acquire()
        cdef int code = E_BLOCKS
        if wanted <= self.pool.num_reserved:
            self.pool.num_reserved -= <int32_t>wanted
            code = pool_alloc(&self.pool, <int32_t>wanted, i32(out))
            if code != OK:
                self.pool.num_reserved += <int32_t>wanted
        self.lock.release()
        if code != OK:
            raise self._out_of_blocks(wanted)
        return out

    def counts(self):
        """Blocks by state.

        ``capacity, max, free, live, cached, reserved, available`` (available counts growth).
        """
        cdef Pool p
        self.lock.acquire()
        p = self.pool
        self.lock.release()
        free_now, capacity = pool_free_now(&p), pool_now(&p)
        return {
            "capacity": capacity, "max": p.max_capacity, "free": free_now, "cached": p.num_cached,
            "live": capacity - free_now - p.num_cached, "reserved": p.num_reserved, "available": pool_available(&p),
        }

    @property
    def capacity(self):
        """Blocks that exist now."""
        cdef int64_t count
        self.lock.acquire()
        count = pool_now(&self.pool)
        self.lock.release()
        return count

    @property
    def extents(self):
        """The ExtentPool whose memory it shares with others, or None."""
        return self.shared

    @property
    def max_blocks(self):
        """Blocks the pool may grow to."""
        return self.pool.max_capacity

    @property
    def num_free(self):
        """Blocks free now, growth not counted."""
        cdef int64_t count
        self.lock.acquire()
        count = pool_free_now(&self.pool)
        self.lock.release()
        return count

    @property
    def num_available(self):
        """Blocks `alloc` could hand out now: free ones and growth, less reservations and watermark."""
        cdef int64_t count
        self.lock.acquire()
        count = pool_available(&self.pool)
        self.lock.release()
        return count

    @property
    def num_obtainable(self):
        """Blocks that can be had in the end.

        Those that `num_available` counts, and those that the tree alone owns.
        """
        cdef int64_t count
        self.lock.acquire()
        if self.shared is None:
            count = <int64_t>pool_available(&self.pool) + self.pool.num_cached
        else:
            count = self.shared.obtainable(&self.pool)
        self.lock.release()
        return count

    def check_integrity(self):
        """Recompute free + live + cached == capacity from the arrays.

        Raise AssertionError where it does not hold.
        """
        cdef Pool p
        cdef cnp.ndarray stack
        cdef cnp.ndarray refs
        cdef int32_t room, used
        if self.shared is not None:
            self.shared.check_integrity()
            return
        while True:                                 # the arrays are made before the lock is taken
            self.lock.acquire()
            room, used = self.pool.num_stack, self.pool.fresh
            self.lock.release()
            stack, refs = np.empty(room, np.int32), np.empty(used, np.uint32)
            self.lock.acquire()
            p = self.pool
            if p.num_stack == room and p.fresh == used:
                if room:
                    memcpy(cnp.PyArray_DATA(stack), p.stack, room * sizeof(int32_t))
                if used:
                    memcpy(cnp.PyArray_DATA(refs), p.refs, used * sizeof(uint32_t))
                self.lock.release()
                break
            self.lock.release()
        if p.fresh > p.capacity or p.capacity > p.max_capacity or p.num_reserved < 0:
            raise AssertionError(f"bounds: fresh {p.fresh} <= capacity {p.capacity} <= max {p.max_capacity}")
        if len(np.unique(stack)) != len(stack):
            raise AssertionError("an id is twice on the free stack")
        if len(stack) and (stack.min() < 0 or stack.max() >= p.fresh or refs[stack].any()):
            raise AssertionError("a block on the free stack has references or was never handed out")
        if np.count_nonzero(refs) + len(stack) != p.fresh:
            raise AssertionError("a block without references is not on the free stack: a leak")
        if np.count_nonzero(refs == TREE):
            raise AssertionError("the tree's mark without its reference")
        if np.count_nonzero(refs == (TREE | 1)) < p.num_cached:
            raise AssertionError(f"num_cached {p.num_cached} exceeds the blocks that the tree alone owns")

    def dump(self):
        """Everything, for tests: counts, the free stack, and ``{id: references}`` of owned blocks."""
        cdef int32_t i
        stack = []
        for i in range(self.pool.num_stack if self.shared is None else 0):
            stack.append(self.pool.stack[i])
        return {
            **self.counts(),
            "stack": stack,
            "refs": {i: self.pool.refs[i] & COUNT for i in range(self.pool.fresh) if self.pool.refs[i] & COUNT},
        }

    @property
    def address(self):
        """Address of the C ``Pool``, for `pagedkv.core.FUNCTIONS` called from Numba or C.

        Valid while this lives.
        """
        return <size_t>&self.pool

    def __len__(self):
        return self.capacity

    def __repr__(self):
        c = self.counts()
        return f"<BlockPool {c['capacity']} blocks: {c['free']} free, {c['live']} live, {c['cached']} cached>"

    def _out_of_blocks(self, asked):
        c = self.counts()
        return OutOfBlocks(asked, c["free"], c["cached"], c["live"], "pool")

    def _raise(self, code, array, index):
        what = f"block {array[index]} (entry {index} of {len(array)})"
        if code == E_RANGE:
            raise InvalidArgument(f"{what} was never handed out by this pool (ids are 0..{self.pool.fresh - 1}): "
                                  f"nothing was changed")
        if code == E_UNDERFLOW:
            raise DoubleRelease(f"{what} has no reference of the caller's left to give back "
                                f"(or the prefix tree holds it: release its owner): nothing was changed")
        if code == E_OVERFLOW:
            raise InvalidArgument(f"{what} already has 2**31 - 1 references: nothing was changed")
        raise PagedKVError(f"code {code}")


# Addresses of the nogil functions, for callers without Python (Numba, ctypes, C). Signatures:
# int(Pool*, ...) as in block_pool.pxd.
FUNCTIONS = {
    "pool_alloc": (<size_t>&pool_alloc, "int32 (intp pool, int32 n, intp out)"),
    "pool_free": (<size_t>&pool_free, "int32 (intp pool, intp ids, int32 n, intp bad)"),
    "pool_incref": (<size_t>&pool_incref, "int32 (intp pool, intp ids, int32 n, intp bad)"),
}
