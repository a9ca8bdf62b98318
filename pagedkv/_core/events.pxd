# KV events in a ring of int32 words: written without Python, drained as Python objects. The oldest are
# lost first, counted.
#
# record: [words, kind, tier, root, generation of the root, num_blocks, parent_block, depth, num_tokens, num_hashes,
#          parent hash (2 words, the lower first), ids ..., hashes (2 words each) ..., tokens ...]
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef enum EventKind:
    EVENT_STORED = 0
    EVENT_REMOVED = 1
    EVENT_CLEARED = 2
    EVENT_RESUMABLE = 3
    EVENT_NOT_RESUMABLE = 4

cdef struct Ring:
    int32_t* words          # [capacity], NULL when events are off
    int64_t capacity        # a power of two
    int64_t head            # first word of the oldest record; head and tail only grow
    int64_t tail
    int64_t num_lost

cdef int ring_open(Ring* r, int64_t capacity) noexcept nogil
cdef void ring_close(Ring* r) noexcept nogil
# `hashes`: [num_blocks], or NULL where the tree keeps none.
cdef void ring_put(Ring* r, int32_t kind, int32_t tier, int32_t root, int32_t generation, int32_t parent_block, int32_t depth,
                   const int32_t* ids, int32_t num_blocks, const uint64_t* hashes, uint64_t parent_hash,
                   const int32_t* tokens, int32_t num_tokens) noexcept nogil
# Records as KVEvents. `names`: of namespaces, by handle.
cdef list ring_decode(object words, object names)
