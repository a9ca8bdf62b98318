# The words every room of the core shares: ids, tiers, and the codes that nogil functions return.
from libc.stdint cimport int32_t, int64_t

cdef enum:
    NIL = -1            # no block, no node, no row
    MAX_TIERS = 4       # DEVICE, HOST, DISK, REMOTE
    NO_TOKEN = -2147483648  # stands for the tokens that a partly filled block lacks: no token of a prompt is taken for it
    MAX_BLOCK_SIZE = 256    # tokens
    MAX_RUN = 256       # blocks in one tree node at most: bounds the cost of a split and the size of a transfer
    MAX_GROUPS = 4      # of layers that see equally far back; group 0 sees everything

cdef enum Tier:
    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

# What a nogil function returns when it could not do its work. Nothing has changed then.
cdef enum Code:
    OK = 0
    E_MEMORY = -2       # malloc failed
    E_RANGE = -3        # an id outside the pool, the table or the tree
    E_UNDERFLOW = -4    # a reference given back that was never taken
    E_OVERFLOW = -5     # a reference count would pass 2**31 - 1
    E_STALE = -6        # the generation in a handle is not the slot's generation
    E_BLOCKS = -7       # not enough free blocks
    E_DUPLICATE = -8    # the same row twice in one batch
    E_BUDGET = -9       # the pin budget would be passed
    E_STATE = -10       # not allowed in the object's present state

# A handle is a slot and the slot's generation: it cannot name what came into the slot later.
cdef inline int64_t make_handle(int32_t slot, int32_t generation) noexcept nogil:
    return (<int64_t>generation << 32) | slot

# -1 for what no make_handle made.
cdef inline int32_t handle_slot(int64_t handle) noexcept nogil:
    return <int32_t>(handle & 0x7FFFFFFF) if handle >= 0 and (handle >> 31) & 1 == 0 else -1

cdef inline int32_t handle_generation(int64_t handle) noexcept nogil:
    return <int32_t>(handle >> 32)

cdef enum:
    LAST_GENERATION = 0x7FFFFFFF

# A slot is given back. False: its generations are used up, and a handle of its first one would name what came into it next;
# then it is never used again.
cdef inline bint next_generation(int32_t* generation) noexcept nogil:
    if generation[0] == LAST_GENERATION:
        return False
    generation[0] += 1
    return True

# Why a run is written to a colder tier.
cdef enum Reason:
    EVICTED = 0         # it makes room, or what does so hangs on it
    WANTED = 1          # it was used again, or committed, and the tier's rule asks for a copy then
    ASKED = 2           # by a checkpoint

# What the mover is asked to do with one block; a transfer is a run of them that succeeds or fails together.
cdef packed struct Move:
    int64_t transfer
    int64_t group       # transfers that are of use together: a run behind the ancestors that its tier lacks. The first one's id
    signed char src_tier
    signed char dst_tier
    signed char reason
    signed char lane    # whose block it is: 0 of the spine, else the short group's page
    int32_t src_block
    int32_t dst_block
    int32_t node        # the prefix that it ends holds the block
    int32_t depth       # blocks of the prefix before this one
