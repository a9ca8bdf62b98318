"""The struct of function pointers behind ``pagedkv.h``, and the calls that need the GIL."""

from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.block_pool cimport BlockPool
from pagedkv._core.block_table cimport BlockTable
from pagedkv._core.c_api cimport prefixes, rows
from pagedkv._core.c_api.header cimport (
    PAGEDKV_ABI_MAJOR, PAGEDKV_ABI_MINOR, PAGEDKV_E_ARGUMENT, PAGEDKV_E_BLOCKS, PAGEDKV_E_DUPLICATE, PAGEDKV_E_MEMORY,
    PAGEDKV_E_OVERFLOW, PAGEDKV_E_RANGE, PAGEDKV_E_ROOM, PAGEDKV_E_ROWS, PAGEDKV_E_STALE, PAGEDKV_E_STATE,
    PAGEDKV_E_UNDERFLOW, PAGEDKV_E_UNSUPPORTED, PAGEDKV_MAX_TIERS, PAGEDKV_OK, pagedkv_api, pagedkv_options,
    pagedkv_placement, pagedkv_pool, pagedkv_table,
)
from pagedkv._core.placement cimport Placement
from pagedkv._core.radix_tree cimport RadixTree

from pagedkv._core.policies.registry import policy_needs_chain
from pagedkv.errors import InvalidArgument, PagedKVError, WrongType

cdef const char* describe(int code) noexcept nogil:
    if code == PAGEDKV_OK:
        return b"no error"
    if code == PAGEDKV_E_ARGUMENT:
        return b"an argument that is never allowed: NULL, a negative count, a value out of range, or another kind of object"
    if code == PAGEDKV_E_MEMORY:
        return b"out of memory"
    if code == PAGEDKV_E_RANGE:
        return b"no such block, tier, namespace or number of tokens"
    if code == PAGEDKV_E_UNDERFLOW:
        return b"a reference that the caller does not have, or the prefix tree's own"
    if code == PAGEDKV_E_OVERFLOW:
        return b"a block's reference count would pass 2**31 - 1"
    if code == PAGEDKV_E_STALE:
        return b"a handle that was given back, or a step that is over"
    if code == PAGEDKV_E_BLOCKS:
        return b"too few blocks: make room with placement_reserve, or release rows"
    if code == PAGEDKV_E_DUPLICATE:
        return b"the same row stands twice in one call"
    if code == PAGEDKV_E_STATE:
        return b"not possible in the present state: see the function in pagedkv.h"
    if code == PAGEDKV_E_ROOM:
        return b"an array of the caller is too short"
    if code == PAGEDKV_E_ROWS:
        return b"all rows of the table are in use: release rows, or make a larger table"
    if code == PAGEDKV_E_UNSUPPORTED:
        return b"an object with groups of layers, which pagedkv.h does not cover"
    return b"not a code of pagedkv"


# ---- objects: a handle is the address of a Python object, with a reference

# No exception leaves a call: a caller in C would take the handle for made.
cdef int code_of(error) noexcept:
    if isinstance(error, (PagedKVError, UnicodeDecodeError)):
        return PAGEDKV_E_ARGUMENT
    return PAGEDKV_E_MEMORY if isinstance(error, MemoryError) else PAGEDKV_E_STATE


cdef int code_for(object thing, type kind) noexcept:
    # Whether it may be handed out as such a handle.
    if type(thing) is not kind:
        return PAGEDKV_E_ARGUMENT
    if kind is BlockPool:
        return PAGEDKV_OK if (<BlockPool>thing).shared is None else PAGEDKV_E_UNSUPPORTED
    if kind is Placement:
        return PAGEDKV_OK if (<Placement>thing).place.groups == NULL else PAGEDKV_E_UNSUPPORTED
    return PAGEDKV_OK if (<BlockTable>thing).num_groups == 1 else PAGEDKV_E_UNSUPPORTED


cdef void* handed(object thing) noexcept:
    Py_INCREF(thing)
    return <void*>thing


cdef void let_go(void* handle) noexcept with gil:
    if handle != NULL:
        Py_DECREF(<object>handle)


cdef int pool_new(int32_t num_blocks, int32_t max_blocks, int32_t chunk, pagedkv_pool** pool) noexcept with gil:
    if pool == NULL:
        return PAGEDKV_E_ARGUMENT
    try:
        pool[0] = <pagedkv_pool*>handed(BlockPool(num_blocks, max_blocks=max_blocks, chunk=chunk))
    except BaseException as error:
        return code_of(error)
    return PAGEDKV_OK


cdef int pool_of(void* thing, pagedkv_pool** pool) noexcept with gil:
    cdef int code = PAGEDKV_E_ARGUMENT if thing == NULL or pool == NULL else code_for(<object>thing, BlockPool)
    if code == PAGEDKV_OK:
        pool[0] = <pagedkv_pool*>handed(<object>thing)
    return code


cdef void pool_delete(pagedkv_pool* pool) noexcept nogil:
    let_go(pool)


cdef int placement_new(const pagedkv_options* options, pagedkv_placement** placement) noexcept with gil:
    cdef int32_t tier
    if options == NULL or placement == NULL or not 1 <= options.num_tiers <= PAGEDKV_MAX_TIERS:
        return PAGEDKV_E_ARGUMENT
    try:
        policy = "lru" if options.policy == NULL else (<bytes>options.policy).decode()
        pools = []
        for tier in range(options.num_tiers):
            pools.append(BlockPool(options.blocks[tier]))
        tree = RadixTree(options.block_size, options.num_tiers, keep_chain=policy_needs_chain(policy))
        placement[0] = <pagedkv_placement*>handed(Placement(tree, pools, policy=policy))
    except BaseException as error:
        return code_of(error)
    return PAGEDKV_OK


cdef int placement_of(void* thing, pagedkv_placement** placement) noexcept with gil:
    cdef int code = PAGEDKV_E_ARGUMENT if thing == NULL or placement == NULL else code_for(<object>thing, Placement)
    if code == PAGEDKV_OK:
        placement[0] = <pagedkv_placement*>handed(<object>thing)
    return code


cdef void placement_delete(pagedkv_placement* placement) noexcept nogil:
    let_go(placement)


cdef int placement_pool(pagedkv_placement* placement, int32_t tier, pagedkv_pool** pool) noexcept with gil:
    if placement == NULL or pool == NULL:
        return PAGEDKV_E_ARGUMENT
    pools = (<Placement><void*>placement).pools
    if not 0 <= tier < len(pools) or pools[tier] is None:
        return PAGEDKV_E_RANGE
    pool[0] = <pagedkv_pool*>handed(pools[tier])
    return PAGEDKV_OK


cdef int placement_namespace(
    pagedkv_placement* placement, const void* name, size_t size, int64_t* ns
) noexcept with gil:
    if placement == NULL or ns == NULL or (size > 0 and name == NULL):
        return PAGEDKV_E_ARGUMENT
    try:
        ns[0] = (<Placement><void*>placement).tree.namespace((<const char*>name)[:size])
    except BaseException as error:
        return code_of(error)
    return PAGEDKV_OK


cdef int table_new(pagedkv_placement* placement, int32_t max_rows, pagedkv_table** table) noexcept with gil:
    if placement == NULL or table == NULL:
        return PAGEDKV_E_ARGUMENT
    try:
        made = BlockTable(<object><void*>placement, max_rows)
    except BaseException as error:
        return code_of(error)
    return table_of(<void*>made, table)             # a Placement with groups cannot have come here


cdef int table_of(void* thing, pagedkv_table** table) noexcept with gil:
    cdef int code = PAGEDKV_E_ARGUMENT if thing == NULL or table == NULL else code_for(<object>thing, BlockTable)
    if code == PAGEDKV_OK:
        table[0] = <pagedkv_table*>handed(<object>thing)
    return code


cdef void table_delete(pagedkv_table* table) noexcept nogil:
    let_go(table)


# ---- the struct

cdef pagedkv_api API

API.abi_major, API.abi_minor, API.size = PAGEDKV_ABI_MAJOR, PAGEDKV_ABI_MINOR, sizeof(pagedkv_api)
API.describe = describe
API.pool_new, API.pool_of, API.pool_delete = pool_new, pool_of, pool_delete
API.placement_new, API.placement_of, API.placement_delete = placement_new, placement_of, placement_delete
API.placement_pool, API.placement_namespace = placement_pool, placement_namespace
API.table_new, API.table_of, API.table_delete = table_new, table_of, table_delete
API.pool_alloc, API.pool_share, API.pool_free = prefixes.pool_take, prefixes.pool_share, prefixes.pool_give
API.pool_counts = prefixes.pool_counts
API.placement_match, API.placement_acquire = prefixes.match, prefixes.acquire
API.placement_promote, API.placement_settle = prefixes.promote, prefixes.settle
API.placement_path, API.placement_release = prefixes.path, prefixes.release
API.placement_reserve, API.placement_take_moves = prefixes.reserve, prefixes.take_moves
API.placement_complete, API.placement_in_flight = prefixes.complete, prefixes.in_flight
API.placement_allocate, API.placement_insert = prefixes.allocate, prefixes.insert
API.table_open, API.table_append, API.table_extend = rows.row_open, rows.append, rows.extend
API.table_blocks_needed, API.table_step = rows.blocks_needed, rows.step
API.table_copies_done, API.table_commit, API.table_cancel = rows.copies_done, rows.commit, rows.cancel
API.table_fork, API.table_truncate, API.table_release = rows.row_fork, rows.truncate, rows.row_release
API.table_row, API.table_tokens, API.table_blocks = rows.row_state, rows.row_tokens, rows.row_blocks

CAPSULE = PyCapsule_New(&API, "pagedkv._core.c_api.api.CAPSULE", NULL)
ADDRESS = <size_t>&API


def handle_of(thing):
    """The address that C and Numba take for a BlockPool, a Placement or a BlockTable.

    Raises
    ------
    WrongType, InvalidArgument
        Another object; one with groups of layers.
    """
    if type(thing) not in (BlockPool, Placement, BlockTable):
        raise WrongType(f"{type(thing).__name__} has no handle: a BlockPool, a Placement or a BlockTable is needed")
    if code_for(thing, type(thing)) != PAGEDKV_OK:
        raise InvalidArgument(f"{thing!r} has groups of layers, which pagedkv.h does not cover: call it from Python")
    return <size_t><void*>thing
