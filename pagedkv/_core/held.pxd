# What a call of the cache holds of the core, as objects that let go of it when they die. A number that a function returns
# is lost when an exception comes before it is stored; an object is not.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.block_table cimport BlockTable
from pagedkv._core.dispatch cimport Dispatch
from pagedkv._core.placement cimport Placement

cdef class Hold:                    # an owner of a prefix
    cdef readonly Placement placement
    cdef readonly int64_t handle    # -1: nothing any more
    cdef readonly int32_t num_blocks    # that it owned at first
    cdef readonly int32_t num_cold      # of those, below the device
    cdef readonly bint cold_tail        # pages of short groups of layers that it needs lie below the device
    cdef readonly int32_t partial_tier      # of the block that a partial hit would copy from; -1: none
    cdef readonly int32_t partial_tokens    # of it, that agree
    cdef readonly int64_t blocked       # the transfer that ended its match early, or -1

cdef class HeldRow:                 # a row of a block table
    cdef readonly BlockTable table
    cdef readonly int64_t handle    # -1: released

cdef class Holder:                  # a short holder of blocks, for callers without room
    cdef Dispatch dispatch
    cdef bint counts
