"""Rows of running sequences for C: argument checks, the mutex, the core."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagedkv._core.block_table cimport BlockTable, Row
from pagedkv._core.c_api.header cimport (
    PAGEDKV_E_ARGUMENT, PAGEDKV_E_RANGE, PAGEDKV_E_ROOM, PAGEDKV_E_ROWS, PAGEDKV_E_STALE, PAGEDKV_E_STATE,
)
from pagedkv._core.c_api.inside cimport enter_table, leave_table
from pagedkv._core.lock cimport write_hint
from pagedkv._core.radix_tree cimport tree_named
from pagedkv._core.types cimport E_BLOCKS, E_DUPLICATE, E_MEMORY, E_STALE, E_STATE, NIL, OK, make_handle

cdef enum:
    MOST_TOKENS = 1 << 30
    MOST_LOOKAHEAD = 1 << 20


# What `table_open` does, under the mutex: the row, or a code.
cdef int opened(BlockTable table, int64_t named, const int32_t* tokens, int64_t n, int32_t keep, int64_t owner,
                int32_t* r) noexcept nogil:
    cdef int32_t root = 0
    cdef int code
    if <void*>table.placement != <void*>None:
        root = tree_named(table.placement.place.tree, named)
        if root == NIL:
            return PAGEDKV_E_RANGE
    elif named != 0:
        return PAGEDKV_E_RANGE
    elif owner >= 0:
        return PAGEDKV_E_STALE                      # without a tree there are no owners
    code = table._open(tokens, n, root, owner, (n - keep) // table.block_size if n > keep else 0, r)
    return PAGEDKV_E_ROWS if code == E_BLOCKS else code


cdef int row_open(pagedkv_table* handle, int64_t named, const int32_t* tokens, int64_t n, int32_t keep, int64_t owner,
                  int64_t* row, int64_t* num_cached) noexcept nogil:
    cdef int32_t r = NIL
    cdef int code
    cdef Row* entry
    if (handle == NULL or n < 0 or n > MOST_TOKENS or (n > 0 and tokens == NULL) or keep < 0 or owner < NIL or row == NULL
            or num_cached == NULL):
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    code = opened(<BlockTable><void*>handle, named, tokens, n, keep, owner, &r)
    if code == OK:
        entry = &(<BlockTable><void*>handle).rows[r]
        row[0], num_cached[0] = make_handle(r, entry.generation), entry.computed
    leave_table(handle)
    return code


cdef int append(pagedkv_table* handle, const int64_t* rows, const int32_t* tokens, int32_t n, int32_t* bad) noexcept nogil:
    cdef int32_t at = 0
    cdef int code
    if handle == NULL or n < 0 or (n > 0 and (rows == NULL or tokens == NULL)):
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    code = (<BlockTable><void*>handle).append_to(rows, tokens, n, &at)
    leave_table(handle)
    if code != OK and bad != NULL:
        bad[0] = at
    return code


cdef int extend(pagedkv_table* handle, int64_t row, const int32_t* tokens, int64_t n) noexcept nogil:
    cdef int code
    if handle == NULL or n < 0 or n > MOST_TOKENS or (n > 0 and tokens == NULL):
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    code = (<BlockTable><void*>handle).extend_by(row, tokens, n)
    leave_table(handle)
    return code


cdef int blocks_needed(pagedkv_table* handle, const int64_t* rows, int32_t n, const int32_t* q_lens, int32_t lookahead,
                       int64_t* blocks, int32_t* bad) noexcept nogil:
    cdef int64_t totals[5]
    cdef int code
    if (handle == NULL or n < 0 or (n > 0 and rows == NULL) or not 0 <= lookahead <= MOST_LOOKAHEAD or blocks == NULL):
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    code = (<BlockTable><void*>handle).plan(rows, n, q_lens, lookahead, NULL, NULL, totals)
    leave_table(handle)
    blocks[0] = totals[0]
    if code != OK and bad != NULL:
        bad[0] = <int32_t>totals[4]
    return code


# What `table_step` does, under the mutex.
cdef int planned(BlockTable table, const int64_t* rows, int32_t n, const int32_t* q_lens, int32_t lookahead,
                 pagedkv_step* out, int32_t* bad) noexcept nogil:
    cdef int64_t totals[5]
    cdef int64_t columns
    cdef int code = table.plan(rows, n, q_lens, lookahead, NULL, NULL, totals)
    if code != OK:
        bad[0] = <int32_t>totals[4]
        return code
    out.num_new_blocks, out.num_tokens, out.width, out.num_copies = totals[0], totals[1], totals[2], totals[3]
    columns = out.stride if out.stride > 0 else out.width
    if (columns < out.width or columns > out.tables_room // max(1, n) or out.num_tokens > out.tokens_room
            or out.num_copies > out.copies_room):
        return PAGEDKV_E_ROOM
    code = table.room_for(out.num_new_blocks, out.width, out.num_copies)
    if code != OK:
        return code
    table.num_steps += 1
    write_hint(&table.num_changes, table.num_changes + 1)
    out.number = table.num_steps
    out.q_indptr[0] = 0
    table.fill(rows, n, q_lens, lookahead, out.block_tables, out.seq_lens, out.q_indptr, out.positions, out.tokens,
               out.slot_mapping, columns, out.copies)
    return OK


cdef int step(pagedkv_table* handle, const int64_t* rows, int32_t n, const int32_t* q_lens, int32_t lookahead,
              pagedkv_step* out, int32_t* bad) noexcept nogil:
    cdef int32_t at = 0
    cdef int code
    if (handle == NULL or n < 0 or (n > 0 and rows == NULL) or not 0 <= lookahead <= MOST_LOOKAHEAD or out == NULL):
        return PAGEDKV_E_ARGUMENT
    if (out.q_indptr == NULL or (n > 0 and out.seq_lens == NULL) or out.stride < 0 or out.tables_room < 0
            or out.tokens_room < 0 or out.copies_room < 0 or (out.tables_room > 0 and out.block_tables == NULL)
            or (out.copies_room > 0 and out.copies == NULL)):
        return PAGEDKV_E_ARGUMENT
    if out.tokens_room > 0 and (out.positions == NULL or out.tokens == NULL or out.slot_mapping == NULL):
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    code = planned(<BlockTable><void*>handle, rows, n, q_lens, lookahead, out, &at)
    leave_table(handle)
    if code != OK and bad != NULL:
        bad[0] = at
    return code


cdef int copies_done(pagedkv_table* handle, const int32_t* copies, int32_t n) noexcept nogil:
    if handle == NULL or n < 0 or (n > 0 and copies == NULL):
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    if copies == NULL:
        (<BlockTable><void*>handle).end_copies(NULL, 1, 0, 0)
    else:
        (<BlockTable><void*>handle).end_copies(copies, n, 2, 0)
    leave_table(handle)
    return OK


cdef int commit(pagedkv_table* handle, const int64_t* rows, int32_t n, int64_t number, int64_t* committed,
                int32_t* bad) noexcept nogil:
    cdef int32_t at = 0
    cdef int code
    if handle == NULL or n < 0 or (n > 0 and rows == NULL) or number < 0 or committed == NULL:
        return PAGEDKV_E_ARGUMENT
    committed[0] = 0
    enter_table(handle)
    code = (<BlockTable><void*>handle).commit_rows(rows, n, number, committed, &at)
    leave_table(handle)
    if code != OK and bad != NULL:
        bad[0] = at
    if code == E_STATE:
        return PAGEDKV_E_STALE                      # the step is over for the row
    if code == OK or code == E_STALE or code == E_DUPLICATE or code == E_MEMORY:
        return code
    return PAGEDKV_E_STATE                          # it follows a row that is not committed


cdef int cancel(pagedkv_table* handle, const int64_t* rows, int32_t n, int64_t number) noexcept nogil:
    if handle == NULL or n < 0 or (n > 0 and rows == NULL) or number < 0:
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    (<BlockTable><void*>handle).cancel_rows(rows, n, number)
    leave_table(handle)
    return OK


cdef int row_fork(pagedkv_table* handle, int64_t row, int32_t n, int64_t* forks) noexcept nogil:
    cdef int code
    if handle == NULL or n < 0 or (n > 0 and forks == NULL):
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    code = (<BlockTable><void*>handle).fork_to(row, n, forks)
    leave_table(handle)
    return PAGEDKV_E_ROWS if code == E_BLOCKS else code


cdef int truncate(pagedkv_table* handle, int64_t row, int32_t num_tokens) noexcept nogil:
    cdef int code
    if handle == NULL or num_tokens < 0:
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    code = (<BlockTable><void*>handle).cut(row, num_tokens)
    leave_table(handle)
    return code


cdef int row_release(pagedkv_table* handle, int64_t row, int keep_remainder) noexcept nogil:
    cdef int32_t r
    if handle == NULL:
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    r = (<BlockTable><void*>handle).row_of(row)
    if r >= 0:
        if keep_remainder:
            (<BlockTable><void*>handle).keep_remainder(r)
        (<BlockTable><void*>handle).end_row(r)
    leave_table(handle)
    return OK if r >= 0 else PAGEDKV_E_STALE


cdef int row_state(pagedkv_table* handle, int64_t row, pagedkv_row* state) noexcept nogil:
    cdef int32_t r
    cdef Row* entry
    if handle == NULL or state == NULL:
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    r = (<BlockTable><void*>handle).row_of(row)
    if r >= 0:
        entry = &(<BlockTable><void*>handle).rows[r]
        state.num_tokens, state.num_computed = entry.num_tokens, entry.computed
        state.num_blocks, state.num_committed = entry.num_blocks, entry.num_owned
    leave_table(handle)
    return OK if r >= 0 else PAGEDKV_E_STALE


# A row's tokens, or its blocks.
cdef int copied(pagedkv_table* handle, int64_t row, bint tokens, int32_t* into, int64_t room, int64_t* num) noexcept nogil:
    cdef Row* entry
    cdef int32_t r
    cdef int code = PAGEDKV_E_STALE
    if handle == NULL or room < 0 or (room > 0 and into == NULL) or num == NULL:
        return PAGEDKV_E_ARGUMENT
    enter_table(handle)
    r = (<BlockTable><void*>handle).row_of(row)
    if r >= 0:
        entry = &(<BlockTable><void*>handle).rows[r]
        num[0] = entry.num_tokens if tokens else entry.num_blocks
        code = OK if num[0] <= room else PAGEDKV_E_ROOM
        if code == OK and num[0] > 0:
            memcpy(into, entry.tokens if tokens else
                   (<BlockTable><void*>handle).table + <int64_t>r * (<BlockTable><void*>handle).width, num[0] * sizeof(int32_t))
    leave_table(handle)
    return code


cdef int row_tokens(pagedkv_table* handle, int64_t row, int32_t* tokens, int64_t room, int64_t* num) noexcept nogil:
    return copied(handle, row, True, tokens, room, num)


cdef int row_blocks(pagedkv_table* handle, int64_t row, int32_t* blocks, int64_t room, int64_t* num) noexcept nogil:
    return copied(handle, row, False, blocks, room, num)
