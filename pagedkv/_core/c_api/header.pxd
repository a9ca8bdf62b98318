# pagedkv.h, as far as Cython has to know it. The C compiler compares these types with the header's.
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t

cdef extern from "pagedkv.h" nogil:
    enum:
        PAGEDKV_ABI_MAJOR
        PAGEDKV_ABI_MINOR
        PAGEDKV_OK
        PAGEDKV_E_ARGUMENT
        PAGEDKV_E_MEMORY
        PAGEDKV_E_RANGE
        PAGEDKV_E_UNDERFLOW
        PAGEDKV_E_OVERFLOW
        PAGEDKV_E_STALE
        PAGEDKV_E_BLOCKS
        PAGEDKV_E_DUPLICATE
        PAGEDKV_E_STATE
        PAGEDKV_E_ROOM
        PAGEDKV_E_ROWS
        PAGEDKV_E_UNSUPPORTED
        PAGEDKV_ARRIVED
        PAGEDKV_NOT_TRIED
        PAGEDKV_MAX_TIERS

    ctypedef struct pagedkv_pool:
        pass
    ctypedef struct pagedkv_placement:
        pass
    ctypedef struct pagedkv_table:
        pass

    ctypedef struct pagedkv_options:
        int32_t block_size
        int32_t num_tiers
        int32_t* blocks
        const char* policy

    ctypedef struct pagedkv_counts:
        int64_t capacity
        int64_t max
        int64_t free
        int64_t live
        int64_t cached
        int64_t available

    ctypedef struct pagedkv_found:
        int32_t num_blocks
        int32_t num_cold
        int64_t blocked

    ctypedef struct pagedkv_move:
        int64_t transfer
        int32_t src_block
        int32_t dst_block
        int32_t depth
        int8_t src_tier
        int8_t dst_tier
        int8_t reason
        int8_t reserved

    ctypedef struct pagedkv_row:
        int32_t num_tokens
        int32_t num_computed
        int32_t num_blocks
        int32_t num_committed

    ctypedef struct pagedkv_step:
        int32_t* block_tables
        int64_t tables_room
        int64_t stride
        int32_t* seq_lens
        int32_t* q_indptr
        int32_t* positions
        int32_t* tokens
        int64_t* slot_mapping
        int64_t tokens_room
        int32_t* copies
        int64_t copies_room
        int64_t number
        int64_t num_tokens
        int64_t num_copies
        int64_t num_new_blocks
        int64_t width

    ctypedef struct pagedkv_api:
        int32_t abi_major
        int32_t abi_minor
        size_t size
        const char* (*describe)(int) noexcept
        int (*pool_new)(int32_t, int32_t, int32_t, pagedkv_pool**) noexcept
        int (*pool_of)(void*, pagedkv_pool**) noexcept
        void (*pool_delete)(pagedkv_pool*) noexcept
        int (*placement_new)(const pagedkv_options*, pagedkv_placement**) noexcept
        int (*placement_of)(void*, pagedkv_placement**) noexcept
        void (*placement_delete)(pagedkv_placement*) noexcept
        int (*placement_pool)(pagedkv_placement*, int32_t, pagedkv_pool**) noexcept
        int (*placement_namespace)(pagedkv_placement*, const void*, size_t, int64_t*) noexcept
        int (*table_new)(pagedkv_placement*, int32_t, pagedkv_table**) noexcept
        int (*table_of)(void*, pagedkv_table**) noexcept
        void (*table_delete)(pagedkv_table*) noexcept
        int (*pool_alloc)(pagedkv_pool*, int32_t, int32_t*) noexcept
        int (*pool_share)(pagedkv_pool*, const int32_t*, int32_t, int32_t*) noexcept
        int (*pool_free)(pagedkv_pool*, const int32_t*, int32_t, int32_t*) noexcept
        int (*pool_counts)(pagedkv_pool*, pagedkv_counts*) noexcept
        int (*placement_match)(pagedkv_placement*, int64_t, const int32_t*, int64_t, int32_t*, uint8_t*, int64_t,
                               int64_t*) noexcept
        int (*placement_acquire)(pagedkv_placement*, int64_t, const int32_t*, int64_t, int64_t, int64_t*,
                                 pagedkv_found*) noexcept
        int (*placement_promote)(pagedkv_placement*, int64_t, int32_t*, int64_t*) noexcept
        int (*placement_settle)(pagedkv_placement*, int64_t, int32_t*) noexcept
        int (*placement_path)(pagedkv_placement*, int64_t, int32_t*, uint8_t*, int64_t, int64_t*) noexcept
        int (*placement_release)(pagedkv_placement*, int64_t) noexcept
        int (*placement_reserve)(pagedkv_placement*, int32_t, int32_t, int64_t*) noexcept
        int (*placement_take_moves)(pagedkv_placement*, pagedkv_move*, int32_t, int32_t*) noexcept
        int (*placement_complete)(pagedkv_placement*, const int64_t*, const uint8_t*, int32_t, int32_t*) noexcept
        int (*placement_in_flight)(pagedkv_placement*, int64_t*) noexcept
        int (*placement_allocate)(pagedkv_placement*, int32_t, int32_t*) noexcept
        int (*placement_insert)(pagedkv_placement*, int64_t, const int32_t*, int32_t*, int32_t, int32_t*, int32_t*) noexcept
        int (*table_open)(pagedkv_table*, int64_t, const int32_t*, int64_t, int32_t, int64_t, int64_t*, int64_t*) noexcept
        int (*table_append)(pagedkv_table*, const int64_t*, const int32_t*, int32_t, int32_t*) noexcept
        int (*table_extend)(pagedkv_table*, int64_t, const int32_t*, int64_t) noexcept
        int (*table_blocks_needed)(pagedkv_table*, const int64_t*, int32_t, const int32_t*, int32_t, int64_t*,
                                   int32_t*) noexcept
        int (*table_step)(pagedkv_table*, const int64_t*, int32_t, const int32_t*, int32_t, pagedkv_step*, int32_t*) noexcept
        int (*table_copies_done)(pagedkv_table*, const int32_t*, int32_t) noexcept
        int (*table_commit)(pagedkv_table*, const int64_t*, int32_t, int64_t, int64_t*, int32_t*) noexcept
        int (*table_cancel)(pagedkv_table*, const int64_t*, int32_t, int64_t) noexcept
        int (*table_fork)(pagedkv_table*, int64_t, int32_t, int64_t*) noexcept
        int (*table_truncate)(pagedkv_table*, int64_t, int32_t) noexcept
        int (*table_release)(pagedkv_table*, int64_t, int) noexcept
        int (*table_row)(pagedkv_table*, int64_t, pagedkv_row*) noexcept
        int (*table_tokens)(pagedkv_table*, int64_t, int32_t*, int64_t, int64_t*) noexcept
        int (*table_blocks)(pagedkv_table*, int64_t, int32_t*, int64_t, int64_t*) noexcept
