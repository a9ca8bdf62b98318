# The calls of pagedkv.h on blocks and prefixes: none needs the GIL.
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagedkv._core.c_api.header cimport pagedkv_counts, pagedkv_found, pagedkv_move, pagedkv_placement, pagedkv_pool

cdef int pool_take(pagedkv_pool* handle, int32_t n, int32_t* ids) noexcept nogil
cdef int pool_share(pagedkv_pool* handle, const int32_t* ids, int32_t n, int32_t* bad) noexcept nogil
cdef int pool_give(pagedkv_pool* handle, const int32_t* ids, int32_t n, int32_t* bad) noexcept nogil
cdef int pool_counts(pagedkv_pool* handle, pagedkv_counts* counts) noexcept nogil
cdef int match(pagedkv_placement* handle, int64_t named, const int32_t* tokens, int64_t n, int32_t* blocks, uint8_t* tiers,
               int64_t room, int64_t* num) noexcept nogil
cdef int acquire(pagedkv_placement* handle, int64_t named, const int32_t* tokens, int64_t n, int64_t max_blocks, int64_t* owner,
                 pagedkv_found* found) noexcept nogil
cdef int promote(pagedkv_placement* handle, int64_t owner, int32_t* started, int64_t* needed) noexcept nogil
cdef int settle(pagedkv_placement* handle, int64_t owner, int32_t* num_blocks) noexcept nogil
cdef int path(pagedkv_placement* handle, int64_t owner, int32_t* blocks, uint8_t* tiers, int64_t room,
              int64_t* num) noexcept nogil
cdef int release(pagedkv_placement* handle, int64_t owner) noexcept nogil
cdef int reserve(pagedkv_placement* handle, int32_t tier, int32_t n, int64_t* missing) noexcept nogil
cdef int take_moves(pagedkv_placement* handle, pagedkv_move* moves, int32_t room, int32_t* num) noexcept nogil
cdef int complete(pagedkv_placement* handle, const int64_t* transfers, const uint8_t* outcomes, int32_t n,
                  int32_t* bad) noexcept nogil
cdef int in_flight(pagedkv_placement* handle, int64_t* num) noexcept nogil
cdef int allocate(pagedkv_placement* handle, int32_t n, int32_t* ids) noexcept nogil
cdef int insert(pagedkv_placement* handle, int64_t owner, const int32_t* tokens, int32_t* blocks, int32_t n, int32_t* done,
                int32_t* bad) noexcept nogil
