"""Running sequences as rows of one table.

Append, allocate, build a step's arrays, commit, fork, truncate, release.

A step is one call for the whole batch with the GIL released once; the arrays come out of one buffer.
"""
# Over 400 lines: every method works on the same row structs under one lock, and C compilers inline only within a module.

cimport cython
cimport numpy as cnp
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

import numpy as np

from pagedkv._core.arrays cimport (
    count_input, handle_input, i32, i64, int32_input, int64_input, new_int32, tokens_input,
)
from pagedkv._core.block_pool cimport COUNT, extents_for, pool_alloc, pool_available, pool_drop_one
from pagedkv._core.group_room cimport make_room_for
from pagedkv._core.insertion cimport place_insert
from pagedkv._core.lock cimport read_hint, write_hint
from pagedkv._core.owners cimport (
    place_acquire, place_arrive, place_blocks, place_depart, place_follow, place_owner, place_release, place_share,
    place_shorten, place_uncut,
)
from pagedkv._core.place cimport TAKEN_OVER, Groups, Place
from pagedkv._core.points cimport point_make
from pagedkv._core.radix_tree cimport Tree, node_pages, node_top, tree_named
from pagedkv._core.remainders cimport drop_outgrown, place_keep_remainder
from pagedkv._core.retention cimport retain
from pagedkv._core.tails cimport need, pages_join, tail_shorten, usable_of_path
from pagedkv._core.transfers cimport make_room
from pagedkv._core.types cimport (
    DEVICE, E_BLOCKS, E_DUPLICATE, E_MEMORY, E_OVERFLOW, E_RANGE, E_STALE, E_STATE, MAX_BLOCK_SIZE, NIL, NO_TOKEN, OK,
    handle_generation, handle_slot, make_handle, next_generation,
)
from pagedkv._core.row_info import RowInfo
from pagedkv.errors import DoubleRelease, InvalidArgument, PagedKVError, StaleHandle, WrongType

cnp.import_array()

cdef extern from *:
    """
    #define pkv_prefetch(p) __builtin_prefetch(p, 1)
    """
    void prefetch "pkv_prefetch"(const void* p) noexcept nogil

cdef enum:
    E_FOLLOW = -100         # a row cannot follow its leader so far
    AHEAD = 16              # rows: a big batch's rows lie in thousands of cache lines that no loop order brings together
    TAIL = 16               # columns: a row's blocks are copied in multiples of it, with the padding behind them


# Tokens of a row beyond its prompt.
cdef inline int64_t generated(Row* row) noexcept nogil:
    return row.num_tokens - row.prompt if row.num_tokens > row.prompt else 0


@cython.final
@cython.freelist(16)
cdef class GroupArrays:
    """The arrays of a step for a group of layers that does not see everything.

    Its tables are compact: column 0 is the first block that is still needed, and lengths count from there.

    Attributes
    ----------
    block_tables : int32 [num_seqs, max_blocks], ids of pages, padded with -1
    seq_lens : int32 [num_seqs], KV tokens from column 0 on, this step's included
    q_indptr : int32 [num_seqs + 1], as the step's
    slot_mapping : int64 [num_tokens], where each new token goes
    copies : int32 [n, 2], (source, destination) pages to copy before anything is written
    """

    cdef readonly object block_tables
    cdef readonly object seq_lens
    cdef readonly object q_indptr
    cdef readonly object slot_mapping
    cdef readonly object copies


@cython.final
@cython.freelist(8)
cdef class StepArrays:
    """The arrays of a step's kernels, as views of one int32 and one int64 buffer.

    What writes and reads go by is read-only.

    Attributes
    ----------
    block_tables : int32 [num_seqs, max_blocks], padded with -1
    seq_lens : int32 [num_seqs], KV tokens including this step's
    q_indptr : int32 [num_seqs + 1], offsets of the query tokens
    positions : int32 [num_tokens]
    tokens : int32 [num_tokens]
    slot_mapping : int64 [num_tokens], where each new token goes
    copies : int32 [n, 2], (source, destination) blocks to copy before anything is written (copy-on-write)
    num_new_blocks : int, blocks that were allocated for it
    number : int, of the step in its block table: what :meth:`BlockTable.commit` and :meth:`BlockTable.are_in` take
    groups : tuple of GroupArrays, one for each group of layers that does not see everything
    """

    cdef readonly object block_tables
    cdef readonly object seq_lens
    cdef readonly object q_indptr
    cdef readonly object positions
    cdef readonly object tokens
    cdef readonly object slot_mapping
    cdef readonly object copies
    cdef readonly tuple groups
    cdef readonly int64_t num_new_blocks
    cdef readonly int64_t number
    cdef BlockTable table
    cdef int64_t num_changes        # of the table, when the step began
    cdef int32_t block_size

    @property
    def is_untouched(self):
        """Whether no row of the table has changed hands since this step began.

        None was in another step, committed, cancelled, cut back or released.
        Then `BlockTable.are_in` holds for its rows: a glance where that looks at every row. False says nothing.
        """
        return read_hint(&self.table.num_changes) == self.num_changes

    def to_csr(self):
        """The tables in CSR form.

        ``kv_indptr`` int32 [n+1], ``kv_indices`` int32 [blocks], ``kv_last_block_len`` int32 [n].
        """
        cdef int32_t block_size = self.block_size
        blocks = -(-self.seq_lens // np.int32(block_size))
        indptr = np.zeros(len(blocks) + 1, np.int32)
        np.cumsum(blocks, out=indptr[1:])
        used = np.arange(self.block_tables.shape[1], dtype=np.int32) < blocks[:, None]
        last = np.where(self.seq_lens > 0, (self.seq_lens - 1) % np.int32(block_size) + 1, 0).astype(np.int32)
        return indptr, self.block_tables[used], last


# Part of `base` (int32) from element `at` on, [rows] or, with columns >= 0, [rows, columns]; shares its memory, read-only.
cdef object part_of(cnp.ndarray base, int64_t at, int64_t rows, int64_t columns):
    cdef cnp.npy_intp[2] shape
    shape[0], shape[1] = rows, columns
    cdef cnp.ndarray view = cnp.PyArray_SimpleNewFromData(1 if columns < 0 else 2, shape, cnp.NPY_INT32, i32(base) + at)
    cnp.set_array_base(view, base)
    cnp.PyArray_CLEARFLAGS(view, cnp.NPY_ARRAY_WRITEABLE)
    return view


# The same of int64, [n].
cdef object slots_of(cnp.ndarray base, int64_t at, cnp.npy_intp n):
    cdef cnp.ndarray view = cnp.PyArray_SimpleNewFromData(1, &n, cnp.NPY_INT64, i64(base) + at)
    cnp.set_array_base(view, base)
    cnp.PyArray_CLEARFLAGS(view, cnp.NPY_ARRAY_WRITEABLE)
    return view


# Who follows whom in a batch of n, as `plan` takes it: int32 [3 * n].
cdef cnp.ndarray links_input(follow, int64_t n):
    cdef cnp.ndarray entries, links
    cdef int64_t i, follower, leader, m
    cdef int32_t* data
    if follow is None:
        return None
    entries = int32_input(np.ravel(follow), "follow")
    if np.ndim(follow) != 2 or np.shape(follow)[1] != 3:
        raise InvalidArgument(f"follow must be (follower, leader, num_blocks) rows, int32 [m, 3], got shape {np.shape(follow)}")
    m = cnp.PyArray_SIZE(entries) // 3
    links = np.full(3 * n, NIL, np.int32)
    data = i32(links)
    for i in range(m):
        follower, leader = i32(entries)[3 * i], i32(entries)[3 * i + 1]
        if not (0 <= follower < n and 0 <= leader < n):
            raise InvalidArgument(f"follow[{i}] names entries {follower} and {leader} of a batch of {n} rows")
        if data[follower] != NIL or follower == leader:
            raise InvalidArgument(f"follow[{i}]: entry {follower} follows two others, or itself")
        data[follower] = <int32_t>leader
        data[n + follower] = i32(entries)[3 * i + 2]
        data[2 * n + n - m + i] = <int32_t>follower
    seen = {follower for follower, leader in enumerate(links[:n].tolist()) if leader == NIL}
    for i, follower in enumerate(sorted(seen)):
        data[2 * n + i] = <int32_t>follower
    for follower in links[3 * n - m :].tolist():
        if data[follower] not in seen:
            raise InvalidArgument(f"entry {follower} follows entry {data[follower]}, which follows another one: put that first")
        seen.add(follower)
    return links


cdef object new_tuple = tuple.__new__          # RowInfo's own constructor takes three times as long
cdef object no_copies = np.empty((0, 2), np.int32)
no_copies.flags.writeable = False


@cython.final
@cython.no_gc_clear      # what dies in the same circle may still have to let go of what is in here
cdef class BlockTable:
    """Sequences' tokens and their logical -> physical block maps.

    Parameters
    ----------
    source : BlockPool or Placement
        Where blocks come from. With a Placement, prompts match the prefix tree and full blocks are committed to it.
    max_sequences : int
        Sequences at most.
    block_size : int, optional
        Needed with a bare BlockPool; with a Placement its tree's.

    Notes
    -----
    A row is named by an int64 handle, which stops working when the row is released. Thread-safe.
    """

    def __cinit__(self, source, max_sequences=4096, *, block_size=None):
        cdef int32_t i
        if isinstance(source, Placement):
            self.placement = source
            self.block_pool = source.pools[0]
            self.block_size = self.placement.tree.tree.block_size
            if block_size is not None and block_size != self.block_size:
                raise InvalidArgument(f"block_size = {block_size}, but the tree's is {self.block_size}")
        elif isinstance(source, BlockPool):
            self.block_pool = source
            self.block_size = count_input(16 if block_size is None else block_size, "block_size", 1, 256)
        else:
            raise WrongType(f"source is {type(source).__name__}: a BlockPool or a Placement is needed")
        self.shift = (<object>self.block_size).bit_length() - 1 if self.block_size & (self.block_size - 1) == 0 else -1
        self.pool = &self.block_pool.pool
        self.lock = self.block_pool.lock
        self.max_rows = count_input(max_sequences, "max_sequences", 1, 1 << 24)
        self.width = 64
        self.rows = <Row*>calloc(self.max_rows, sizeof(Row))
        self.ties = <Tie*>malloc(self.max_rows * sizeof(Tie))
        self.table = <int32_t*>malloc(<size_t>self.max_rows * self.width * sizeof(int32_t))
        self.free_rows = <int32_t*>malloc(self.max_rows * sizeof(int32_t))
        if self.rows == NULL or self.ties == NULL or self.table == NULL or self.free_rows == NULL:
            raise MemoryError(f"no memory for {self.max_rows} rows")
        memset(self.ties, 0xFF, self.max_rows * sizeof(Tie))
        memset(self.table, 0xFF, <size_t>self.max_rows * self.width * sizeof(int32_t))
        for i in range(self.max_rows):
            self.free_rows[i] = self.max_rows - 1 - i
        self.num_free_rows = self.max_rows
        self.num_groups = 1
        if self.placement is not None and self.placement.place.groups != NULL:
            self.num_groups = self.placement.place.groups.num
            for i in range(1, self.num_groups):
                self.short_width[i] = 16
                self.short_tables[i] = <int32_t*>malloc(<size_t>self.max_rows * 16 * sizeof(int32_t))
                self.firsts[i] = <int32_t*>calloc(self.max_rows, sizeof(int32_t))
                if self.short_tables[i] == NULL or self.firsts[i] == NULL:
                    raise MemoryError(f"no memory for {self.max_rows} rows")
                memset(self.short_tables[i], 0xFF, <size_t>self.max_rows * 16 * sizeof(int32_t))
        self.block_pool.attached = True             # no Placement may give the pool another mutex now

    def __dealloc__(self):
        cdef int32_t r
        if self.rows != NULL:
            for r in range(self.max_rows):
                free(self.rows[r].tokens)
        free(self.rows)
        free(self.ties)
        free(self.table)
        for r in range(MAX_GROUPS):
            free(self.short_tables[r])
            free(self.firsts[r])
        free(self.free_rows)
        free(self.copied)

    # ---- inside: the caller holds the lock

    cdef int32_t row_of(self, int64_t handle) noexcept nogil:
        cdef int32_t r = handle_slot(handle)
        if r < 0 or r >= self.max_rows or not self.rows[r].live or self.rows[r].generation != handle_generation(handle):
            return E_STALE
        return r

    cdef bint grow_tokens(self, Row* row, int64_t wanted) noexcept nogil:
        cdef int64_t capacity = row.tokens_capacity
        cdef int32_t* tokens
        if wanted <= capacity:
            return True
        if wanted > 1 << 30:
            return False
        capacity = wanted if wanted > 2 * capacity else 2 * capacity
        tokens = <int32_t*>realloc(row.tokens, capacity * sizeof(int32_t))
        if tokens == NULL:
            return False
        row.tokens = tokens
        row.tokens_capacity = <int32_t>capacity
        return True

    cdef bint grow_width(self, int32_t wanted) noexcept nogil:
        cdef int64_t width = self.width, r
        cdef int32_t* table
        if wanted <= width:
            return True
        while width < wanted:
            width *= 2
        table = <int32_t*>malloc(<size_t>self.max_rows * width * sizeof(int32_t))
        if table == NULL:
            return False
        for r in range(self.max_rows):
            if self.rows[r].live:
                memset(table + r * width, 0xFF, width * sizeof(int32_t))
                memcpy(table + r * width, self.table + r * self.width, self.rows[r].num_blocks * sizeof(int32_t))
        free(self.table)
        self.table = table
        self.width = <int32_t>width
        return True

    cdef void put(self, int32_t r, int32_t column, int32_t block) noexcept nogil:
        self.table[<int64_t>r * self.width + column] = block

    # Checks a batch and counts: totals = [new blocks, tokens, widest row in blocks, copies on write, index at fault].
    # q_lens NULL: all uncomputed tokens. links NULL: no row follows another one; else, for the n entries of the batch, whom each
    # follows (an entry, or NIL), up to which block, and the entries in an order in which leaders stand before their followers.
    # `pages` counts the same for short groups; NULL without. Changes nothing that a caller can see.
    cdef int plan(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead, Pages* pages,
                  const int32_t* links, int64_t* totals) noexcept nogil:
        cdef int32_t i, j, r, q, blocks, group, num_groups = 1 if pages == NULL else self.num_groups
        cdef int32_t widest[MAX_GROUPS]
        cdef int64_t unpaged = 0
        cdef Row* row
        memset(totals, 0, 5 * sizeof(int64_t))
        if pages != NULL:
            memset(widest, 0, sizeof(widest))
            memset(pages, 0, sizeof(Pages))
        if self.num_following:                      # these rows leave their steps, and who follows them, too
            for i in range(n):
                r = self.row_of(handles[i])
                if r >= 0:
                    self.part(r)
        self.batch += 1
        for i in range(n):
            totals[4] = i
            r = self.row_of(handles[i])
            if r < 0:
                return E_STALE
            row = &self.rows[r]
            if row.marked == self.batch:
                return E_DUPLICATE
            row.marked = self.batch
            if self.num_copied and row.scheduled:   # a step that ended neither way: its copies may not have been made
                self.uncopy(r)
            if links != NULL and links[i] != NIL:
                continue
            q = row.num_tokens - row.computed
            if q_lens != NULL:
                if q_lens[i] < 0 or q_lens[i] > q:
                    return E_RANGE
                q = q_lens[i]
            blocks = blocks_in(row.computed + q + lookahead + self.block_size - 1, self.block_size, self.shift)
            totals[1] += q
            if blocks > row.num_blocks:
                totals[0] += blocks - row.num_blocks
            else:
                blocks = row.num_blocks
            if blocks > totals[2]:
                totals[2] = blocks
            if row.forked and q > 0:                # blocks to be written may exist already and have other owners
                for j in range(blocks_in(row.computed, self.block_size, self.shift), row.num_blocks):
                    if self.pool.refs[self.table[<int64_t>r * self.width + j]] & COUNT > 1:
                        totals[0] += 1
                        totals[3] += 1
            if num_groups > 1:                      # all short groups have pages of the same blocks
                unpaged += blocks - row.paged
                for group in range(1, num_groups):
                    widest[group] = max(widest[group], blocks - self.firsts[group][r])
                if row.forked and q > 0:
                    self.count_copies(r, pages)
        for group in range(1, num_groups):
            pages.more[group], pages.wide[group] = unpaged + pages.copied[group], widest[group]
        return OK if links == NULL else self.plan_followers(handles, n, q_lens, lookahead, links, totals)

    # The same for those that follow others.
    cdef int plan_followers(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead,
                            const int32_t* links, int64_t* totals) noexcept nogil:
        cdef const int32_t* until = links + n
        cdef const int32_t* order = links + 2 * n
        cdef int32_t k, i, entry, r, leader, start, blocks, q
        for k in range(n):
            i = order[k]
            entry = links[i]
            if entry == NIL:
                continue
            totals[4] = i
            r, leader = handle_slot(handles[i]), handle_slot(handles[entry])
            start = self.rows[leader].computed if links[entry] == NIL else until[entry] * self.block_size
            q = self.rows[leader].num_tokens - start if q_lens == NULL else q_lens[entry]
            if q <= 0 or until[i] > blocks_in(start + q, self.block_size, self.shift):
                return E_FOLLOW                             # the leader does not get so far in this step
            if until[i] <= blocks_in(self.rows[r].computed, self.block_size, self.shift):
                return E_FOLLOW
            if self.agree(r, leader, until[i]) < until[i]:
                return E_FOLLOW
            start = until[i] * self.block_size
            q = self.rows[r].num_tokens - start
            if q_lens != NULL:
                if q_lens[i] > q:
                    return E_RANGE
                q = q_lens[i]
            if q <= 0:
                return E_RANGE
            blocks = blocks_in(start + q + lookahead + self.block_size - 1, self.block_size, self.shift)
            totals[0] += blocks - until[i]
            totals[1] += q
            if blocks > totals[2]:
                totals[2] = blocks
        return OK

    # Leading blocks, at most `limit`, that row r can have in common with another row of its step: of the same tokens under the
    # same root, where r has computed no less than the other has committed. 0 where it can have none beyond what it has.
    cdef int32_t agree(self, int32_t r, int32_t leader, int32_t limit) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef Row* other = &self.rows[leader]
        cdef int64_t bs = self.block_size
        cdef int32_t first = blocks_in(row.computed, self.block_size, self.shift), own = row.num_owned
        cdef const int32_t* ours = self.table + <int64_t>r * self.width
        cdef const int32_t* theirs = self.table + <int64_t>leader * self.width
        limit = min(limit, blocks_in(row.num_tokens, self.block_size, self.shift),
                    blocks_in(other.num_tokens, self.block_size, self.shift))
        if r == leader or row.root != other.root or first < other.num_owned or limit <= first:
            return 0
        if own < first:                                     # the tree refused these: both must hold the same ones
            if other.num_owned != own or other.num_blocks < first:
                return 0
            if memcmp(ours + own, theirs + own, (first - own) * sizeof(int32_t)) != 0:
                return 0
        own = other.num_owned                               # a block of the tree has one path to the root
        if own > 0 and ours[own - 1] != theirs[own - 1]:
            return 0
        while own < limit and memcmp(row.tokens + own * bs, other.tokens + own * bs, bs * sizeof(int32_t)) == 0:
            own += 1
        return own if own > first else 0

    # Allocates what `plan` counted (the pool has it) for n entries, and writes their arrays: tables [n][w], seq_lens [n] and
    # q_indptr [n+1], whose first element is written already, begin with these entries; positions [t], tokens [t] and slots [t]
    # are those of the whole batch. Copies on write, written to copies [c][2].
    cdef int64_t fill(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead, int32_t* tables,
                      int32_t* seq_lens, int32_t* q_indptr, int32_t* positions, int32_t* tokens, int64_t* slots, int64_t w,
                      int32_t* copies) noexcept nogil:
        cdef int64_t at = q_indptr[0], c = 0, wide
        cdef int32_t i, j, r, first, last, blocks, block, bs = self.block_size, column, offset
        cdef int32_t* table
        cdef Row* row
        for i in range(n):
            if i + AHEAD < n:
                row = &self.rows[handle_slot(handles[i + AHEAD])]
                prefetch(row.tokens + row.computed)
            r = handle_slot(handles[i])
            row = &self.rows[r]
            table = self.table + <int64_t>r * self.width
            first = row.computed
            row.scheduled = row.num_tokens - first if q_lens == NULL else q_lens[i]
            row.step = self.num_steps
            last = first + row.scheduled
            column = blocks_in(first, bs, self.shift)
            if row.forked and row.scheduled > 0:
                row.forked = 0
                for j in range(row.num_owned, row.num_blocks):
                    if self.pool.refs[table[j]] & COUNT > 1:
                        if j < column:
                            row.forked = 1
                            continue
                        pool_alloc(self.pool, 1, &block)
                        copies[2 * c] = table[j]
                        copies[2 * c + 1] = block
                        self.note_copy(r, 0, j, table[j], block)
                        c += 1
                        self.put(r, j, block)
            blocks = blocks_in(last + lookahead + bs - 1, bs, self.shift)
            while row.num_blocks < blocks:
                pool_alloc(self.pool, 1, &block)
                self.put(r, row.num_blocks, block)
                row.num_blocks += 1
            # beyond a row's blocks the table is NIL, so the batch's usual padding is copied in the same call
            wide = min((row.num_blocks + TAIL - 1) & -TAIL, w)
            memcpy(tables + i * w, table, wide * sizeof(int32_t))
            if wide < w:
                memset(tables + i * w + wide, 0xFF, (w - wide) * sizeof(int32_t))
            seq_lens[i] = last
            if row.scheduled == 1:                              # a decode step: no loops
                offset = first - column * bs
                positions[at] = first
                tokens[at] = row.tokens[first]
                slots[at] = <int64_t>table[column] * bs + offset
            else:
                memcpy(tokens + at, row.tokens + first, row.scheduled * sizeof(int32_t))
                offset = first - column * bs
                for j in range(row.scheduled):
                    positions[at + j] = first + j
                    slots[at + j] = <int64_t>table[column] * bs + offset
                    offset += 1
                    if offset == bs:
                        offset = 0
                        column += 1
            at += row.scheduled
            q_indptr[i + 1] = <int32_t>at
        return c

    # The same for a whole batch in which rows follow others: leaders first, whose blocks must be there.
    cdef void fill_linked(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead,
                          const int32_t* links, int32_t* tables, int32_t* seq_lens, int32_t* q_indptr, int32_t* positions,
                          int64_t* slots, const int64_t* totals, int32_t* copies) noexcept nogil:
        cdef int32_t i, k, r, first, bs = self.block_size
        cdef Row* row
        for i in range(n):
            row = &self.rows[handle_slot(handles[i])]
            first = row.computed if links[i] == NIL else links[n + i] * bs
            q_indptr[i + 1] = q_indptr[i] + (row.num_tokens - first if q_lens == NULL else q_lens[i])
        for k in range(n):
            i = links[2 * n + k]
            r = handle_slot(handles[i])
            row = &self.rows[r]
            if links[i] != NIL:
                self.join(r, handle_slot(handles[links[i]]), links[n + i])
            first = row.computed
            if links[i] != NIL:
                row.computed = links[n + i] * bs                # where its own tokens begin; for this call only
            copies += 2 * self.fill(handles + i, 1, NULL if q_lens == NULL else q_lens + i, lookahead, tables + i * totals[2],
                                    seq_lens + i, q_indptr + i, positions, positions + totals[1], slots, totals[2], copies)
            row.computed = first

    # Row r has its shared blocks again where copies of them were not made.
    cdef void uncopy(self, int32_t r) noexcept nogil:
        cdef int64_t j = 0
        cdef int32_t group
        while j < self.num_copied:
            if self.copied[j].row != r:
                j += 1
                continue
            group = self.copied[j].group
            if group == 0:
                self.put(r, self.copied[j].column, self.copied[j].source)
            else:
                self.pages_of(r, group)[self.copied[j].column] = self.copied[j].source
            pool_drop_one(self.pool_of(group), self.copied[j].target)
            self.rows[r].forked = 1
            self.forget_copy(j)

    # The row's reference on the source stays until copies_done.
    cdef void note_copy(self, int32_t r, int32_t group, int32_t column, int32_t source, int32_t target) noexcept nogil:
        cdef Copy* copy = &self.copied[self.num_copied]
        copy.row, copy.group, copy.column, copy.source, copy.target = r, group, column, source, target
        self.num_copied += 1

    # The targets of row r's copies are written: only the references on the sources are left to let go of.
    cdef void keep_copies(self, int32_t r) noexcept nogil:
        cdef int64_t j
        for j in range(self.num_copied):
            if self.copied[j].row == r:
                self.copied[j].row = NIL

    cdef void forget_copy(self, int64_t j) noexcept nogil:
        self.num_copied -= 1
        self.copied[j] = self.copied[self.num_copied]

    # Row r follows another row of its step, which has its blocks already. What r holds beyond its whole computed blocks goes.
    cdef void join(self, int32_t r, int32_t leader, int32_t until) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef Tie* tie = &self.ties[r]
        cdef int32_t j, first = blocks_in(row.computed, self.block_size, self.shift)
        cdef int32_t* table = self.table + <int64_t>r * self.width
        for j in range(row.num_blocks - 1, first - 1, -1):
            pool_drop_one(self.pool, table[j])
            table[j] = NIL
        memcpy(table + first, self.table + <int64_t>leader * self.width + first, (until - first) * sizeof(int32_t))
        row.computed = first * self.block_size
        row.num_blocks = until
        tie.until, tie.leader = until, leader
        tie.next_follower = self.ties[leader].follower
        self.ties[leader].follower = r
        self.num_following += 1

    # Row r follows no other one any more.
    cdef void unlink(self, int32_t r) noexcept nogil:
        cdef int32_t* at = &self.ties[self.ties[r].leader].follower
        while at[0] != r:
            at = &self.ties[at[0]].next_follower
        at[0] = self.ties[r].next_follower
        self.ties[r].leader = self.ties[r].next_follower = NIL
        self.num_following -= 1

    # Row r's part in its step is over without a commit: rows that follow it, and r if it follows another one, are as before.
    cdef void part(self, int32_t r) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t j, first
        while self.ties[r].follower != NIL:
            self.part(self.ties[r].follower)
        if self.ties[r].leader == NIL:
            return
        first = blocks_in(row.computed, self.block_size, self.shift)
        for j in range(row.num_blocks - 1, first - 1, -1):
            if j >= self.ties[r].until:
                pool_drop_one(self.pool, self.table[<int64_t>r * self.width + j])
            self.put(r, j, NIL)
        row.num_blocks = first
        row.scheduled = 0
        row.step = 0
        self.unlink(r)
        write_hint(&self.num_changes, self.num_changes + 1)

    # Row r's leader is committed: the blocks that r named are its own too, through the tree or, where the tree refused them, by
    # a reference on each. Blocks that the tree had; a Code without memory: then r is as before its step.
    cdef int32_t settle(self, int32_t r) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef Tie* tie = &self.ties[r]
        cdef Row* leader = &self.rows[tie.leader]
        cdef int32_t j, first = blocks_in(row.computed, self.block_size, self.shift), got = 0
        cdef int32_t* table = self.table + <int64_t>r * self.width
        cdef const int32_t* theirs = self.table + <int64_t>tie.leader * self.width
        self.commit_row(r)                                  # what the tree refused before, it may take now
        if row.owner != NIL and row.num_owned == first:
            got = place_follow(&self.placement.place, row.owner, row.tokens + <int64_t>first * self.block_size,
                               tie.until - first, table + first)
            row.num_owned += got
        if max(row.num_owned, first) < min(tie.until, leader.num_owned):
            row.computed = max(row.num_owned, first) * self.block_size
            self.part(r)
            return E_MEMORY
        for j in range(max(row.num_owned, first), tie.until):
            table[j] = theirs[j]
            self.pool.refs[theirs[j]] += 1
        row.computed = tie.until * self.block_size
        self.unlink(r)
        return got

    # As `commit` where rows follow others: each leader goes before those that follow it.
    cdef int commit_together(self, const int64_t* handles, int32_t n, int64_t* committed) noexcept nogil:
        cdef int32_t i, r, left = n, got, code = OK
        while left > 0:
            for i in range(n):
                r = handle_slot(handles[i])
                if self.rows[r].marked != self.batch or self.ties[r].leader != NIL:
                    continue
                self.rows[r].marked = 0
                left -= 1
                committed[0] += self.commit_scheduled(r)
                while self.ties[r].follower != NIL:
                    got = self.settle(self.ties[r].follower)
                    if got < 0:
                        code = got
                    else:
                        committed[0] += got
        return code

    # Full computed blocks become the tree's. Blocks committed.
    cdef int32_t commit_row(self, int32_t r) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t full = row.computed // self.block_size, done, i, first
        cdef int32_t* mine = self.table + <int64_t>r * self.width + row.num_owned
        cdef int32_t before[64]
        if row.owner == NIL or full <= row.num_owned:
            return 0
        full -= row.num_owned
        if self.num_groups > 1:
            full = self.own_pages(r, full)
        if self.placement.place.has_remainders:
            drop_outgrown(&self.placement.place, row.owner, row.tokens + <int64_t>row.num_owned * self.block_size)
        first = row.num_owned
        if full <= 64:
            memcpy(before, mine, full * sizeof(int32_t))
        done = place_insert(&self.placement.place, row.owner, row.tokens + <int64_t>row.num_owned * self.block_size, mine, full)
        for i in range(done):                                   # log the adopted ones
            if full > 64 or mine[i] != before[i]:
                self.put(r, row.num_owned + i, mine[i])
        row.num_owned += done
        if self.num_groups > 1 and done:
            self.commit_groups(r, first)
        return done

    # ---- groups of layers: pages of the short ones (tails.pxd)

    cdef bint grow_short(self, int32_t group, int64_t wanted) noexcept nogil:
        cdef int64_t width = self.short_width[group], r
        cdef int32_t* tables
        if wanted <= width:
            return True
        while width < wanted:
            width *= 2
        tables = <int32_t*>malloc(<size_t>self.max_rows * width * sizeof(int32_t))
        if tables == NULL:
            return False
        for r in range(self.max_rows):
            if self.rows[r].live:
                memset(tables + r * width, 0xFF, width * sizeof(int32_t))
                memcpy(tables + r * width, self.pages_of(<int32_t>r, group), self.short_width[group] * sizeof(int32_t))
        free(self.short_tables[group])
        self.short_tables[group], self.short_width[group] = tables, width
        return True

    cdef bint grow_shorts(self, const int64_t* wanted) noexcept nogil:
        cdef int32_t group
        for group in range(1, self.num_groups):
            if not self.grow_short(group, wanted[group]):
                return False
        return True

    # Of a row's own next `blocks` blocks, the leading ones whose pages no other row holds: the tree would not be told when
    # another one lets go of a page as its own.
    cdef int32_t own_pages(self, int32_t r, int32_t blocks) noexcept nogil:
        cdef int32_t group, i, first = self.rows[r].num_owned
        for i in range(blocks):
            for group in range(1, self.num_groups):
                if self.pool_of(group).refs[self.pages_of(r, group)[first + i - self.first_of(r, group)]] & COUNT > 1:
                    return i
        return blocks

    # Room for the tail of any boundary.
    cdef bint grow_tails(self) noexcept nogil:
        cdef int32_t group
        for group in range(1, self.num_groups):
            if not self.grow_short(group, max(self.placement.place.groups.window[group],
                                              self.placement.place.groups.chunk[group])):
                return False
        return True

    # Row r has the pages of its owner and no others. False: no memory.
    cdef bint load_tail(self, int32_t r) noexcept nogil:
        cdef Tree* t = self.placement.place.tree
        cdef int32_t group, n, first, last, begin, blocks = self.placement.place.owners[self.rows[r].owner].num_blocks
        for group in range(1, self.num_groups):
            self.firsts[group][r] = self.placement.place.owners[self.rows[r].owner].first[group]
            first, last, n = self.first_of(r, group), blocks, self.placement.place.owners[self.rows[r].owner].node
            if not self.grow_short(group, blocks - first):
                return False
            memset(self.pages_of(r, group), 0xFF, self.short_width[group] * sizeof(int32_t))
            while last > first:
                begin = max(first, t.nodes[n].depth)
                memcpy(self.pages_of(r, group) + begin - first, node_pages(t, n, DEVICE, group) + begin - t.nodes[n].depth,
                       (last - begin) * sizeof(int32_t))
                last, n = begin, t.nodes[n].parent
        self.rows[r].paged = blocks
        return True

    # Row r lets go of its own pages behind its first `blocks` blocks.
    cdef void drop_pages(self, int32_t r, int32_t blocks) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t group, j, first
        blocks = max(blocks, row.num_owned)
        for group in range(1, self.num_groups):
            first = self.first_of(r, group)
            for j in range(row.paged - 1, blocks - 1, -1):
                pool_drop_one(self.pool_of(group), self.pages_of(r, group)[j - first])
                self.pages_of(r, group)[j - first] = NIL
        row.paged = min(row.paged, blocks)

    # Adds to `pages` the pages of row r that its next tokens are written to and other rows share.
    cdef void count_copies(self, int32_t r, Pages* pages) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t group, j
        for group in range(1, self.num_groups):
            for j in range(max(row.num_owned, blocks_in(row.computed, self.block_size, self.shift)), row.paged):
                pages.copied[group] += self.pool_of(group).refs[self.pages_of(r, group)[j - self.first_of(r, group)]] & COUNT > 1

    # The pages of each short group that rows need beside those they have, until all their tokens are computed, `most` at once.
    cdef void plan_to_finish(
        self, const int64_t* handles, int32_t n, int32_t most, int32_t lookahead, Pages* pages
    ) noexcept nogil:
        cdef Groups* g = self.placement.place.groups
        cdef int32_t i, r, q, group, end, first
        cdef Row* row
        for group in range(1, self.num_groups):
            pages.more[group] = pages.copied[group]     # as `plan` counted them
            for i in range(n):
                r = handle_slot(handles[i])
                row, first = &self.rows[r], self.first_of(r, group)
                q = min(most, row.num_tokens - row.computed)
                end = blocks_in(row.num_tokens + lookahead + self.block_size - 1, self.block_size, self.shift)
                end = min(end - first, max(g.window[group], g.chunk[group]) + 1
                          + blocks_in(q + 2 * lookahead + self.block_size - 1, self.block_size, self.shift))
                pages.more[group] += max(0, end - (row.paged - first))

    # Blocks of the spine, and as many more as fit into the extents that the pages of short groups would take.
    cdef int64_t as_blocks(self, int64_t blocks, const int64_t* more) noexcept nogil:
        cdef int64_t extents
        cdef int32_t group
        cdef Pool* pool
        for group in range(1, self.num_groups):
            pool = self.pool_of(group)
            if more[group] > pool.num_stack:
                extents = extents_for(pool, more[group] - pool.num_stack)
                blocks += (extents + self.pool.span - 1) // self.pool.span * self.pool.per_extent
        return blocks

    # As `fill`, for one short group, before it: the pages that `plan_groups` counted are there. tables [n][w], copies [c][2].
    cdef void fill_group(self, int32_t group, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead,
                         int64_t w, int32_t* tables, int32_t* seq_lens, int64_t* slots, int32_t* copies) noexcept nogil:
        cdef int64_t at = 0, wide, width = self.short_width[group]
        cdef int32_t i, j, r, q, blocks, block, first, column, offset, bs = self.block_size, shift = self.shift
        cdef int32_t spare = blocks_in(lookahead + bs - 1, bs, shift)
        cdef bint is_last = group == self.num_groups - 1
        cdef const int32_t* firsts = self.firsts[group]
        cdef int32_t* table = self.short_tables[group]
        cdef Pool* pool = self.pool_of(group)
        cdef int32_t* pages
        cdef Row* rows = self.rows
        cdef Row* row
        for i in range(n):
            if i + AHEAD < n:
                prefetch(table + handle_slot(handles[i + AHEAD]) * width)
            r = handle_slot(handles[i])
            row = &rows[r]
            pages, first = table + r * width, firsts[r]
            q = row.num_tokens - row.computed if q_lens == NULL else q_lens[i]
            column = blocks_in(row.computed, bs, shift)
            if row.forked and q > 0:
                for j in range(max(row.num_owned, column), row.paged):
                    if pool.refs[pages[j - first]] & COUNT > 1:
                        pool_alloc(pool, 1, &block)
                        copies[0], copies[1] = pages[j - first], block
                        copies += 2
                        self.note_copy(r, group, j - first, pages[j - first], block)
                        pages[j - first] = block
            blocks = max(row.num_blocks, blocks_in(row.computed + q + lookahead + bs - 1, bs, shift))
            for j in range(row.paged, blocks):
                pool_alloc(pool, 1, &pages[j - first])
            wide = min((blocks - first + TAIL - 1) & -TAIL, w)
            memcpy(tables, pages, wide * sizeof(int32_t))
            if wide < w:
                memset(tables + wide, 0xFF, (w - wide) * sizeof(int32_t))
            tables += w
            seq_lens[i] = row.computed + q - first * bs
            offset = row.computed - column * bs
            column -= first
            if q == 1:                                          # a decode step
                slots[at] = <int64_t>pages[column] * bs + offset
                at += 1
            else:
                for j in range(q):
                    slots[at + j] = <int64_t>pages[column] * bs + offset
                    offset += 1
                    if offset == bs:
                        offset = 0
                        column += 1
                at += q
            if is_last:
                row.paged, row.spare = blocks, spare

    # The tree has row r's blocks from block `before` on: it takes their pages, boundaries become points, and the row lets go of
    # pages that neither it nor its newest boundary reads.
    cdef void commit_groups(self, int32_t r, int32_t before) noexcept nogil:
        cdef Place* p = &self.placement.place
        cdef Row* row = &self.rows[r]
        cdef int32_t group, first, kept, k, ends, every = p.groups.point_every
        for group in range(1, self.num_groups):
            pages_join(p, row.owner, group, before, self.pages_of(r, group) + before - self.first_of(r, group))
        ends = (row.prompt - 1) // self.block_size if row.prompt else 0
        if before < row.agreed <= row.num_owned:
            point_make(p, row.owner, row.agreed)
        if before < ends <= row.num_owned and ends != row.agreed:
            point_make(p, row.owner, ends)
        if every:
            k = (before // every + 1) * every
            while k <= row.num_owned:
                point_make(p, row.owner, k)
                k += every
        kept = max(0, row.num_owned - row.spare)
        for group in range(1, self.num_groups):
            first, k = self.first_of(r, group), kept - need(p.groups, group, kept)
            if k > first:
                tail_shorten(p, row.owner, group, k)
                self.firsts[group][r] = k
                memmove(self.pages_of(r, group), self.pages_of(r, group) + k - first, (row.paged - k) * sizeof(int32_t))
                memset(self.pages_of(r, group) + row.paged - k, 0xFF, (k - first) * sizeof(int32_t))

    # The tree takes the last block of a row that is about to end, if only its first tokens are computed. In a step it may be
    # a copy that is not made yet.
    cdef void keep_remainder(self, int32_t r) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t i, fill = <int32_t>(row.computed - <int64_t>row.num_owned * self.block_size)
        cdef int32_t block[MAX_BLOCK_SIZE]
        if (row.owner == NIL or self.num_groups > 1 or row.step or not 0 < fill < self.block_size
                or row.num_blocks <= row.num_owned):
            return
        memcpy(block, row.tokens + <int64_t>row.num_owned * self.block_size, fill * sizeof(int32_t))
        for i in range(fill, self.block_size):
            block[i] = NO_TOKEN
        if place_keep_remainder(&self.placement.place, row.owner, block, fill,
                                self.table[<int64_t>r * self.width + row.num_owned]):
            row.num_owned += 1

    cdef void end_row(self, int32_t r) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t i
        cdef int32_t* table = self.table + <int64_t>r * self.width
        if self.num_copied:
            self.uncopy(r)
        if self.num_following:
            self.part(r)
        for i in range(row.num_blocks - 1, row.num_owned - 1, -1):
            pool_drop_one(self.pool, table[i])
        if self.num_groups > 1:
            self.drop_pages(r, 0)
            if not self.placement.place.fates[row.root].failed:
                point_make(&self.placement.place, row.owner, row.num_owned)
            for i in range(1, self.num_groups):
                memset(self.pages_of(r, i), 0xFF, self.short_width[i] * sizeof(int32_t))
        self.leave_kin(r)
        if row.owner != NIL:
            place_release(&self.placement.place, row.owner)
        memset(table, 0xFF, row.num_blocks * sizeof(int32_t))
        free(row.tokens)
        row.tokens = NULL
        row.tokens_capacity = 0
        row.live = 0
        write_hint(&self.num_changes, self.num_changes + 1)
        self.num_live -= 1
        if next_generation(&row.generation):
            self.free_rows[self.num_free_rows] = r
            self.num_free_rows += 1
        else:
            self.num_retired += 1

    # A row ends: the request that it stands for goes on in another of its rows, or is over.
    cdef void leave_kin(self, int32_t r) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t kin = row.next_kin, visit
        cdef Row* other = &self.rows[kin]
        self.rows[row.last_kin].next_kin = kin
        other.last_kin = row.last_kin
        if row.owner == NIL:
            return
        visit = self.placement.place.owners[row.owner].visit
        if visit == NIL:
            return
        if kin != r and self.placement.place.owners[other.owner].visit == NIL:
            self.placement.place.owners[other.owner].visit = visit
            self.placement.place.owners[row.owner].visit = NIL
            other.used |= row.used
        else:
            place_depart(&self.placement.place, row.owner, row.used, generated(row), False)

    # ---- shared by the calls below and those of C (c_api), under the lock: nothing is changed after a Code

    # One token more for each row: all or nothing, with the first entry at fault in *bad.
    cdef int append_to(self, const int64_t* handles, const int32_t* tokens, int32_t n, int32_t* bad) noexcept nogil:
        cdef int32_t i, r
        cdef int code = OK
        self.batch += 1
        for i in range(n):
            r = self.row_of(handles[i])
            if r < 0:
                code = E_STALE
                break
            if self.rows[r].marked == self.batch:
                code = E_DUPLICATE
                break
            self.rows[r].marked = self.batch
            if not self.grow_tokens(&self.rows[r], <int64_t>self.rows[r].num_tokens + 1):
                code = E_MEMORY
                break
        if code != OK:
            bad[0] = i
            return code
        for i in range(n):
            r = handle_slot(handles[i])
            self.rows[r].tokens[self.rows[r].num_tokens] = tokens[i]
            self.rows[r].num_tokens += 1
        return OK

    cdef int extend_by(self, int64_t handle, const int32_t* tokens, int64_t n) noexcept nogil:
        cdef int32_t r = self.row_of(handle)
        if r < 0:
            return E_STALE
        if not self.grow_tokens(&self.rows[r], self.rows[r].num_tokens + n):
            return E_MEMORY
        memcpy(self.rows[r].tokens + self.rows[r].num_tokens, tokens, n * sizeof(int32_t))
        self.rows[r].num_tokens += <int32_t>n
        return OK

    # As `commit`, all or nothing but for E_MEMORY; `number` 0: of any step. E_STATE: the step is over for row *bad.
    cdef int commit_rows(self, const int64_t* handles, int32_t n, int64_t number, int64_t* committed,
                         int32_t* bad) noexcept nogil:
        cdef int32_t i = 0, r
        cdef int code = OK
        for i in range(n):
            r = self.row_of(handles[i])
            if r < 0:
                code = E_STALE
                break
            if number and self.rows[r].step != number:
                code = E_STATE
                break
        if code == OK and self.num_following:
            self.batch += 1
            for i in range(n):
                r = handle_slot(handles[i])
                if self.rows[r].marked == self.batch:
                    code = E_DUPLICATE
                    break
                self.rows[r].marked = self.batch
            for i in range(n if code == OK else 0):
                r = handle_slot(handles[i])
                if self.ties[r].leader != NIL and self.rows[self.ties[r].leader].marked != self.batch:
                    code = E_FOLLOW
                    break
        if code != OK:
            bad[0] = i
            return code
        write_hint(&self.num_changes, self.num_changes + 1)
        if self.num_following:
            return self.commit_together(handles, n, committed)
        for i in range(n):
            committed[0] += self.commit_scheduled(handle_slot(handles[i]))
        return OK

    cdef void cancel_rows(self, const int64_t* handles, int32_t n, int64_t number) noexcept nogil:
        cdef int32_t i, r
        write_hint(&self.num_changes, self.num_changes + 1)
        for i in range(n):
            r = self.row_of(handles[i])
            if r >= 0 and (number == 0 or self.rows[r].step == number):
                if self.num_copied and self.rows[r].scheduled:
                    self.uncopy(r)
                if self.num_following:
                    self.part(r)
                self.rows[r].scheduled = 0
                self.rows[r].step = 0

    # Copies of a group were made: of each of n sources, or pairs of source and target; all of them where `columns` is 0.
    cdef void end_copies(self, const int32_t* data, int64_t n, int32_t columns, int32_t group) noexcept nogil:
        cdef int64_t i, j
        for i in range(n):
            j = 0
            while j < self.num_copied:
                if columns and (self.copied[j].group != group or self.copied[j].source != data[i * columns]
                                or (columns == 2 and self.copied[j].target != data[2 * i + 1])):
                    j += 1
                    continue
                pool_drop_one(self.pool_of(self.copied[j].group), self.copied[j].source)
                self.forget_copy(j)
                if columns:
                    break

    # As `truncate`. E_RANGE: the row has fewer tokens.
    cdef int cut(self, int64_t handle, int32_t keep) noexcept nogil:
        cdef int32_t r = self.row_of(handle), blocks, i, whole, keep_computed
        cdef int code = OK
        cdef Row* entry
        cdef int32_t* table
        if r < 0:
            return E_STALE
        if keep > self.rows[r].num_tokens:
            return E_RANGE
        entry = &self.rows[r]
        table = self.table + <int64_t>r * self.width
        if self.num_copied and entry.scheduled:
            self.uncopy(r)
        if self.num_following:
            self.part(r)
        entry.scheduled = 0                         # the row's step is over from here on, also where memory is short below
        entry.step = 0
        write_hint(&self.num_changes, self.num_changes + 1)
        whole = keep // self.block_size             # a committed block that is cut is given up: the rest of it is the tree's
        blocks = (keep + self.block_size - 1) // self.block_size
        if self.num_groups > 1 and not self.grow_tails():
            return E_MEMORY
        if entry.num_owned > whole:
            whole = place_uncut(&self.placement.place, entry.owner, whole)      # the rest of a run in flight goes too
            code = place_shorten(&self.placement.place, entry.owner, whole)
            if code != OK:
                return code
            blocks = whole
            if self.num_groups > 1:
                self.drop_pages(r, 0)
                self.load_tail(r)                   # for which there is room
            for i in range(whole, entry.num_owned):
                table[i] = NIL                      # the owner let go of these; only the row's own are dropped below
        elif self.num_groups > 1:
            self.drop_pages(r, blocks)
        for i in range(entry.num_blocks - 1, blocks - 1, -1):
            if table[i] != NIL:
                pool_drop_one(self.pool, table[i])
            self.put(r, i, NIL)
        if entry.num_blocks > blocks:
            entry.num_blocks = blocks
        if entry.num_owned > whole:
            entry.num_owned = whole
            keep_computed = whole * self.block_size
        else:
            keep_computed = keep
        entry.num_tokens = keep
        entry.forked = 1
        if entry.computed > keep_computed:
            entry.computed = keep_computed
        return OK

    # `count` more rows with the tokens and blocks of another, in forks [count]. E_BLOCKS: too few rows are free.
    cdef int fork_to(self, int64_t handle, int32_t count, int64_t* forks) noexcept nogil:
        cdef int32_t i, j, r, new, group, code = OK, made = 0, shared = 0
        cdef Row* old
        cdef Row* row_new
        r = self.row_of(handle)
        if r < 0:
            code = E_STALE
        elif self.rows[r].scheduled:
            code = E_STATE
        elif self.num_free_rows < count:
            code = E_BLOCKS
        if code == OK:
            self.commit_row(r)
            old = &self.rows[r]
            for j in range(old.num_owned, old.num_blocks):
                if (self.pool.refs[self.table[<int64_t>r * self.width + j]] & COUNT) > COUNT - <uint32_t>count - 1:
                    code = E_OVERFLOW
        if code == OK:
            shared = min(old.num_blocks, blocks_in(old.computed + self.block_size - 1, self.block_size, self.shift))
            for i in range(count):
                new = self.free_rows[self.num_free_rows - 1]
                row_new = &self.rows[new]
                if not self.grow_tokens(row_new, old.num_tokens + 16):
                    code = E_MEMORY
                    break
                row_new.owner = NIL
                if old.owner != NIL:
                    row_new.owner = place_share(&self.placement.place, old.owner)
                    if row_new.owner < 0:
                        code = E_MEMORY
                        break
                self.num_free_rows -= 1
                self.num_live += 1
                memcpy(row_new.tokens, old.tokens, old.num_tokens * sizeof(int32_t))
                row_new.num_tokens, row_new.computed, row_new.scheduled = old.num_tokens, old.computed, 0
                row_new.num_blocks, row_new.num_owned, row_new.root = shared, old.num_owned, old.root
                row_new.live = row_new.forked = old.forked = 1
                row_new.prompt, row_new.used = old.prompt, old.used
                row_new.next_kin, row_new.last_kin = old.next_kin, r
                self.rows[old.next_kin].last_kin = new
                old.next_kin = new
                memset(self.table + <int64_t>new * self.width, 0xFF, self.width * sizeof(int32_t))
                for j in range(shared):
                    self.put(new, j, self.table[<int64_t>r * self.width + j])
                    if j >= old.num_owned:
                        self.pool.refs[self.table[<int64_t>r * self.width + j]] += 1
                row_new.paged, row_new.agreed, row_new.spare = min(old.paged, shared), old.agreed, old.spare
                for group in range(1, self.num_groups):
                    self.firsts[group][new] = self.firsts[group][r]
                    memset(self.pages_of(new, group), 0xFF, self.short_width[group] * sizeof(int32_t))
                    memcpy(self.pages_of(new, group), self.pages_of(r, group),
                           (row_new.paged - self.first_of(r, group)) * sizeof(int32_t))
                    for j in range(old.num_owned, row_new.paged):
                        self.pool_of(group).refs[self.pages_of(r, group)[j - self.first_of(r, group)]] += 1
                forks[i] = make_handle(new, row_new.generation)
                made += 1
            if code != OK:
                for j in range(made):
                    self.end_row(handle_slot(forks[j]))
        return code

    # ---- public

    def open(self, tokens, namespace=0, *, owner=None, leave=1):
        """A new sequence.

        Parameters
        ----------
        tokens : int32 [n]
            The prompt. May be empty.
        namespace : int
            Root from ``tree.namespace(key)``; with a Placement only.
        owner : int, optional
            An owner of a settled prefix of `tokens` (all on the device): the row takes it over, and lets go of the
            blocks at its end that hold the last `leave` tokens. Default: match the longest prefix on the device.
        leave : int
            Tokens left to compute at least, so that there is a query to attend with. Default 1. They count in whole
            blocks: of 32 cached tokens in blocks of 16, 16 are used.

        Returns
        -------
        row : int
            The row's handle.
        num_cached : int
            Leading tokens whose KV is in the cache already.

        Raises
        ------
        InvalidArgument
            No row is free, or what `owner` holds is no settled prefix of `tokens` in this namespace.
        StaleHandle
            `owner` is not live.
        """
        cdef int64_t given = -1, computed = 0, row
        if owner is not None:
            if self.placement is None:
                raise InvalidArgument("an owner needs a BlockTable over a Placement")
            given = self.placement._handle(owner)
        row = self.open_into(tokens, namespace, given, leave, &computed)
        return row, computed

    # As `open`, with the handle of an owner or -1: the row.
    cdef int64_t open_into(self, tokens, namespace, int64_t given, leave, int64_t* computed) except? -1:
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef int64_t n = cnp.PyArray_SIZE(array), limit
        cdef int32_t keep = count_input(leave, "leave", 0, 1 << 30)
        cdef const int32_t* data = i32(array)
        cdef int32_t root = 0, r = NIL, code = OK
        cdef int64_t handle = -1, named = 0
        if self.placement is not None:
            named = handle_input(namespace, "namespace")
        if n > 1 << 30:
            raise InvalidArgument(f"{n} tokens do not fit in a row")
        limit = (n - keep) // self.block_size if n > keep else 0
        self.lock.acquire()
        with nogil:
            if self.placement is not None:
                root = tree_named(self.placement.place.tree, named)
            if root != NIL:
                code = self._open(data, n, root, given, limit, &r)
            else:
                code = E_RANGE
        if code == OK:
            handle = make_handle(r, self.rows[r].generation)
            computed[0] = self.rows[r].computed
        self.lock.release()
        if code == E_RANGE:
            raise self.placement.tree.unnamed(named)
        if code == E_BLOCKS:
            raise InvalidArgument(f"all {self.max_rows} rows are in use: release sequences, or allow more with "
                                  "max_sequences")
        if code == E_STALE:
            raise StaleHandle(f"owner {given:#x} was released, or never existed")
        if code == E_STATE:
            raise InvalidArgument("what is owned is no prefix of these tokens in this namespace, or not settled on the device")
        if code != OK:
            raise MemoryError(f"no memory for a sequence of {n} tokens")
        return handle

    # Whether an owner holds the pages of short groups that its path's end needs: after Boundaries.retrace it holds none.
    cdef bint owns_tail(self, int32_t slot) noexcept nogil:
        cdef int32_t group, k = self.placement.place.owners[slot].num_blocks
        for group in range(1, self.num_groups):
            if self.placement.place.owners[slot].first[group] > k - need(self.placement.place.groups, group, k):
                return False
        return True

    # Whether an owner's path is a prefix of these tokens under this root.
    cdef bint owns_prefix(self, int32_t slot, int32_t root, const int32_t* data, int64_t n) noexcept nogil:
        cdef Tree* t = self.placement.place.tree
        cdef int32_t node = self.placement.place.owners[slot].node
        if t.nodes[node].root != root or <int64_t>self.placement.place.owners[slot].num_blocks * self.block_size > n:
            return False
        while t.nodes[node].length > 0:
            if memcmp(t.nodes[node].tokens, data + <int64_t>t.nodes[node].depth * self.block_size,
                      <size_t>t.nodes[node].length * self.block_size * sizeof(int32_t)) != 0:
                return False
            node = t.nodes[node].parent
        return True

    cdef int _open(self, const int32_t* data, int64_t n, int32_t root, int64_t given, int64_t limit,
                   int32_t* out) noexcept nogil:
        cdef int32_t slot = NIL, r, i, node
        cdef Row* row
        if self.num_free_rows == 0:
            return E_BLOCKS
        if not self.grow_width(<int32_t>((n + self.block_size - 1) // self.block_size)):
            return E_MEMORY
        r = self.free_rows[self.num_free_rows - 1]
        row = &self.rows[r]
        if not self.grow_tokens(row, n + 16):
            return E_MEMORY
        if given >= 0:
            slot = place_owner(&self.placement.place, given)
            if slot < 0:
                return E_STALE
        elif self.placement is not None:
            slot = place_acquire(&self.placement.place, root, data, n, limit)
            if slot < 0:
                return E_MEMORY
            place_arrive(&self.placement.place, slot, data, limit * self.block_size, 0)
        if given >= 0 and not (self.owns_prefix(slot, root, data, n) and self.owns_tail(slot)):
            return E_STATE
        if slot != NIL:
            node = self.placement.place.owners[slot].node
            i = self.placement.place.owners[slot].num_blocks
            while self.placement.place.tree.nodes[node].length > 0:
                if node_top(self.placement.place.tree, node) != 0:
                    i = self.placement.place.tree.nodes[node].depth     # from here on it is not on the device
                node = self.placement.place.tree.nodes[node].parent
            if self.num_groups > 1 and self.placement.place.num_tiers > 1:
                i = usable_of_path(&self.placement.place, self.placement.place.owners[slot].node, i, 0)
            if given >= 0 and (i < self.placement.place.owners[slot].num_blocks or <int64_t>i * self.block_size > n):
                return E_STATE
            if given >= 0 and i > limit:            # an owner may hold all tokens, and then there is nothing left to compute
                i = place_uncut(&self.placement.place, slot, <int32_t>limit)
                if place_shorten(&self.placement.place, slot, i) != OK:
                    return E_MEMORY
            elif i < self.placement.place.owners[slot].num_blocks:
                place_shorten(&self.placement.place, slot, i)
        if given >= 0:                              # the owner is the row's now: the caller's handle names nothing any more
            self.placement.place.owners[slot].live = TAKEN_OVER
        self.num_free_rows -= 1
        self.num_live += 1
        memcpy(row.tokens, data, n * sizeof(int32_t))
        row.num_tokens = <int32_t>n
        row.prompt = <int32_t>n
        row.next_kin = row.last_kin = r
        row.scheduled = 0
        row.step = 0
        row.forked = 0
        row.used = 0
        row.owner = slot
        row.root = root
        row.live = 1
        row.paged = row.agreed = row.spare = 0
        row.num_owned = self.placement.place.owners[slot].num_blocks if slot != NIL else 0
        row.num_blocks = row.num_owned
        row.computed = row.num_owned * self.block_size
        memset(self.table + <int64_t>r * self.width, 0xFF, self.width * sizeof(int32_t))
        if row.num_owned:
            place_blocks(&self.placement.place, slot, self.table + <int64_t>r * self.width)
        if self.num_groups > 1:
            row.agreed = self.placement.place.owners[slot].agreed
            if not self.load_tail(r):
                self.end_row(r)
                return E_MEMORY
        out[0] = r
        return OK

    def append(self, rows, tokens):
        """Append one token to each row: `rows` int64 [n] handles, `tokens` int32 [n].

        All or nothing.

        Raises
        ------
        StaleHandle, InvalidArgument
            A row is gone, or stands twice. Nothing was appended.
        """
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef cnp.ndarray values = int32_input(tokens, "tokens")
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), bad = 0
        cdef int code
        if cnp.PyArray_SIZE(values) != n:
            raise InvalidArgument(f"{n} rows but {len(values)} tokens")
        cdef const int64_t* h = i64(handles)
        cdef const int32_t* v = i32(values)
        self.lock.acquire()
        with nogil:
            code = self.append_to(h, v, n, &bad)
        self.lock.release()
        if code != OK:
            self.raise_(code, handles, bad)

    def extend(self, row, tokens):
        """Append several tokens (int32 [n]) to one row: a further turn, or a draft to be verified."""
        cdef cnp.ndarray values = tokens_input(tokens)
        cdef int64_t n = cnp.PyArray_SIZE(values)
        cdef int64_t handle = handle_input(row, "row")
        self.lock.acquire()
        cdef int code = self.extend_by(handle, i32(values), n)
        self.lock.release()
        if code != OK:
            self.raise_(code, [handle], 0)

    def seed(self, row, common):
        """Give a row that ends at a block boundary one block more.

        The caller is about to copy `common` tokens into it.

        For partial hits: the caller copies the bytes of a block whose first `common` tokens are this row's next ones.

        Returns
        -------
        int
            The new block, or -1 if no block is free or the row does not end at a block boundary; nothing changed then.
        """
        cdef int64_t handle = handle_input(row, "row")
        cdef int32_t tokens = count_input(common, "common", 1, self.block_size), r, block = NIL
        self.lock.acquire()
        r = self.row_of(handle)
        if r >= 0 and (self.rows[r].num_blocks * self.block_size == self.rows[r].computed and self.rows[r].scheduled == 0
                       and self.rows[r].computed + tokens <= self.rows[r].num_tokens and self.num_groups == 1
                       and pool_available(self.pool) > 0 and self.grow_width(self.rows[r].num_blocks + 1)):
            pool_alloc(self.pool, 1, &block)
            self.put(r, self.rows[r].num_blocks, block)
            self.rows[r].num_blocks += 1
            self.rows[r].computed += tokens
        self.lock.release()
        if r < 0:
            self.raise_(E_STALE, [handle], 0)
        return block

    def catch_up(self, rows):
        """Rows go on from blocks that others have committed since: int64 [n] handles.

        The tree's blocks on the device take the place of tokens that are not computed yet, all but the last one. A row
        that is in a step, or holds whole blocks that the tree has refused, stays as it is.

        Returns
        -------
        int
            Blocks that need not be computed any more.

        Raises
        ------
        StaleHandle
            A row was released. Nothing was changed.
        """
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), i, j, r, most, got, code = OK
        cdef const int64_t* h = i64(handles)
        cdef int32_t ids[256]
        cdef int64_t gained = 0
        cdef Row* row
        if self.placement is None:
            return 0
        self.lock.acquire()
        with nogil:
            for i in range(n):
                if self.row_of(h[i]) < 0:
                    code = E_STALE
                    break
            if code == OK:
                for i in range(n):
                    r = handle_slot(h[i])
                    row = &self.rows[r]
                    most = blocks_in(row.num_tokens - 1, self.block_size, self.shift) if row.num_tokens > 0 else 0
                    if row.step or blocks_in(row.computed, self.block_size, self.shift) > row.num_owned:
                        continue
                    while row.num_owned < most and self.grow_width(most):
                        got = place_follow(&self.placement.place, row.owner,
                                           row.tokens + <int64_t>row.num_owned * self.block_size,
                                           min(most - row.num_owned, 256), ids)
                        if got == 0:
                            break
                        for j in range(row.num_blocks - 1, row.num_owned - 1, -1):
                            pool_drop_one(self.pool, self.table[<int64_t>r * self.width + j])
                            self.put(r, j, NIL)
                        memcpy(self.table + <int64_t>r * self.width + row.num_owned, ids, got * sizeof(int32_t))
                        row.num_owned += got
                        row.num_blocks = row.num_owned
                        row.computed = row.num_owned * self.block_size
                        gained += got
        self.lock.release()
        if code != OK:
            self.raise_(code, handles, i)
        return gained

    def shareable(self, row, others):
        """Whole blocks at its front that a row may share with other rows of its next step.

        Parameters
        ----------
        row : int
        others : int64 [n], handles

        Returns
        -------
        int32 [n]
            For `follow` of :meth:`step`, as far as the other row gets in that step. 0 where no block beyond what the row has
            computed may be shared: other tokens, another namespace, or less computed than the other row has committed.

        Raises
        ------
        StaleHandle
            A row was released.
        """
        cdef int64_t handle = handle_input(row, "row")
        cdef cnp.ndarray handles = int64_input(others, "others")
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), i, r, other, most, bad = -1
        cdef cnp.ndarray out = new_int32(n)
        cdef const int64_t* h = i64(handles)
        cdef int32_t* common = i32(out)
        self.lock.acquire()
        with nogil:
            r = self.row_of(handle)
            if r >= 0:
                most = blocks_in(self.rows[r].num_tokens - 1, self.block_size, self.shift) if self.rows[r].num_tokens > 0 else 0
                for i in range(n):
                    other = self.row_of(h[i])
                    if other < 0:
                        bad = i
                        break
                    common[i] = self.agree(r, other, most) if self.num_groups == 1 else 0
        self.lock.release()
        if r < 0:
            self.raise_(E_STALE, [handle], 0)
        if bad >= 0:
            self.raise_(E_STALE, handles, bad)
        return out

    def blocks_needed(self, rows, q_lens=None, lookahead=0, follow=None):
        """Blocks that :meth:`step` with the same arguments would allocate.

        Over groups of layers those of the group that sees everything alone; :meth:`pages_needed` counts all.
        """
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef cnp.ndarray lens = None if q_lens is None else int32_input(q_lens, "q_lens")
        cdef int64_t totals[5]
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), ahead = count_input(lookahead, "lookahead", 0, 1 << 20)
        if lens is not None and cnp.PyArray_SIZE(lens) != n:
            raise InvalidArgument(f"{n} rows but {len(lens)} q_lens")
        cdef cnp.ndarray links = links_input(follow, n)
        self.lock.acquire()
        cdef int code = self.plan(i64(handles), n, NULL if lens is None else i32(lens), ahead, NULL,
                                  NULL if links is None else i32(links), totals)
        self.lock.release()
        if code != OK:
            self.raise_(code, handles, totals[4])
        return totals[0]

    def pages_needed(self, rows, q_lens=None, lookahead=0):
        """Blocks of each group of layers that :meth:`step` would allocate for these.

        Returns
        -------
        ndarray of int64 [num_groups]
        """
        return self._pages(rows, q_lens, -1, lookahead)

    def pages_to_finish(self, rows, most, lookahead=0):
        """The most blocks of each group that rows still need to compute all their tokens.

        Parameters
        ----------
        rows : int64 [n]
        most : int
            Tokens of a row that a step computes at most.
        lookahead : int

        Returns
        -------
        ndarray of int64 [num_groups]
        """
        return self._pages(rows, None, count_input(most, "most", 1, 2**31 - 1), lookahead)

    cdef object _as_array(self, const int64_t* more):
        cdef cnp.ndarray out = np.empty(self.num_groups, np.int64)
        memcpy(i64(out), more, self.num_groups * sizeof(int64_t))
        return out

    cdef object _pages(self, rows, q_lens, int64_t most, lookahead):
        cdef Pages pages
        cdef int64_t totals[5]
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef cnp.ndarray lens = None if q_lens is None else int32_input(q_lens, "q_lens")
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), ahead = count_input(lookahead, "lookahead", 0, 1 << 20)
        if lens is not None and cnp.PyArray_SIZE(lens) != n:
            raise InvalidArgument(f"{n} rows but {len(lens)} q_lens")
        cdef cnp.ndarray out = np.zeros(self.num_groups, np.int64)
        self.lock.acquire()
        cdef int code = self.plan(i64(handles), n, NULL if lens is None else i32(lens), ahead, &pages, NULL, totals)
        if code == OK:
            if most >= 0:
                self.plan_to_finish(i64(handles), n, <int32_t>most, ahead, &pages)
            pages.more[0] = totals[0]
            memcpy(i64(out), pages.more, self.num_groups * sizeof(int64_t))
        self.lock.release()
        if code != OK:
            self.raise_(code, handles, totals[4])
        return out

    def step(self, rows, q_lens=None, lookahead=0, follow=None):
        """Allocate blocks for the next tokens of these rows and build the step's arrays.

        All or nothing.

        Parameters
        ----------
        rows : int64 [n]
            Handles, each once.
        q_lens : int32 [n], optional
            Tokens to compute of each row now (chunked prefill); default all that are not computed.
        lookahead : int
            Token slots to allocate beyond them, for speculative tokens.
        follow : int32 [m, 3], optional
            (follower, leader, num_blocks): entries of `rows`, and the whole blocks at the follower's front. Those that it has
            not computed are the leader's, which must be written in this step or before it; the follower's tokens to compute
            come after them, one at least. Both have the same tokens there and the same namespace. A leader that follows
            another row itself stands in `follow` before those that follow it.

        Returns
        -------
        StepArrays

        Raises
        ------
        InvalidArgument
            A row cannot follow its leader so far (:meth:`shareable`). Nothing was changed.
        OutOfBlocks
            Too few blocks are free, and over one tier none could be evicted; over several, make room with
            ``placement.reserve`` first. Nothing was changed.
        """
        return self._checked(rows, q_lens, lookahead, follow, False)

    def try_step(self, rows, q_lens=None, lookahead=0, follow=None):
        """As :meth:`step`, but where too few blocks are free.

        The number of blocks that it needs, and nothing was changed. Over groups of layers those of each, int64 [num_groups], for
        ``placement.reserve_pages``; but over the device alone OutOfBlocks, as all that could be evicted was.

        Returns
        -------
        StepArrays, int or ndarray
        """
        return self._checked(rows, q_lens, lookahead, follow, True)

    cdef object _checked(self, rows, q_lens, lookahead, follow, bint short):
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef cnp.ndarray lens = None if q_lens is None else int32_input(q_lens, "q_lens")
        if lens is not None and cnp.PyArray_SIZE(lens) != cnp.PyArray_SIZE(handles):
            raise InvalidArgument(f"{len(handles)} rows but {len(lens)} q_lens")
        cdef cnp.ndarray links = None if follow is None else links_input(follow, cnp.PyArray_SIZE(handles))
        if links is not None and self.num_groups > 1:
            if len(follow):
                raise InvalidArgument("over groups of layers no row follows another one: leave follow out")
            links = None
        return self._build(handles, lens, count_input(lookahead, "lookahead", 0, 1 << 20), links, short)

    # Schedules, allocates and fills. Sizes are guessed from the last step, so that one section under the lock is enough; a wrong
    # guess costs another round. All objects are made before that section: once the rows are scheduled nothing can fail any more.
    # Where there are too few blocks: with `short`, how many it needs; else OutOfBlocks.
    cdef object _build(self, cnp.ndarray handles, cnp.ndarray lens, int32_t ahead, cnp.ndarray links, bint short):
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), code
        cdef int64_t totals[5]
        cdef const int64_t* h = i64(handles)
        cdef const int32_t* q = NULL if lens is None else i32(lens)
        cdef const int32_t* follow = NULL if links is None else i32(links)
        cdef int32_t* data
        cdef int32_t* seq_data
        cdef int32_t* starts
        cdef int64_t* slot_data
        cdef int32_t* copy_data
        cdef cnp.ndarray arrays, slots, copies, tables
        cdef int64_t w = read_hint(&self.likely_width) + 1, t = n, c = 0, room, seq
        cdef cnp.npy_intp slot_size
        cdef int64_t copy_size
        cdef Pages pages
        cdef int64_t rooms[MAX_GROUPS]
        cdef int64_t copy_rooms[MAX_GROUPS]
        cdef int32_t group
        cdef int64_t begins[MAX_GROUPS]
        cdef int32_t* short_copies[MAX_GROUPS]
        cdef int64_t size
        cdef cnp.npy_intp all_slots
        cdef GroupArrays short_out
        cdef StepArrays out
        for group in range(1, self.num_groups):
            pages.wide[group], pages.copied[group] = read_hint(&self.likely_short[group]) + 1, 0
        while True:
            room, slot_size, copy_size, seq = w, t, c, n * w
            size = seq + 2 * n + 1 + 2 * t
            for group in range(1, self.num_groups):             # behind those of group 0, in the same buffers
                rooms[group], copy_rooms[group], begins[group] = pages.wide[group], pages.copied[group], size
                size += n * pages.wide[group] + n
            all_slots = t * self.num_groups
            out = StepArrays.__new__(StepArrays)
            arrays, slots = new_int32(size), cnp.PyArray_EMPTY(1, &all_slots, cnp.NPY_INT64, 0)
            copies = np.empty((copy_size, 2), np.int32) if copy_size else no_copies
            tables = part_of(arrays, 0, n, room)
            out.block_tables, out.copies = tables, copies
            out.slot_mapping = slots if self.num_groups == 1 else slots_of(slots, 0, t)
            out.seq_lens = part_of(arrays, seq, n, -1)
            out.q_indptr = part_of(arrays, seq + n, n + 1, -1)
            out.positions = part_of(arrays, seq + 2 * n + 1, t, -1)
            out.tokens = part_of(arrays, seq + 2 * n + 1 + t, t, -1)
            cnp.PyArray_CLEARFLAGS(slots, cnp.NPY_ARRAY_WRITEABLE)
            cnp.PyArray_ENABLEFLAGS(out.tokens, cnp.NPY_ARRAY_WRITEABLE)
            out.block_size, out.table, out.groups = self.block_size, self, ()
            data, slot_data, copy_data = i32(arrays), i64(slots), i32(copies)
            if self.num_groups > 1:
                shorts = []
                for group in range(1, self.num_groups):
                    short_out = GroupArrays.__new__(GroupArrays)
                    short_out.block_tables = part_of(arrays, begins[group], n, rooms[group])
                    short_out.seq_lens = part_of(arrays, begins[group] + n * rooms[group], n, -1)
                    short_out.slot_mapping, short_out.q_indptr = slots_of(slots, group * t, t), out.q_indptr
                    short_out.copies = np.empty((copy_rooms[group], 2), np.int32) if copy_rooms[group] else no_copies
                    short_copies[group] = i32(short_out.copies)
                    shorts.append(short_out)
                out.groups = tuple(shorts)
            self.lock.acquire()
            with nogil:
                code = self.plan(h, n, q, ahead, &pages if self.num_groups > 1 else NULL, follow, totals)
                w, t, c = totals[2], totals[1], totals[3]
                if code == OK and (w > room or t != slot_size or c != copy_size):
                    code = E_STATE                              # now the sizes are known
                if (code == OK or code == E_STATE) and self.num_groups > 1:
                    pages.more[0] = totals[0]
                    for group in range(1, self.num_groups):
                        c += pages.copied[group]
                        if pages.wide[group] > rooms[group] or pages.copied[group] != copy_rooms[group]:
                            code = E_STATE
                if code == OK and self.num_groups > 1 and not make_room_for(&self.placement.place, DEVICE, pages.more):
                    code = E_BLOCKS
                elif code == OK:
                    code = self.room_for(totals[0], w, c)
                    if code == OK and not self.grow_shorts(pages.wide):
                        code = E_MEMORY
                    if code == OK:
                        write_hint(&self.likely_width, max(w, self.likely_width - (self.likely_width >> 4)))
                        self.num_steps += 1
                        write_hint(&self.num_changes, self.num_changes + 1)
                        out.number, out.num_changes = self.num_steps, self.num_changes
                        out.num_new_blocks = totals[0]
                        seq_data, starts = data + seq, data + seq + n
                        starts[0] = 0
                        for group in range(1, self.num_groups):
                            self.likely_short[group] = max(pages.wide[group],
                                                           self.likely_short[group] - (self.likely_short[group] >> 4))
                            self.fill_group(group, h, n, q, ahead, pages.wide[group], data + begins[group],
                                            data + begins[group] + n * rooms[group], slot_data + group * slot_size,
                                            short_copies[group])
                        if follow == NULL:
                            self.fill(h, n, q, ahead, data, seq_data, starts, starts + n + 1, starts + n + 1 + t, slot_data, w,
                                      copy_data)
                        else:
                            self.fill_linked(
                                h, n, q, ahead, follow, data, seq_data, starts, starts + n + 1, slot_data, totals, copy_data)
            self.lock.release()
            c = totals[3]
            if code == OK:
                break
            if code == E_BLOCKS:
                if short and self.num_groups == 1:
                    return totals[0]
                if short and self.placement.place.num_tiers > 1:
                    return self._as_array(pages.more)
                if self.placement is not None:
                    raise self.placement.out_of_blocks(
                        self.as_blocks(totals[0], pages.more) if self.num_groups > 1 else totals[0])
                raise self.block_pool._out_of_blocks(totals[0])
            if code != E_STATE:
                self.raise_(code, handles, totals[4])
        for group in range(1, self.num_groups):
            short_out = <GroupArrays>out.groups[group - 1]
            cnp.PyArray_DIMS(short_out.block_tables)[1] = pages.wide[group]
            cnp.PyArray_STRIDES(short_out.block_tables)[0] = pages.wide[group] * sizeof(int32_t)
        cnp.PyArray_DIMS(tables)[1] = w                     # as wide as its widest row: no other code has seen it yet
        cnp.PyArray_STRIDES(tables)[0] = w * sizeof(int32_t)
        return out

    # Room for what `plan` counted: new blocks, columns, copies on write. Evictions stand after a Code.
    cdef int room_for(self, int64_t blocks, int64_t columns, int64_t copies) noexcept nogil:
        if blocks > pool_available(self.pool) and self.placement is not None:
            self.placement.place.no_memory = False
            self.evict(blocks - pool_available(self.pool))
        if blocks > pool_available(self.pool):
            return E_MEMORY if self.placement is not None and self.placement.place.no_memory else E_BLOCKS
        return OK if self.grow_width(<int32_t>columns) and self._room_for_copies(copies) else E_MEMORY

    # What the tree alone owns gives way, as far as it can be dropped at once; demotions are left to Placement.reserve.
    cdef void evict(self, int64_t want) noexcept nogil:
        if self.placement.place.num_tiers == 1:
            make_room(&self.placement.place, 0, want, -1)

    cdef bint _room_for_copies(self, int64_t more) noexcept nogil:
        cdef int64_t capacity
        cdef Copy* grown
        if self.num_copied + more <= self.copied_capacity:
            return True
        capacity = 2 * (self.num_copied + more)
        grown = <Copy*>realloc(self.copied, capacity * sizeof(Copy))
        if grown == NULL:
            return False
        self.copied = grown
        self.copied_capacity = capacity
        return True

    def copies_done(self, copies=None, group=0):
        """The copies of a step have been made: let go of their sources.

        Where a step is cancelled before this is called, its rows have their shared blocks again.

        Parameters
        ----------
        copies : int32 [n, 2], optional
            ``StepArrays.copies`` of the step; or only the sources, int32 [n], by a caller that runs one step at a time.
            None: all steps' so far.
        group : int
            Whose copies they are; 1 and on for ``StepArrays.groups``.
        """
        cdef int32_t of = count_input(group, "group", 0, self.num_groups - 1)
        cdef cnp.ndarray pairs
        cdef const int32_t* data = NULL
        cdef int64_t n = 1
        cdef int32_t columns = 0
        if copies is not None:
            pairs = int32_input(np.ravel(copies), "copies")
            columns = 1 if np.ndim(copies) < 2 else 2
            data, n = i32(pairs), cnp.PyArray_SIZE(pairs) // columns
        self.lock.acquire()
        self.end_copies(data, n, columns, of)
        self.lock.release()

    def commit(self, rows, step=None):
        """The scheduled tokens of these rows (int64 [n]) are written.

        Full blocks join the prefix tree.

        Parameters
        ----------
        rows : int64 [n]
        step : int, optional
            ``StepArrays.number`` of the step that wrote them. Nothing is committed unless it scheduled all of them last.

        Returns
        -------
        int
            Blocks that the tree took or already had.

        Raises
        ------
        StaleHandle
            A row was released, or `step` is over for it: it was cut back, stepped again, committed or cancelled.
        InvalidArgument
            A row follows another one that is not committed, in this call or before. Nothing was committed.
        """
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), i = 0
        cdef int code
        cdef const int64_t* h = i64(handles)
        cdef int64_t committed = 0, number = 0 if step is None else count_input(step, "step", 1, 2**63 - 1)
        self.lock.acquire()
        with nogil:
            code = self.commit_rows(h, n, number, &committed, &i)
        self.lock.release()
        if code == E_STATE:
            raise StaleHandle("a sequence of this step was cut back or stepped again: its slots may be others' now")
        if code == E_FOLLOW:
            raise InvalidArgument(f"row {h[i]:#x} (entry {i}) follows a row that is not committed: commit both in one call, or "
                                  "its leader first; nothing was committed")
        if code == E_MEMORY:
            raise MemoryError("no memory for the paths of rows that follow others: the other rows are committed")
        if code != OK:
            self.raise_(code, handles, i)
        return committed

    def cancel(self, rows, step=None):
        """Take scheduled tokens of these rows (int64 [n]) back: they were not written.

        Parameters
        ----------
        rows : int64 [n]
        step : int, optional
            ``StepArrays.number``: rows that another step has scheduled since are left to that step.
        """
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef int64_t number = 0 if step is None else count_input(step, "step", 1, 2**63 - 1)
        self.lock.acquire()
        self.cancel_rows(i64(handles), <int32_t>cnp.PyArray_SIZE(handles), number)
        self.lock.release()

    def are_in(self, rows, step):
        """Whether a step scheduled all these rows last, and is not over for any.

        The step's number is ``StepArrays.number``.

        Code that writes into the slots of a step asks first: if not, the slots may belong to another sequence.

        Raises
        ------
        StaleHandle
            A row was released.
        """
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef int64_t i, bad = -1, number = count_input(step, "step", 1, 2**63 - 1)
        cdef bint same = True
        cdef int32_t r
        self.lock.acquire()
        for i in range(cnp.PyArray_SIZE(handles)):
            r = self.row_of(i64(handles)[i])
            if r < 0:
                bad = i
                break
            same &= self.rows[r].step == number
        self.lock.release()
        if bad >= 0:
            self.raise_(E_STALE, handles, bad)
        return same

    def roots(self, rows):
        """The namespace of each row, int64 [n].

        Raises
        ------
        StaleHandle
            A row was released.
        """
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef cnp.ndarray out = np.empty(cnp.PyArray_SIZE(handles), np.int64)
        cdef int64_t i, bad = -1
        cdef int32_t r, root
        self.lock.acquire()
        for i in range(cnp.PyArray_SIZE(handles)):
            r = self.row_of(i64(handles)[i])
            if r < 0:
                bad = i
                break
            root = self.rows[r].root
            i64(out)[i] = 0 if self.placement is None else make_handle(root, self.placement.place.tree.nodes[root].generation)
        self.lock.release()
        if bad >= 0:
            self.raise_(E_STALE, handles, bad)
        return out

    def truncate(self, row, num_tokens):
        """Keep the first `num_tokens` tokens of a row (rejected drafts, a retried turn).

        Give back blocks beyond them.

        The KV of a committed block that is cut has to be computed again, and so has that of a whole run where the run is
        being copied to a colder tier just then.
        """
        cdef int64_t handle = handle_input(row, "row")
        cdef int32_t keep = count_input(num_tokens, "num_tokens", 0, 0x7FFFFFF0)
        cdef int code
        self.lock.acquire()
        with nogil:
            code = self.cut(handle, keep)
        self.lock.release()
        if code == E_RANGE:
            raise InvalidArgument(f"row {handle:#x} has fewer than {keep} tokens: nothing was changed")
        if code != OK:
            self.raise_(code, [handle], 0)

    def fork(self, row, n=1):
        """`n` new rows with the same tokens and blocks.

        Full blocks are shared; the partly filled one is copied on write.

        Returns
        -------
        ndarray of int64 [n]
        """
        cdef int64_t handle = handle_input(row, "row")
        cdef int32_t count = self.count_forks(n)
        cdef cnp.ndarray out = np.empty(count, np.int64)
        self.fork_into(handle, count, i64(out))
        return out

    cdef int32_t count_forks(self, n) except -1:
        return count_input(n, "n", 0, self.max_rows)

    # As `fork`, into handles [count].
    cdef int fork_into(self, int64_t handle, int32_t count, int64_t* forks) except -1:
        cdef int code
        self.lock.acquire()
        with nogil:
            code = self.fork_to(handle, count, forks)
        self.lock.release()
        if code == E_BLOCKS:
            raise InvalidArgument(f"{count} forks asked, {self.num_free_rows} of {self.max_rows} rows are free")
        if code == E_STATE:
            raise InvalidArgument(f"row {handle:#x} is in a step: fork it before or after")
        if code != OK:
            self.raise_(code, [handle], 0)
        return OK

    def release(self, row, *, keep_remainder=False):
        """End a sequence: its own blocks become free, its committed ones stay in the tree.

        Parameters
        ----------
        row : int
        keep_remainder : bool
            The tree takes its last block, too, if some of its tokens are computed and not all: for partial hits.

        Raises
        ------
        DoubleRelease
            The row was released before.
        """
        cdef int64_t handle = handle_input(row, "row")
        cdef bint kept = keep_remainder
        cdef int32_t r
        self.lock.acquire()
        with nogil:
            r = self.row_of(handle)
            if r >= 0:
                if kept:
                    self.keep_remainder(r)
                self.end_row(r)
        self.lock.release()
        if r < 0:
            raise DoubleRelease(f"row {handle:#x} was released before, or never existed: nothing was changed")

    def retain(self, row, priority, expires_ns=0):
        """Set the retention of a row's committed prefix and of later commits.

        See ``Placement.set_retention``.
        """
        cdef int64_t handle = handle_input(row, "row")
        cdef int32_t klass = count_input(priority, "priority", 0, 100) + 1, r
        cdef int64_t until = count_input(expires_ns, "expires_ns", 0, 2**63 - 1)
        self.lock.acquire()
        r = self.row_of(handle)
        if r >= 0 and self.rows[r].owner != NIL:
            with nogil:
                retain(&self.placement.place, self.rows[r].owner, klass, until)
        self.lock.release()
        if r < 0:
            self.raise_(E_STALE, [handle], 0)

    def info(self, row):
        """The state of the row.

        A :class:`RowInfo`, ``(num_tokens, num_computed, num_blocks, num_committed)``.
        """
        cdef int64_t handle = handle_input(row, "row")
        cdef Row copy
        memset(&copy, 0, sizeof(Row))
        self.lock.acquire()
        cdef int32_t r = self.row_of(handle)
        if r >= 0:
            copy = self.rows[r]
        self.lock.release()
        if r < 0:
            self.raise_(E_STALE, [handle], 0)
        return new_tuple(RowInfo, (copy.num_tokens, copy.computed, copy.num_blocks, copy.num_owned))

    def tokens(self, row):
        """Tokens of a row, int32 [num_tokens] (a copy)."""
        return self._copy(row, True)

    def blocks(self, row):
        """Block ids of a row, int32 [num_blocks] (a copy)."""
        return self._copy(row, False)

    def pages(self, row, group):
        """Pages of a row in a group of layers that does not see everything.

        Returns
        -------
        first : int
            The block that the first of them is of.
        pages : int32 [n]

        Raises
        ------
        InvalidArgument, StaleHandle
        """
        cdef int64_t handle = handle_input(row, "row")
        cdef int32_t of = count_input(group, "group", 1, MAX_GROUPS), r, first = 0, n = 0, known = -1
        cdef cnp.ndarray out = None
        if of >= self.num_groups:
            raise InvalidArgument(f"there is no group {of}: {self.num_groups} groups with the one that sees everything")
        while n != known:
            known, out = n, new_int32(n)
            self.lock.acquire()
            r = self.row_of(handle)
            if r >= 0:
                first, n = self.first_of(r, of), self.rows[r].paged - self.first_of(r, of)
                if n == known:
                    memcpy(i32(out), self.pages_of(r, of), n * sizeof(int32_t))
            self.lock.release()
            if r < 0:
                self.raise_(E_STALE, [handle], 0)
        return first, out

    cdef object _copy(self, row, bint tokens):
        cdef int64_t handle = handle_input(row, "row")
        cdef int32_t r, n
        cdef cnp.ndarray out
        while True:
            self.lock.acquire()
            r = self.row_of(handle)
            n = 0 if r < 0 else self.rows[r].num_tokens if tokens else self.rows[r].num_blocks
            self.lock.release()
            if r < 0:
                self.raise_(E_STALE, [handle], 0)
            out = new_int32(n)
            self.lock.acquire()
            r = self.row_of(handle)
            if r >= 0 and n == (self.rows[r].num_tokens if tokens else self.rows[r].num_blocks):
                memcpy(i32(out), self.rows[r].tokens if tokens else self.table + <int64_t>r * self.width, n * sizeof(int32_t))
                self.lock.release()
                return out
            self.lock.release()

    @property
    def num_rows(self):
        """Live sequences."""
        cdef int64_t count
        self.lock.acquire()
        count = self.num_live
        self.lock.release()
        return count

    def check_integrity(self):
        """Every row's blocks are live.

        Each own block has as many references as rows (and pending copies) hold it.
        """
        cdef int32_t r, i, block, first
        cdef int64_t j
        problems = []
        held = {}
        cdef bint collecting = self.lock.begin_audit()
        try:
            live = following = 0
            for r in range(self.max_rows):
                row = self.rows[r]
                if not row.live:
                    continue
                live += 1
                if not (row.num_owned * self.block_size <= row.computed <= row.num_tokens and row.num_owned <= row.num_blocks):
                    problems.append(f"row {r}: {row.num_owned} owned, {row.computed} computed, {row.num_tokens} tokens")
                if row.owner != NIL and self.placement.place.owners[row.owner].num_blocks != row.num_owned:
                    problems.append(f"row {r}: {row.num_owned} owned, its owner has another number")
                for i in range(row.num_blocks, self.width):
                    if self.table[<int64_t>r * self.width + i] != NIL:
                        problems.append(f"row {r}: a block at {i}, beyond its {row.num_blocks}")
                        break
                if row.computed > row.num_blocks * self.block_size:
                    problems.append(f"row {r}: {row.computed} computed in {row.num_blocks} blocks")
                following += self.ties[r].leader != NIL
                first = row.computed // self.block_size
                if self.ties[r].leader != NIL:
                    problems += self._problems_of_follower(r, first)
                for i in range(row.num_blocks):
                    block = self.table[<int64_t>r * self.width + i]
                    if self.ties[r].leader != NIL and first <= i < self.ties[r].until:
                        continue                    # its leader's, without a reference
                    if block < 0 or block >= self.pool.fresh or self.pool.refs[block] & COUNT == 0:
                        problems.append(f"row {r}: block {block} at {i} is free")
                    elif i >= row.num_owned:
                        held[block] = held.get(block, 0) + 1
                    elif not self.pool.refs[block] >> 31:
                        problems.append(f"row {r}: committed block {block} is not the tree's")
                for i in range(1, self.num_groups):
                    problems += self._problems_of_pages(r, i)
            for j in range(self.num_copied):
                if self.copied[j].group:
                    continue
                held[self.copied[j].source] = held.get(self.copied[j].source, 0) + 1
            for block, count in held.items():
                if self.pool.refs[block] >> 31 or (self.pool.refs[block] & COUNT) < count:
                    problems.append(f"block {block}: {count} rows hold it, references {self.pool.refs[block] & COUNT}")
            if following != self.num_following:
                problems.append(f"{following} rows follow others, {self.num_following} are counted")
            if live != self.num_live or self.num_free_rows + self.num_retired + live != self.max_rows:
                problems.append("live rows")
        finally:
            self.lock.end_audit(collecting)
        if problems:
            raise AssertionError("; ".join(problems[:8]))

    cdef list _problems_of_pages(self, int32_t r, int32_t group):
        cdef Row* row = &self.rows[r]
        cdef Pool* pool = self.pool_of(group)
        cdef Tree* t = self.placement.place.tree
        cdef int32_t first = self.first_of(r, group), n = self.placement.place.owners[row.owner].node, j, page
        out = []
        if first != self.placement.place.owners[row.owner].first[group]:
            out.append(f"row {r}, group {group}: its table begins at block {first}, its owner's pages elsewhere")
        if not row.num_owned <= row.paged <= row.num_blocks or (row.num_blocks > row.paged and row.step):
            out.append(f"row {r}: {row.paged} blocks have pages of group {group}, of {row.num_blocks}")
        for j in range(row.paged - 1, first - 1, -1):
            page = self.pages_of(r, group)[j - first]
            while t.nodes[n].depth > j:
                n = t.nodes[n].parent
            if page < 0 or page >= pool.fresh or pool.refs[page] & COUNT == 0:
                out.append(f"row {r}, group {group}: page {page} of block {j} is free")
            elif j >= row.num_owned and pool.refs[page] >> 31:
                out.append(f"row {r}, group {group}: its own page {page} of block {j} is the tree's")
            elif j < row.num_owned and node_pages(t, n, DEVICE, group)[j - t.nodes[n].depth] != page:
                out.append(f"row {r}, group {group}: page {page} of block {j} is not the tree's")
        for j in range(row.paged - first, self.short_width[group]):
            if self.pages_of(r, group)[j] != NIL:
                out.append(f"row {r}, group {group}: a page behind its {row.paged} blocks")
                break
        return out

    cdef list _problems_of_follower(self, int32_t r, int32_t first):
        cdef Row* row = &self.rows[r]
        cdef Tie* tie = &self.ties[r]
        cdef Row* leader = &self.rows[tie.leader]
        cdef int32_t at = self.ties[tie.leader].follower, i
        cdef size_t same
        out = []
        while at != NIL and at != r:
            at = self.ties[at].next_follower
        if not leader.live or leader.step != row.step or row.step == 0 or at != r:
            out.append(f"row {r} follows row {tie.leader}, which is not in its step or does not know it")
        if not first < tie.until < row.num_blocks or row.computed != first * self.block_size or first < leader.num_owned:
            out.append(f"row {r} has {row.computed} tokens and follows up to block {tie.until} of {row.num_blocks}")
        for i in range(first, min(tie.until, leader.num_blocks)):
            if self.table[<int64_t>r * self.width + i] != self.table[<int64_t>tie.leader * self.width + i]:
                out.append(f"row {r}: block {i} is not its leader's")
        same = <size_t>tie.until * self.block_size * sizeof(int32_t)
        if tie.until > leader.num_blocks or memcmp(row.tokens, leader.tokens, same) != 0:
            out.append(f"row {r}: its leader does not compute its tokens up to block {tie.until}")
        return out

    def __repr__(self):
        return f"<BlockTable {self.num_live} of {self.max_rows} rows, block size {self.block_size}>"

    cdef object raise_(self, int code, object handles, int64_t bad):
        cdef const Row* row
        handle = int(handles[bad])
        if code == E_STALE:
            raise StaleHandle(f"row {handle:#x} (entry {bad}) was released, or never existed: nothing was changed")
        if code == E_OVERFLOW:
            raise InvalidArgument(f"row {handle:#x}: a block of it already has almost 2**31 references: nothing was changed")
        if code == E_DUPLICATE:
            raise InvalidArgument(f"entry {bad} of the batch (row {handle:#x}) stands in it twice: nothing was changed")
        if code == E_RANGE:
            row = &self.rows[handle_slot(handles[bad])]
            raise InvalidArgument(f"q_lens[{bad}] is negative or more than the {row.num_tokens - row.computed} tokens that "
                                  f"row {handle:#x} has left to compute (fewer where it follows another): nothing was changed")
        if code == E_FOLLOW:
            raise InvalidArgument(f"row {handle:#x} (entry {bad}) cannot follow its leader so far: in those blocks both need "
                                  f"the same tokens and namespace, the leader must write them in this step or before, and the "
                                  f"row must have computed what the leader has committed; nothing was changed")
        if code == E_MEMORY:
            raise MemoryError("no memory for the table")
        raise PagedKVError(f"row {handle:#x}: not possible now (code {code})")
