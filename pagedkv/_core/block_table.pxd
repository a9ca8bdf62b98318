# Running sequences as rows, and a step's arrays for a whole batch.
#
# Row r owns, besides its tokens:
#     blocks [0, num_owned)            through its Placement owner (shared with the tree, read only)
#     blocks [num_owned, num_blocks)   one reference each in the pool (its own; a fork shares them until it writes)
# A row of a step may follow another one, its leader: then, while the step is under way,
#     blocks [computed / block_size, until)   are the leader's, without a reference: written in this step, or before it
#     blocks [until, num_blocks)              are its own
# When the leader is committed, the row owns the former with the tree, or takes references where the tree refused them.
# When the row or its leader is cancelled, cut back, stepped again or released, the row is as before the step.
#
# and promises: computed <= num_tokens; num_owned * block_size <= computed; every token below `computed`
# has its KV written.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from pagedkv._core.block_pool cimport BlockPool, Pool
from pagedkv._core.lock cimport Lock
from pagedkv._core.placement cimport Placement
from pagedkv._core.types cimport MAX_GROUPS

cdef struct Row:
    int32_t generation
    int32_t num_tokens
    int32_t tokens_capacity
    int32_t computed        # tokens whose KV is written
    int32_t scheduled       # tokens of the step that is under way
    int32_t num_blocks
    int32_t num_owned
    int32_t owner           # slot in the Placement, NIL without one
    int32_t root
    int32_t prompt          # tokens it was opened with
    int32_t next_kin        # the ring of a request's rows: forks of each other; itself where it is alone
    int32_t last_kin
    int64_t step            # the one that scheduled it last; 0 once that is committed, cancelled or cut back
    int32_t marked          # batch number that last named this row: finds a row named twice
    uint8_t live
    uint8_t forked          # its partly filled block may be shared: look before writing
    uint8_t used            # something was computed for it
    int32_t paged           # blocks that have their pages of short groups
    int32_t agreed          # a boundary that becomes a point: where others went another way; 0: none
    int32_t spare           # blocks at its end that may be cut off again: their tails stay
    int32_t* tokens         # [tokens_capacity], owned

cdef struct Tie:            # whom a row follows, and who follows it; beside the rows, which steps without followers look at alone
    int32_t leader          # the row that it follows in the step under way, or NIL
    int32_t until           # blocks at its front once that is committed
    int32_t follower        # the first row that follows it, or NIL
    int32_t next_follower   # the next one that follows the same leader

cdef struct Copy:           # a copy-on-write under way: table[row, column], of a group, was the source and is the target
    int32_t row             # NIL once the row's step was committed
    int32_t group
    int32_t column
    int32_t source          # one reference is ours
    int32_t target

cdef inline int32_t blocks_in(int32_t tokens, int32_t block_size, int32_t shift) noexcept nogil:
    return tokens >> shift if shift >= 0 else tokens // block_size

cdef struct Pages:          # a batch's needs by short group
    int64_t more[MAX_GROUPS]    # pages
    int64_t wide[MAX_GROUPS]    # columns of the widest row
    int64_t copied[MAX_GROUPS]  # copies on write, of `more`

cdef class BlockTable:
    cdef Pool* pool
    cdef readonly BlockPool block_pool
    cdef readonly Placement placement
    cdef Lock lock
    cdef int32_t block_size
    cdef int32_t shift          # log2(block_size), -1 where it is no power of two
    cdef int64_t likely_width   # the widest of late, to size the next step's arrays
    cdef int32_t max_rows
    cdef int32_t width          # columns in `table`
    cdef int32_t num_live
    cdef int32_t batch
    cdef int32_t num_following  # rows with a leader
    cdef int64_t num_steps      # so far
    cdef int64_t num_changes    # times that a row began or ended a step, was cut back or released
    cdef Row* rows
    cdef Tie* ties              # [max_rows]
    cdef int32_t* table         # [max_rows][width], NIL beyond a row's blocks
    cdef readonly int32_t num_groups     # of layers that see equally far back; 1: all is in `table`
    cdef int32_t* short_tables[MAX_GROUPS]  # of a short group: [max_rows][short_width], from block `firsts` on
    cdef int32_t* firsts[MAX_GROUPS]        # [max_rows], the `first` of the row's owner
    cdef int64_t short_width[MAX_GROUPS]
    cdef int64_t likely_short[MAX_GROUPS]   # as likely_width
    cdef int32_t* free_rows
    cdef int32_t num_free_rows
    cdef int32_t num_retired    # rows whose generations are used up: never handed out again
    cdef Copy* copied           # of which `copies_done` was not called yet
    cdef int64_t num_copied
    cdef int64_t copied_capacity
    cdef object __weakref__
    cdef int32_t row_of(self, int64_t handle) noexcept nogil
    cdef bint grow_tokens(self, Row* row, int64_t wanted) noexcept nogil
    cdef bint grow_width(self, int32_t wanted) noexcept nogil
    cdef void put(self, int32_t r, int32_t column, int32_t block) noexcept nogil
    cdef int plan(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead, Pages* pages,
                  const int32_t* links, int64_t* totals) noexcept nogil
    cdef int plan_followers(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead,
                            const int32_t* links, int64_t* totals) noexcept nogil
    cdef int64_t fill(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead, int32_t* tables,
                      int32_t* seq_lens, int32_t* q_indptr, int32_t* positions, int32_t* tokens, int64_t* slots, int64_t w,
                      int32_t* copies) noexcept nogil
    cdef void fill_linked(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead,
                          const int32_t* links, int32_t* tables, int32_t* seq_lens, int32_t* q_indptr, int32_t* positions,
                          int64_t* slots, const int64_t* totals, int32_t* copies) noexcept nogil
    cdef inline int32_t first_of(self, int32_t r, int32_t group) noexcept nogil:
        return self.firsts[group][r]

    cdef inline int32_t* pages_of(self, int32_t r, int32_t group) noexcept nogil:
        return self.short_tables[group] + r * self.short_width[group]

    cdef inline Pool* pool_of(self, int32_t group) noexcept nogil:
        return self.pool if group == 0 else self.placement.place.groups.pools[0][group]

    cdef bint grow_short(self, int32_t group, int64_t wanted) noexcept nogil
    cdef bint grow_shorts(self, const int64_t* wanted) noexcept nogil
    cdef int32_t own_pages(self, int32_t r, int32_t blocks) noexcept nogil
    cdef bint grow_tails(self) noexcept nogil
    cdef bint load_tail(self, int32_t r) noexcept nogil
    cdef void drop_pages(self, int32_t r, int32_t blocks) noexcept nogil
    cdef void count_copies(self, int32_t r, Pages* pages) noexcept nogil
    cdef void plan_to_finish(self, const int64_t* handles, int32_t n, int32_t most, int32_t lookahead,
                             Pages* pages) noexcept nogil
    cdef int64_t as_blocks(self, int64_t blocks, const int64_t* more) noexcept nogil
    cdef void fill_group(self, int32_t group, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead,
                         int64_t w, int32_t* tables, int32_t* seq_lens, int64_t* slots, int32_t* copies) noexcept nogil
    cdef void commit_groups(self, int32_t r, int32_t before) noexcept nogil
    cdef object _checked(self, rows, q_lens, lookahead, follow, bint short)
    cdef object _as_array(self, const int64_t* more)
    cdef object _pages(self, rows, q_lens, int64_t most, lookahead)
    cdef object _build(self, cnp.ndarray handles, cnp.ndarray lens, int32_t ahead, cnp.ndarray links, bint short)
    cdef int32_t agree(self, int32_t r, int32_t leader, int32_t limit) noexcept nogil
    cdef void join(self, int32_t r, int32_t leader, int32_t until) noexcept nogil
    cdef void unlink(self, int32_t r) noexcept nogil
    cdef void part(self, int32_t r) noexcept nogil
    cdef int32_t settle(self, int32_t r) noexcept nogil
    cdef inline int64_t commit_scheduled(self, int32_t r) noexcept nogil:
        # Row r's scheduled tokens are computed. Blocks committed.
        cdef Row* row = &self.rows[r]
        if self.num_copied and row.scheduled:
            self.keep_copies(r)
        row.computed += row.scheduled
        row.used |= row.scheduled > 0
        row.scheduled = 0
        row.step = 0
        if blocks_in(row.computed, self.block_size, self.shift) > row.num_owned:
            return self.commit_row(r)
        return 0

    cdef int commit_together(self, const int64_t* handles, int32_t n, int64_t* committed) noexcept nogil
    cdef int append_to(self, const int64_t* handles, const int32_t* tokens, int32_t n, int32_t* bad) noexcept nogil
    cdef int extend_by(self, int64_t handle, const int32_t* tokens, int64_t n) noexcept nogil
    cdef int commit_rows(self, const int64_t* handles, int32_t n, int64_t number, int64_t* committed,
                         int32_t* bad) noexcept nogil
    cdef void cancel_rows(self, const int64_t* handles, int32_t n, int64_t number) noexcept nogil
    cdef void end_copies(self, const int32_t* data, int64_t n, int32_t columns, int32_t group) noexcept nogil
    cdef int cut(self, int64_t handle, int32_t keep) noexcept nogil
    cdef int fork_to(self, int64_t handle, int32_t count, int64_t* forks) noexcept nogil
    cdef int room_for(self, int64_t blocks, int64_t columns, int64_t copies) noexcept nogil
    cdef void evict(self, int64_t want) noexcept nogil
    cdef int32_t commit_row(self, int32_t r) noexcept nogil
    cdef void keep_remainder(self, int32_t r) noexcept nogil
    cdef void end_row(self, int32_t r) noexcept nogil
    cdef void leave_kin(self, int32_t r) noexcept nogil
    cdef int64_t open_into(self, tokens, namespace, int64_t given, leave, int64_t* computed) except? -1
    cdef int32_t count_forks(self, n) except -1
    cdef int fork_into(self, int64_t handle, int32_t count, int64_t* forks) except -1
    cdef bint owns_tail(self, int32_t slot) noexcept nogil
    cdef bint owns_prefix(self, int32_t slot, int32_t root, const int32_t* data, int64_t n) noexcept nogil
    cdef int _open(self, const int32_t* data, int64_t n, int32_t root, int64_t given, int64_t limit,
                   int32_t* out) noexcept nogil
    cdef void uncopy(self, int32_t r) noexcept nogil
    cdef void keep_copies(self, int32_t r) noexcept nogil
    cdef void forget_copy(self, int64_t j) noexcept nogil
    cdef void note_copy(self, int32_t r, int32_t group, int32_t column, int32_t source, int32_t target) noexcept nogil
    cdef list _problems_of_pages(self, int32_t r, int32_t group)
    cdef bint _room_for_copies(self, int64_t more) noexcept nogil
    cdef object _copy(self, row, bint tokens)
    cdef list _problems_of_follower(self, int32_t r, int32_t first)
    cdef object raise_(self, int code, object handles, int64_t bad)
