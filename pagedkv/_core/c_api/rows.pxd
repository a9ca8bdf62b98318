# The calls of pagedkv.h on the rows of a table: none needs the GIL.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.c_api.header cimport pagedkv_row, pagedkv_step, pagedkv_table

cdef int row_open(pagedkv_table* handle, int64_t named, const int32_t* tokens, int64_t n, int32_t keep, int64_t owner,
                  int64_t* row, int64_t* num_cached) noexcept nogil
cdef int append(pagedkv_table* handle, const int64_t* rows, const int32_t* tokens, int32_t n, int32_t* bad) noexcept nogil
cdef int extend(pagedkv_table* handle, int64_t row, const int32_t* tokens, int64_t n) noexcept nogil
cdef int blocks_needed(pagedkv_table* handle, const int64_t* rows, int32_t n, const int32_t* q_lens, int32_t lookahead,
                       int64_t* blocks, int32_t* bad) noexcept nogil
cdef int step(pagedkv_table* handle, const int64_t* rows, int32_t n, const int32_t* q_lens, int32_t lookahead,
              pagedkv_step* out, int32_t* bad) noexcept nogil
cdef int copies_done(pagedkv_table* handle, const int32_t* copies, int32_t n) noexcept nogil
cdef int commit(pagedkv_table* handle, const int64_t* rows, int32_t n, int64_t number, int64_t* committed,
                int32_t* bad) noexcept nogil
cdef int cancel(pagedkv_table* handle, const int64_t* rows, int32_t n, int64_t number) noexcept nogil
cdef int row_fork(pagedkv_table* handle, int64_t row, int32_t n, int64_t* forks) noexcept nogil
cdef int truncate(pagedkv_table* handle, int64_t row, int32_t num_tokens) noexcept nogil
cdef int row_release(pagedkv_table* handle, int64_t row, int keep_remainder) noexcept nogil
cdef int row_state(pagedkv_table* handle, int64_t row, pagedkv_row* state) noexcept nogil
cdef int row_tokens(pagedkv_table* handle, int64_t row, int32_t* tokens, int64_t room, int64_t* num) noexcept nogil
cdef int row_blocks(pagedkv_table* handle, int64_t row, int32_t* blocks, int64_t room, int64_t* num) noexcept nogil
