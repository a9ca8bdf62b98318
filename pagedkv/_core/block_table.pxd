# Running sequences as rows, and a step's arrays for a whole batch.
#
# Row r owns, besides its tokens:
#     blocks [0, num_owned)            through its Placement owner (shared with the tree, read only)
#     blocks [num_owned, num_blocks)   one reference each in the pool (its own; a fork shares them until it writes)
# and promises: computed <= num_tokens; num_owned * block_size <= computed; every token below `computed`
# has its KV written.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from pagedkv._core.block_pool cimport BlockPool, Pool
from pagedkv._core.lock cimport Lock
from pagedkv._core.placement cimport Placement

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
    int32_t* tokens         # [tokens_capacity], owned

cdef struct Copy:           # a copy-on-write under way: table[row, column] was the source and is the target
    int32_t row             # NIL once the row's step was committed
    int32_t column
    int32_t source          # one reference is ours
    int32_t target

cdef inline int32_t blocks_in(int32_t tokens, int32_t block_size, int32_t shift) noexcept nogil:
    return tokens >> shift if shift >= 0 else tokens // block_size

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
    cdef int64_t num_steps      # so far
    cdef int64_t num_changes    # times that a row began or ended a step, was cut back or released
    cdef Row* rows
    cdef int32_t* table         # [max_rows][width], NIL beyond a row's blocks
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
    cdef int plan(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead,
                  int64_t* totals) noexcept nogil
    cdef void fill(self, const int64_t* handles, int32_t n, const int32_t* q_lens, int32_t lookahead,
                   int32_t* arrays, int64_t after, int64_t* slots, int64_t* totals, int32_t* copies) noexcept nogil
    cdef object _checked(self, rows, q_lens, lookahead, bint short)
    cdef object _build(self, cnp.ndarray handles, cnp.ndarray lens, int32_t ahead, bint short)
    cdef void evict(self, int64_t want) noexcept nogil
    cdef void count(self, int32_t r, int32_t q, int32_t lookahead, int64_t* totals) noexcept nogil
    cdef int32_t commit_row(self, int32_t r) noexcept nogil
    cdef void end_row(self, int32_t r) noexcept nogil
    cdef void leave_kin(self, int32_t r) noexcept nogil
    cdef int64_t open_into(self, tokens, namespace, int64_t given, leave, int64_t* computed) except? -1
    cdef int32_t count_forks(self, n) except -1
    cdef int fork_into(self, int64_t handle, int32_t count, int64_t* forks) except -1
    cdef bint owns_prefix(self, int32_t slot, int32_t root, const int32_t* data, int64_t n) noexcept nogil
    cdef int _open(self, const int32_t* data, int64_t n, int32_t root, int64_t given, int64_t limit,
                   int32_t* out) noexcept nogil
    cdef void uncopy(self, int32_t r) noexcept nogil
    cdef void keep_copies(self, int32_t r) noexcept nogil
    cdef void forget_copy(self, int64_t j) noexcept nogil
    cdef bint _room_for_copies(self, int64_t more) noexcept nogil
    cdef object _copy(self, row, bint tokens)
    cdef object raise_(self, int code, object handles, int64_t bad)
