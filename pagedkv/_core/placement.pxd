# What stays where. Joins one RadixTree with one BlockPool per tier under one mutex; emits Moves and moves nothing.
#
# Compiled rooms (block_table, another Cython runtime) work on `place` with the nogil functions of owners.pxd,
# insertion.pxd and transfers.pxd while they hold `lock`; afterwards there may be moves to take.
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagedkv._core.lock cimport Lock
from pagedkv._core.place cimport Groups, Place
from pagedkv._core.radix_tree cimport RadixTree

cdef struct Found:              # of a match
    int32_t num_blocks          # owned
    int32_t num_cold            # of those, below the device
    bint cold_tail              # pages of short groups that it needs lie below the device
    int32_t partial_tier        # of the block behind them that begins as the next tokens do, or NIL: none, or one tier alone
    int32_t partial_tokens      # of it, that agree
    int64_t blocked             # id of the transfer that ended it early, or -1

cdef class Placement:
    cdef Place place
    cdef Groups groups
    cdef readonly tuple short_pools
    cdef readonly RadixTree tree
    cdef readonly tuple pools
    cdef Lock lock
    cdef str policy_name
    cdef object __weakref__
    cdef int64_t match_in(self, int32_t root, const int32_t* data, int64_t total, int32_t* ids, uint8_t* tops, int32_t* at,
                          int32_t* k) noexcept nogil
    cdef int32_t acquire_in(self, int32_t root, const int32_t* data, int64_t size, int64_t limit, bint comes,
                            Found* found) noexcept nogil
    cdef int32_t insert_in(self, int32_t slot, const int32_t* data, int32_t* given, int32_t num_blocks,
                           int32_t* bad) noexcept nogil
    cdef void tiers_in(self, int32_t slot, uint8_t* tiers) noexcept nogil
    cdef int64_t reserve_in(self, int32_t tier, int64_t wanted) noexcept nogil
    cdef int allocate_in(self, int32_t wanted, int32_t* ids) noexcept nogil
    cdef int promote_in(self, int32_t slot, int64_t until, int32_t* started, int64_t* needed) noexcept nogil
    cdef int32_t settle_in(self, int32_t slot) noexcept nogil
    cdef int64_t acquire_into(self, tokens, namespace, max_blocks, bint comes, Found* found) except? -1
    cdef void _find_partial(self, int32_t n, const int32_t* tokens, int64_t num_tokens, Found* found) noexcept nogil
    cdef int64_t partial_into(self, int64_t handle, tokens, bint below, int32_t* at, int32_t* agree) except? -1
    cdef int _open_groups(self, groups, int32_t point_every) except -1
    cdef object _path(self, owner, bint tiers)
    cdef int32_t insert_spine(self, owner, tokens, blocks) except -1
    cdef object _for_groups(self, more)
    cdef void _count_cold(self, int32_t slot, int64_t* more) noexcept nogil
    cdef int32_t _node(self, node) except -1
    cdef int64_t _handle(self, owner) except? -1
    cdef object _stale(self, int64_t handle)
    cdef object when_decided(self, ids)
    cdef int64_t unsent_into(self, int32_t most, int32_t* first, int32_t* node, int32_t* num_blocks) except? -1
    cdef object _names(self)
    cdef tuple _pages_input(self, pages, int64_t num_blocks, int32_t tier, int32_t** out)
