"""Running sequences as rows of one table.

Append, allocate, build a step's arrays, commit, fork, truncate, release.

A step is one call for the whole batch with the GIL released once; the arrays come out of one buffer.
"""
# Over 400 lines: every method works on the same row structs under one lock, and C compilers inline only within a module.

cimport cython
cimport numpy as cnp
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

import numpy as np

from pagedkv._core.arrays cimport (
    count_input, handle_input, i32, i64, int32_input, int64_input, new_int32, tokens_input,
)
from pagedkv._core.block_pool cimport COUNT, pool_alloc, pool_available, pool_drop_one
from pagedkv._core.insertion cimport place_insert
from pagedkv._core.lock cimport read_hint, write_hint
from pagedkv._core.owners cimport (
    place_acquire, place_arrive, place_blocks, place_depart, place_owner, place_release, place_share,
    place_shorten, place_uncut,
)
from pagedkv._core.place cimport TAKEN_OVER
from pagedkv._core.radix_tree cimport Tree, node_top, tree_named
from pagedkv._core.retention cimport retain
from pagedkv._core.transfers cimport make_room
from pagedkv._core.types cimport (
    E_BLOCKS, E_DUPLICATE, E_MEMORY, E_OVERFLOW, E_RANGE, E_STALE, E_STATE, NIL, OK, handle_generation, handle_slot, make_handle,
    next_generation,
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
    AHEAD = 16              # rows: a big batch's rows lie in thousands of cache lines that no loop order brings together


# Tokens of a row beyond its prompt.
cdef inline int64_t generated(Row* row) noexcept nogil:
    return row.num_tokens - row.prompt if row.num_tokens > row.prompt else 0


@cython.final
@cython.freelist(8)
cdef class StepArrays:
    """What a step's kernels need, as views of one int32 and one int64 buffer.

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
    """

    cdef readonly object block_tables
    cdef readonly object seq_lens
    cdef readonly object q_indptr
    cdef readonly object positions
    cdef readonly object tokens
    cdef readonly object slot_mapping
    cdef readonly object copies
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
    max_rows : int
        Sequences at most.
    block_size : int, optional
        Needed with a bare BlockPool; with a Placement its tree's.

    Notes
    -----
    A row is named by an int64 handle, which stops working when the row is released. Thread-safe.
    """

    def __cinit__(self, source, max_rows=4096, *, block_size=None):
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
        self.max_rows = count_input(max_rows, "max_rows", 1, 1 << 24)
        self.width = 64
        self.rows = <Row*>calloc(self.max_rows, sizeof(Row))
        self.table = <int32_t*>malloc(<size_t>self.max_rows * self.width * sizeof(int32_t))
        self.free_rows = <int32_t*>malloc(self.max_rows * sizeof(int32_t))
        if self.rows == NULL or self.table == NULL or self.free_rows == NULL:
            raise MemoryError(f"no memory for {self.max_rows} rows")
        memset(self.table, 0xFF, <size_t>self.max_rows * self.width * sizeof(int32_t))
        for i in range(self.max_rows):
            self.free_rows[i] = self.max_rows - 1 - i
        self.num_free_rows = self.max_rows
        self.block_pool.attached = True             # no Placement may give the pool another mutex now

    def __dealloc__(self):
        cdef int32_t r
        if self.rows != NULL:
            for r in range(self.max_rows):
                free(self.rows[r].tokens)
        free(self.rows)
        free(self.table)
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
    # q_lens NULL: all uncomputed tokens. Changes nothing that anybody sees.
    cdef int plan(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead,
                  int64_t* totals) noexcept nogil:
        cdef int32_t i, r, q
        cdef Row* row
        memset(totals, 0, 5 * sizeof(int64_t))
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
            q = row.num_tokens - row.computed
            if q_lens != NULL:
                if q_lens[i] < 0 or q_lens[i] > q:
                    return E_RANGE
                q = q_lens[i]
            self.count(r, q, lookahead, totals)
        return OK

    # Adds to `totals` what q more tokens of row r need.
    cdef void count(self, int32_t r, int32_t q, int32_t lookahead, int64_t* totals) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t i, blocks = blocks_in(
            row.computed + q + lookahead + self.block_size - 1, self.block_size, self.shift)
        totals[1] += q
        if blocks > row.num_blocks:
            totals[0] += blocks - row.num_blocks
        else:
            blocks = row.num_blocks
        if blocks > totals[2]:
            totals[2] = blocks
        if row.forked and q > 0:    # blocks to be written may exist already and have other owners
            for i in range(blocks_in(row.computed, self.block_size, self.shift), row.num_blocks):
                if self.pool.refs[self.table[<int64_t>r * self.width + i]] & COUNT > 1:
                    totals[0] += 1
                    totals[3] += 1

    # Allocates what `plan` counted (the pool has it) and writes the arrays. int32: [tables n*w ... | seq_lens n | q_indptr n+1 |
    # positions t | tokens t], with seq_lens at `after`, n*w or more; int64 slots [t], copies [c][2].
    cdef void fill(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead, int32_t* arrays,
                   int64_t after, int64_t* slots, int64_t* totals, int32_t* copies) noexcept nogil:
        cdef int64_t w = totals[2], t = totals[1], at = 0, c = 0
        cdef int32_t* seq_lens = arrays + after
        cdef int32_t* q_indptr = seq_lens + n
        cdef int32_t* positions = q_indptr + n + 1
        cdef int32_t* tokens = positions + t
        cdef int32_t i, j, r, first, last, blocks, block, bs = self.block_size, column, offset
        cdef int32_t* table
        cdef Row* row
        q_indptr[0] = 0
        for i in range(n):
            if i + AHEAD < n:
                row = &self.rows[handle_slot(handles[i + AHEAD])]
                prefetch(row.tokens + row.computed)
            r = handle_slot(handles[i])
            row = &self.rows[r]
            table = self.table + <int64_t>r * self.width
            first = row.computed
            row.scheduled = row.num_tokens - row.computed if q_lens == NULL else q_lens[i]
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
                        self.copied[self.num_copied].row = r
                        self.copied[self.num_copied].column = j
                        self.copied[self.num_copied].source = table[j]      # the row's reference, until copies_done
                        self.copied[self.num_copied].target = block
                        self.num_copied += 1
                        c += 1
                        self.put(r, j, block)
            blocks = blocks_in(last + lookahead + bs - 1, bs, self.shift)
            while row.num_blocks < blocks:
                pool_alloc(self.pool, 1, &block)
                self.put(r, row.num_blocks, block)
                row.num_blocks += 1
            for j in range(row.num_blocks):                     # short rows: a loop beats two calls
                arrays[i * w + j] = table[j]
            for j in range(row.num_blocks, <int32_t>w):
                arrays[i * w + j] = NIL
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

    # Row r has its shared blocks again where copies of them were not made.
    cdef void uncopy(self, int32_t r) noexcept nogil:
        cdef int64_t j = 0
        while j < self.num_copied:
            if self.copied[j].row != r:
                j += 1
                continue
            self.put(r, self.copied[j].column, self.copied[j].source)
            pool_drop_one(self.pool, self.copied[j].target)
            self.rows[r].forked = 1
            self.forget_copy(j)

    # The targets of row r's copies are written: only the references on the sources are left to let go of.
    cdef void keep_copies(self, int32_t r) noexcept nogil:
        cdef int64_t j
        for j in range(self.num_copied):
            if self.copied[j].row == r:
                self.copied[j].row = NIL

    cdef void forget_copy(self, int64_t j) noexcept nogil:
        self.num_copied -= 1
        self.copied[j] = self.copied[self.num_copied]

    # Full computed blocks become the tree's. Blocks committed.
    cdef int32_t commit_row(self, int32_t r) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t full = row.computed // self.block_size, done, i
        cdef int32_t* mine = self.table + <int64_t>r * self.width + row.num_owned
        cdef int32_t before[64]
        if row.owner == NIL or full <= row.num_owned:
            return 0
        full -= row.num_owned
        if full <= 64:
            memcpy(before, mine, full * sizeof(int32_t))
        done = place_insert(&self.placement.place, row.owner, row.tokens + <int64_t>row.num_owned * self.block_size, mine, full)
        for i in range(done):                                   # log the adopted ones
            if full > 64 or mine[i] != before[i]:
                self.put(r, row.num_owned + i, mine[i])
        row.num_owned += done
        return done

    cdef void end_row(self, int32_t r) noexcept nogil:
        cdef Row* row = &self.rows[r]
        cdef int32_t i
        cdef int32_t* table = self.table + <int64_t>r * self.width
        if self.num_copied:
            self.uncopy(r)
        for i in range(row.num_blocks - 1, row.num_owned - 1, -1):
            pool_drop_one(self.pool, table[i])
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
            An owner of a settled prefix of `tokens` (all on the device): the row takes it over. By default the longest
            prefix on the device is matched here.
        leave : int
            Tokens left to compute at least, so that there is a query to attend with. Default 1.

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
            raise InvalidArgument(f"all {self.max_rows} rows are in use: release sequences, or allow more (max_sequences of a "
                                  "KVCache, max_rows of a BlockTable)")
        if code == E_STALE:
            raise StaleHandle(f"owner {given:#x} was released, or never existed")
        if code == E_STATE:
            raise InvalidArgument("what is owned is no prefix of these tokens in this namespace, or not settled on the device")
        if code != OK:
            raise MemoryError(f"no memory for a sequence of {n} tokens")
        return handle

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
        if given >= 0 and not self.owns_prefix(slot, root, data, n):
            return E_STATE
        if slot != NIL:
            node = self.placement.place.owners[slot].node
            i = self.placement.place.owners[slot].num_blocks
            while self.placement.place.tree.nodes[node].length > 0:
                if node_top(self.placement.place.tree, node) != 0:
                    i = self.placement.place.tree.nodes[node].depth     # from here on it is not on the device
                node = self.placement.place.tree.nodes[node].parent
            if given >= 0 and (i < self.placement.place.owners[slot].num_blocks or <int64_t>i * self.block_size > n):
                return E_STATE
            if i < self.placement.place.owners[slot].num_blocks:
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
        row.num_owned = self.placement.place.owners[slot].num_blocks if slot != NIL else 0
        row.num_blocks = row.num_owned
        row.computed = row.num_owned * self.block_size
        memset(self.table + <int64_t>r * self.width, 0xFF, self.width * sizeof(int32_t))
        if row.num_owned:
            place_blocks(&self.placement.place, slot, self.table + <int64_t>r * self.width)
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
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), i, r, code = OK
        if cnp.PyArray_SIZE(values) != n:
            raise InvalidArgument(f"{n} rows but {len(values)} tokens")
        cdef const int64_t* h = i64(handles)
        cdef const int32_t* v = i32(values)
        self.lock.acquire()
        with nogil:
            self.batch += 1
            for i in range(n):
                r = self.row_of(h[i])
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
            if code == OK:
                for i in range(n):
                    r = handle_slot(h[i])
                    self.rows[r].tokens[self.rows[r].num_tokens] = v[i]
                    self.rows[r].num_tokens += 1
        self.lock.release()
        if code != OK:
            self.raise_(code, handles, i)

    def extend(self, row, tokens):
        """Append several tokens (int32 [n]) to one row: a further turn, or a draft to be verified."""
        cdef cnp.ndarray values = tokens_input(tokens)
        cdef int64_t n = cnp.PyArray_SIZE(values)
        cdef int64_t handle = handle_input(row, "row")
        cdef int32_t r, code = OK
        self.lock.acquire()
        r = self.row_of(handle)
        if r < 0:
            code = E_STALE
        elif not self.grow_tokens(&self.rows[r], self.rows[r].num_tokens + n):
            code = E_MEMORY
        else:
            memcpy(self.rows[r].tokens + self.rows[r].num_tokens, i32(values), n * sizeof(int32_t))
            self.rows[r].num_tokens += <int32_t>n
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
                       and self.rows[r].computed + tokens <= self.rows[r].num_tokens
                       and pool_available(self.pool) > 0 and self.grow_width(self.rows[r].num_blocks + 1)):
            pool_alloc(self.pool, 1, &block)
            self.put(r, self.rows[r].num_blocks, block)
            self.rows[r].num_blocks += 1
            self.rows[r].computed += tokens
        self.lock.release()
        if r < 0:
            self.raise_(E_STALE, [handle], 0)
        return block

    def blocks_needed(self, rows, q_lens=None, lookahead=0):
        """Blocks that :meth:`step` with the same arguments would allocate."""
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef cnp.ndarray lens = None if q_lens is None else int32_input(q_lens, "q_lens")
        cdef int64_t totals[5]
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), ahead = count_input(lookahead, "lookahead", 0, 1 << 20)
        if lens is not None and cnp.PyArray_SIZE(lens) != n:
            raise InvalidArgument(f"{n} rows but {len(lens)} q_lens")
        self.lock.acquire()
        cdef int code = self.plan(i64(handles), n, NULL if lens is None else i32(lens), ahead, totals)
        self.lock.release()
        if code != OK:
            self.raise_(code, handles, totals[4])
        return totals[0]

    def step(self, rows, q_lens=None, lookahead=0):
        """Allocate what the next tokens of these rows need and build the step's arrays.

        All or nothing.

        Parameters
        ----------
        rows : int64 [n]
            Handles, each once.
        q_lens : int32 [n], optional
            Tokens to compute of each row now (chunked prefill); default all that are not computed.
        lookahead : int
            Token slots to allocate beyond them, for speculative tokens.

        Returns
        -------
        StepArrays

        Raises
        ------
        OutOfBlocks
            Too few blocks are free, and over one tier none could be evicted; over several, make room with
            ``placement.reserve`` first. Nothing was changed.
        """
        return self._checked(rows, q_lens, lookahead, False)

    def try_step(self, rows, q_lens=None, lookahead=0):
        """As :meth:`step`, but where too few blocks are free.

        The number of blocks that it needs, and nothing was changed.

        Returns
        -------
        StepArrays or int
        """
        return self._checked(rows, q_lens, lookahead, True)

    cdef object _checked(self, rows, q_lens, lookahead, bint short):
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef cnp.ndarray lens = None if q_lens is None else int32_input(q_lens, "q_lens")
        if lens is not None and cnp.PyArray_SIZE(lens) != cnp.PyArray_SIZE(handles):
            raise InvalidArgument(f"{len(handles)} rows but {len(lens)} q_lens")
        return self._build(handles, lens, count_input(lookahead, "lookahead", 0, 1 << 20), short)

    # Schedules, allocates and fills. Sizes are guessed from the last step, so that one section under the lock is enough; a wrong
    # guess costs another round. All objects are made before that section: once the rows are scheduled nothing can fail any more.
    # Where there are too few blocks: with `short`, how many it needs; else OutOfBlocks.
    cdef object _build(self, cnp.ndarray handles, cnp.ndarray lens, int32_t ahead, bint short):
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), code
        cdef int64_t totals[5]
        cdef const int64_t* h = i64(handles)
        cdef const int32_t* q = NULL if lens is None else i32(lens)
        cdef int32_t* data
        cdef int64_t* slot_data
        cdef int32_t* copy_data
        cdef cnp.ndarray arrays, slots, copies, tables
        cdef int64_t w = read_hint(&self.likely_width) + 1, t = n, c = 0, room, seq
        cdef cnp.npy_intp slot_size
        cdef int64_t copy_size
        cdef StepArrays out
        while True:
            room, slot_size, copy_size, seq = w, t, c, n * w
            out = StepArrays.__new__(StepArrays)
            arrays, slots = new_int32(seq + 2 * n + 1 + 2 * t), cnp.PyArray_EMPTY(1, &slot_size, cnp.NPY_INT64, 0)
            copies = np.empty((copy_size, 2), np.int32) if copy_size else no_copies
            tables = part_of(arrays, 0, n, room)
            out.block_tables, out.slot_mapping, out.copies = tables, slots, copies
            out.seq_lens = part_of(arrays, seq, n, -1)
            out.q_indptr = part_of(arrays, seq + n, n + 1, -1)
            out.positions = part_of(arrays, seq + 2 * n + 1, t, -1)
            out.tokens = part_of(arrays, seq + 2 * n + 1 + t, t, -1)
            cnp.PyArray_CLEARFLAGS(slots, cnp.NPY_ARRAY_WRITEABLE)
            cnp.PyArray_ENABLEFLAGS(out.tokens, cnp.NPY_ARRAY_WRITEABLE)
            out.block_size, out.table = self.block_size, self
            data, slot_data, copy_data = i32(arrays), i64(slots), i32(copies)
            self.lock.acquire()
            with nogil:
                code = self.plan(h, n, q, ahead, totals)
                w, t, c = totals[2], totals[1], totals[3]
                if code == OK and (w > room or t != slot_size or c != copy_size):
                    code = E_STATE                              # now the sizes are known
                elif code == OK:
                    if totals[0] > pool_available(self.pool) and self.placement is not None:
                        self.placement.place.no_memory = False
                        self.evict(totals[0] - pool_available(self.pool))
                    if totals[0] > pool_available(self.pool):
                        code = E_MEMORY if self.placement is not None and self.placement.place.no_memory else E_BLOCKS
                    elif not (self.grow_width(<int32_t>w) and self._room_for_copies(c)):
                        code = E_MEMORY
                    else:
                        write_hint(&self.likely_width, max(w, self.likely_width - (self.likely_width >> 4)))
                        self.num_steps += 1
                        write_hint(&self.num_changes, self.num_changes + 1)
                        out.number, out.num_changes = self.num_steps, self.num_changes
                        out.num_new_blocks = totals[0]
                        self.fill(h, n, q, ahead, data, seq, slot_data, totals, copy_data)
            self.lock.release()
            if code == OK:
                break
            if code == E_BLOCKS:
                if short:
                    return totals[0]
                if self.placement is not None:
                    raise self.placement.out_of_blocks(totals[0])
                raise self.block_pool._out_of_blocks(totals[0])
            if code != E_STATE:
                self.raise_(code, handles, totals[4])
        cnp.PyArray_DIMS(tables)[1] = w                     # as wide as its widest row: no other code has seen it yet
        cnp.PyArray_STRIDES(tables)[0] = w * sizeof(int32_t)
        return out

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

    def copies_done(self, copies=None):
        """The copies of a step have been made: let go of their sources.

        Where a step is cancelled before this is called, its rows have their shared blocks again.

        Parameters
        ----------
        copies : int32 [n, 2], optional
            ``StepArrays.copies`` of the step; or only the sources, int32 [n], by a caller that runs one step at a time.
            None: all steps' so far.
        """
        cdef cnp.ndarray pairs
        cdef const int32_t* data = NULL
        cdef int64_t i, j, n = 1, columns = 0
        if copies is not None:
            pairs = int32_input(np.ravel(copies), "copies")
            columns = 1 if np.ndim(copies) < 2 else 2
            data, n = i32(pairs), cnp.PyArray_SIZE(pairs) // columns
        self.lock.acquire()
        for i in range(n):
            j = 0
            while j < self.num_copied:
                if columns and (self.copied[j].source != data[i * columns]
                                or (columns == 2 and self.copied[j].target != data[2 * i + 1])):
                    j += 1
                    continue
                pool_drop_one(self.pool, self.copied[j].source)
                self.forget_copy(j)
                if columns:
                    break
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
        """
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(handles), i, r, code = OK
        cdef const int64_t* h = i64(handles)
        cdef int64_t committed = 0, number = 0 if step is None else count_input(step, "step", 1, 2**63 - 1)
        cdef Row* row
        self.lock.acquire()
        with nogil:
            for i in range(n):
                r = self.row_of(h[i])
                if r < 0:
                    code = E_STALE
                    break
                if number and self.rows[r].step != number:
                    code = E_STATE
                    break
            if code == OK:
                write_hint(&self.num_changes, self.num_changes + 1)
                for i in range(n):
                    r = handle_slot(h[i])
                    row = &self.rows[r]
                    if self.num_copied and row.scheduled:
                        self.keep_copies(r)
                    row.computed += row.scheduled
                    row.used |= row.scheduled > 0
                    row.scheduled = 0
                    row.step = 0
                    if blocks_in(row.computed, self.block_size, self.shift) > row.num_owned:
                        committed += self.commit_row(r)
        self.lock.release()
        if code == E_STATE:
            raise StaleHandle("a sequence of this step was cut back or stepped again: its slots may be others' now")
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
        cdef int32_t i, r
        self.lock.acquire()
        write_hint(&self.num_changes, self.num_changes + 1)
        for i in range(cnp.PyArray_SIZE(handles)):
            r = self.row_of(i64(handles)[i])
            if r >= 0 and (number == 0 or self.rows[r].step == number):
                if self.num_copied and self.rows[r].scheduled:
                    self.uncopy(r)
                self.rows[r].scheduled = 0
                self.rows[r].step = 0
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
        cdef int32_t r, code = OK, blocks, i, whole, keep_computed
        cdef Row* entry
        cdef int32_t* table
        self.lock.acquire()
        r = self.row_of(handle)
        if r < 0:
            code = E_STALE
        elif keep > self.rows[r].num_tokens:
            code = E_RANGE
        else:
            entry = &self.rows[r]
            table = self.table + <int64_t>r * self.width
            if self.num_copied and entry.scheduled:
                self.uncopy(r)
            whole = keep // self.block_size         # a committed block that is cut is given up: the rest of it is the tree's
            blocks = (keep + self.block_size - 1) // self.block_size
            if entry.num_owned > whole:
                whole = place_uncut(&self.placement.place, entry.owner, whole)      # the rest of a run in flight goes too
                with nogil:
                    code = place_shorten(&self.placement.place, entry.owner, whole)
                blocks = whole
                if code == OK:
                    for i in range(whole, entry.num_owned):
                        table[i] = NIL              # the owner let go of these; only the row's own are dropped below
            if code == OK:
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
                entry.scheduled = 0
                entry.step = 0
                write_hint(&self.num_changes, self.num_changes + 1)
                if entry.computed > keep_computed:
                    entry.computed = keep_computed
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
        cdef int32_t i, j, r, new, code = OK, made = 0, shared = 0
        cdef Row* old
        cdef Row* row_new
        self.lock.acquire()
        with nogil:
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
                    forks[i] = make_handle(new, row_new.generation)
                    made += 1
                if code != OK:
                    for j in range(made):
                        self.end_row(handle_slot(forks[j]))
        self.lock.release()
        if code == E_BLOCKS:
            raise InvalidArgument(f"{count} forks asked, {self.num_free_rows} of {self.max_rows} rows are free")
        if code == E_STATE:
            raise InvalidArgument(f"row {handle:#x} is in a step: fork it before or after")
        if code != OK:
            self.raise_(code, [handle], 0)
        return OK

    def release(self, row):
        """End a sequence: its own blocks become free, its committed ones stay in the tree.

        Raises
        ------
        DoubleRelease
            The row was released before.
        """
        cdef int64_t handle = handle_input(row, "row")
        cdef int32_t r
        self.lock.acquire()
        with nogil:
            r = self.row_of(handle)
            if r >= 0:
                self.end_row(r)
        self.lock.release()
        if r < 0:
            raise DoubleRelease(f"row {handle:#x} was released before, or never existed: nothing was changed")

    def retain(self, row, priority, expires_ns=0):
        """Retention of a row's committed prefix and of what it commits later.

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
        """What the row has.

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
        cdef int32_t r, i, block
        cdef int64_t j
        problems = []
        held = {}
        cdef bint collecting = self.lock.begin_audit()
        try:
            live = 0
            for r in range(self.max_rows):
                row = self.rows[r]
                if not row.live:
                    continue
                live += 1
                if not (row.num_owned * self.block_size <= row.computed <= row.num_tokens and row.num_owned <= row.num_blocks):
                    problems.append(f"row {r}: {row.num_owned} owned, {row.computed} computed, {row.num_tokens} tokens")
                if row.owner != NIL and self.placement.place.owners[row.owner].num_blocks != row.num_owned:
                    problems.append(f"row {r}: {row.num_owned} owned, its owner has another number")
                if row.computed > row.num_blocks * self.block_size:
                    problems.append(f"row {r}: {row.computed} computed in {row.num_blocks} blocks")
                for i in range(row.num_blocks):
                    block = self.table[<int64_t>r * self.width + i]
                    if block < 0 or block >= self.pool.fresh or self.pool.refs[block] & COUNT == 0:
                        problems.append(f"row {r}: block {block} at {i} is free")
                    elif i >= row.num_owned:
                        held[block] = held.get(block, 0) + 1
                    elif not self.pool.refs[block] >> 31:
                        problems.append(f"row {r}: committed block {block} is not the tree's")
            for j in range(self.num_copied):
                held[self.copied[j].source] = held.get(self.copied[j].source, 0) + 1
            for block, count in held.items():
                if self.pool.refs[block] >> 31 or (self.pool.refs[block] & COUNT) < count:
                    problems.append(f"block {block}: {count} rows hold it, references {self.pool.refs[block] & COUNT}")
            if live != self.num_live or self.num_free_rows + self.num_retired + live != self.max_rows:
                problems.append("live rows")
        finally:
            self.lock.end_audit(collecting)
        if problems:
            raise AssertionError("; ".join(problems[:8]))

    def __repr__(self):
        return f"<BlockTable {self.num_live} of {self.max_rows} rows, block size {self.block_size}>"

    cdef object raise_(self, int code, object handles, int64_t bad):
        handle = int(handles[bad])
        if code == E_STALE:
            raise StaleHandle(f"row {handle:#x} (entry {bad}) was released, or never existed: nothing was changed")
        if code == E_OVERFLOW:
            raise InvalidArgument(f"row {handle:#x}: a block of it already has almost 2**31 references: nothing was changed")
        if code == E_DUPLICATE:
            raise InvalidArgument(f"row {handle:#x} (entry {bad}) stands twice in the batch: nothing was changed")
        if code == E_RANGE:
            raise InvalidArgument(f"q_lens[{bad}] is negative or more than row {handle:#x} has left to compute: "
                                  f"nothing was changed")
        if code == E_MEMORY:
            raise MemoryError("no memory for the table")
        raise PagedKVError(f"row {handle:#x}: not possible now (code {code})")
