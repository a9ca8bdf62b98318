"""Blocks and prefixes for C: argument checks, the mutex, the core."""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memmove

from pagedkv._core.block_pool cimport Pool, pool_alloc, pool_available, pool_free, pool_incref
from pagedkv._core.c_api.header cimport (
    PAGEDKV_ARRIVED, PAGEDKV_E_ARGUMENT, PAGEDKV_E_MEMORY, PAGEDKV_E_RANGE, PAGEDKV_E_ROOM, PAGEDKV_E_STALE, PAGEDKV_E_STATE,
    PAGEDKV_NOT_TRIED, PAGEDKV_OK,
)
from pagedkv._core.c_api.inside cimport enter, enter_pool, leave, leave_pool, place_of
from pagedkv._core.owners cimport place_blocks, place_owner, place_release
from pagedkv._core.place cimport Place
from pagedkv._core.placement cimport Found, Placement
from pagedkv._core.radix_tree cimport tree_named
from pagedkv._core.transfers cimport finish_as, is_not_taken
from pagedkv._core.types cimport E_MEMORY, NIL, Move, handle_slot, make_handle


cdef enum:
    MOST_TOKENS = 1 << 30


# ---- blocks

cdef int pool_take(pagedkv_pool* handle, int32_t n, int32_t* ids) noexcept nogil:
    cdef Pool* p
    cdef int code
    if handle == NULL or n < 0 or (n > 0 and ids == NULL):
        return PAGEDKV_E_ARGUMENT
    p = enter_pool(handle)
    code = pool_alloc(p, n, ids)
    leave_pool(handle)
    return code


ctypedef int (*Recount)(Pool*, const int32_t*, int32_t, int32_t*) noexcept nogil


# One reference more, or less, for each of ids [n].
cdef inline int recounted(pagedkv_pool* handle, const int32_t* ids, int32_t n, int32_t* bad, Recount recount) noexcept nogil:
    cdef int32_t at = 0
    cdef int code
    if handle == NULL or n < 0 or (n > 0 and ids == NULL):
        return PAGEDKV_E_ARGUMENT
    code = recount(enter_pool(handle), ids, n, &at)
    leave_pool(handle)
    if bad != NULL:
        bad[0] = at
    return code


cdef int pool_share(pagedkv_pool* handle, const int32_t* ids, int32_t n, int32_t* bad) noexcept nogil:
    return recounted(handle, ids, n, bad, pool_incref)


cdef int pool_give(pagedkv_pool* handle, const int32_t* ids, int32_t n, int32_t* bad) noexcept nogil:
    return recounted(handle, ids, n, bad, pool_free)


cdef int pool_counts(pagedkv_pool* handle, pagedkv_counts* counts) noexcept nogil:
    cdef Pool* p
    if handle == NULL or counts == NULL:
        return PAGEDKV_E_ARGUMENT
    p = enter_pool(handle)
    counts.capacity, counts.max, counts.cached = p.capacity, p.max_capacity, p.num_cached
    counts.free = p.num_stack + p.capacity - p.fresh
    counts.live = counts.capacity - counts.free - counts.cached
    counts.available = pool_available(p)
    leave_pool(handle)
    return PAGEDKV_OK


# ---- prefixes

cdef int match(pagedkv_placement* handle, int64_t named, const int32_t* tokens, int64_t n, int32_t* blocks, uint8_t* tiers,
               int64_t room, int64_t* num) noexcept nogil:
    cdef Place* p
    cdef int32_t root, at = NIL, k = 0
    cdef int64_t total, found = 0
    cdef int code = PAGEDKV_OK
    cdef int32_t* ids
    cdef uint8_t* tops
    if (handle == NULL or n < 0 or n > MOST_TOKENS or (n > 0 and tokens == NULL) or room < 0
            or (room > 0 and (blocks == NULL or tiers == NULL)) or num == NULL):
        return PAGEDKV_E_ARGUMENT
    p = place_of(handle)
    total = n // p.tree.block_size
    ids, tops = blocks, tiers
    if room < total:                                # it may be enough all the same
        ids = <int32_t*>malloc(total * (sizeof(int32_t) + 1))
        if ids == NULL:
            return PAGEDKV_E_MEMORY
        tops = <uint8_t*>(ids + total)
    enter(handle)
    root = tree_named(p.tree, named)
    if root != NIL:
        found = (<Placement><void*>handle).match_in(root, tokens, total, ids, tops, &at, &k)
    leave(handle)
    num[0] = found
    if root == NIL:
        code = PAGEDKV_E_RANGE
    elif found > room:
        code = PAGEDKV_E_ROOM
    if ids != blocks:
        if code == PAGEDKV_OK:
            memmove(blocks, ids, found * sizeof(int32_t))
            memmove(tiers, tops, found)
        free(ids)
    return code


cdef int acquire(pagedkv_placement* handle, int64_t named, const int32_t* tokens, int64_t n, int64_t max_blocks, int64_t* owner,
                 pagedkv_found* found) noexcept nogil:
    cdef Found seen
    cdef Place* p
    cdef int32_t root, slot = NIL
    if (handle == NULL or n < 0 or n > MOST_TOKENS or (n > 0 and tokens == NULL) or max_blocks < NIL or owner == NULL):
        return PAGEDKV_E_ARGUMENT
    p = enter(handle)
    root = tree_named(p.tree, named)
    if root != NIL:
        slot = (<Placement><void*>handle).acquire_in(root, tokens, n, max_blocks, True, &seen)
    if slot >= 0:
        owner[0] = make_handle(slot, p.owners[slot].generation)
    leave(handle)
    if root == NIL:
        return PAGEDKV_E_RANGE
    if slot < 0:
        return PAGEDKV_E_MEMORY
    if found != NULL:
        found.num_blocks, found.num_cold, found.blocked = seen.num_blocks, seen.num_cold, seen.blocked
    return PAGEDKV_OK


cdef int promote(pagedkv_placement* handle, int64_t owner, int32_t* started, int64_t* needed) noexcept nogil:
    cdef Place* p
    cdef int32_t slot
    cdef int code = PAGEDKV_E_STALE
    if handle == NULL or started == NULL or needed == NULL:
        return PAGEDKV_E_ARGUMENT
    started[0] = 0
    p = enter(handle)
    slot = place_owner(p, owner)
    if slot >= 0:
        code = (<Placement><void*>handle).promote_in(slot, 0, started, needed)
    leave(handle)
    return code


cdef int settle(pagedkv_placement* handle, int64_t owner, int32_t* num_blocks) noexcept nogil:
    cdef Place* p
    cdef int32_t slot
    if handle == NULL or num_blocks == NULL:
        return PAGEDKV_E_ARGUMENT
    p = enter(handle)
    slot = place_owner(p, owner)
    if slot >= 0:
        num_blocks[0] = (<Placement><void*>handle).settle_in(slot)
    leave(handle)
    return PAGEDKV_OK if slot >= 0 else PAGEDKV_E_STALE


cdef int path(pagedkv_placement* handle, int64_t owner, int32_t* blocks, uint8_t* tiers, int64_t room,
              int64_t* num) noexcept nogil:
    cdef Place* p
    cdef int32_t slot
    cdef int code = PAGEDKV_OK
    if handle == NULL or room < 0 or (room > 0 and (blocks == NULL or tiers == NULL)) or num == NULL:
        return PAGEDKV_E_ARGUMENT
    p = enter(handle)
    slot = place_owner(p, owner)
    if slot < 0:
        code = PAGEDKV_E_STALE
    else:
        num[0] = p.owners[slot].num_blocks
        if num[0] > room:
            code = PAGEDKV_E_ROOM
        else:
            place_blocks(p, slot, blocks)
            (<Placement><void*>handle).tiers_in(slot, tiers)
    leave(handle)
    return code


cdef int release(pagedkv_placement* handle, int64_t owner) noexcept nogil:
    cdef Place* p
    cdef int32_t slot
    if handle == NULL:
        return PAGEDKV_E_ARGUMENT
    p = enter(handle)
    slot = place_owner(p, owner)
    if slot >= 0:
        place_release(p, slot)
    leave(handle)
    return PAGEDKV_OK if slot >= 0 else PAGEDKV_E_STALE


# ---- room and moves

cdef int reserve(pagedkv_placement* handle, int32_t tier, int32_t n, int64_t* missing) noexcept nogil:
    cdef Place* p
    cdef int64_t short
    if handle == NULL or n < 0 or missing == NULL:
        return PAGEDKV_E_ARGUMENT
    p = place_of(handle)
    if tier < 0 or tier >= p.num_tiers or p.pools[tier] == NULL:
        return PAGEDKV_E_RANGE
    enter(handle)
    short = max(0, n - <int64_t>pool_available(p.pools[tier]))
    if short > 0:
        short = (<Placement><void*>handle).reserve_in(tier, n)
    leave(handle)
    if short == E_MEMORY:
        return PAGEDKV_E_MEMORY
    missing[0] = short
    return PAGEDKV_OK


cdef int take_moves(pagedkv_placement* handle, pagedkv_move* moves, int32_t room, int32_t* num) noexcept nogil:
    cdef Place* p
    cdef Move* decided
    cdef int64_t i, last = 0, taken = 0
    if handle == NULL or room < 0 or (room > 0 and moves == NULL) or num == NULL:
        return PAGEDKV_E_ARGUMENT
    p = enter(handle)
    while taken < p.num_moves:                      # a transfer's moves follow one another
        last = taken
        while last < p.num_moves and p.moves[last].transfer == p.moves[taken].transfer:
            last += 1
        if last > room:
            break
        taken = last
    for i in range(taken):
        decided = &p.moves[i]
        moves[i].transfer, moves[i].depth = decided.transfer, decided.depth
        moves[i].src_block, moves[i].dst_block = decided.src_block, decided.dst_block
        moves[i].src_tier, moves[i].dst_tier, moves[i].reason = decided.src_tier, decided.dst_tier, decided.reason
        moves[i].reserved = 0
    p.num_moves -= taken
    if taken > 0 and p.num_moves > 0:
        memmove(p.moves, p.moves + taken, p.num_moves * sizeof(Move))
    leave(handle)
    num[0] = <int32_t>(taken if taken > 0 else last)
    return PAGEDKV_OK if taken > 0 or last == 0 else PAGEDKV_E_ROOM


cdef struct End:                                    # of a transfer, or of one of its blocks
    int64_t transfer
    int64_t when                                    # it is told of
    int32_t at                                      # entry of the caller's arrays
    bint arrived
    bint tried


cdef int by_transfer(const void* a, const void* b) noexcept nogil:
    cdef const End* one = <const End*>a
    cdef const End* other = <const End*>b
    if one.transfer != other.transfer:
        return 1 if one.transfer > other.transfer else -1
    return 1 if one.at > other.at else -1


cdef int by_time(const void* a, const void* b) noexcept nogil:
    cdef const End* one = <const End*>a
    cdef const End* other = <const End*>b
    if one.when != other.when:
        return 1 if one.when > other.when else -1
    return 1 if one.at > other.at else -1


# Entries for the same transfer become one. How many are left; they end in the caller's order, or by their numbers where
# entries for a transfer lie apart.
cdef int32_t join_ends(End* ends, int32_t n) noexcept nogil:
    cdef int32_t i, j, num = 0, length
    cdef bint apart = False
    qsort(ends, n, sizeof(End), by_transfer)
    i = 0
    while i < n:
        ends[num] = ends[i]
        length = 1
        for j in range(i + 1, n):
            if ends[j].transfer != ends[num].transfer:
                break
            apart = apart or ends[j].at != ends[num].at + length
            ends[num].arrived = ends[num].arrived and ends[j].arrived
            ends[num].tried = ends[num].tried or ends[j].tried
            length += 1
        num += 1
        i += length
    if not apart:
        for i in range(num):
            ends[i].when = ends[i].at
        qsort(ends, num, sizeof(End), by_time)
    return num


cdef int complete(pagedkv_placement* handle, const int64_t* transfers, const uint8_t* outcomes, int32_t n,
                  int32_t* bad) noexcept nogil:
    cdef Place* p
    cdef End* ends
    cdef int32_t i, num, slot
    cdef int code = PAGEDKV_OK
    if handle == NULL or n < 0 or (n > 0 and (transfers == NULL or outcomes == NULL)):
        return PAGEDKV_E_ARGUMENT
    for i in range(n):
        if outcomes[i] > PAGEDKV_NOT_TRIED:
            if bad != NULL:
                bad[0] = i
            return PAGEDKV_E_ARGUMENT
    ends = <End*>malloc(max(1, n) * sizeof(End))
    if ends == NULL:
        return PAGEDKV_E_MEMORY
    for i in range(n):
        ends[i].transfer, ends[i].at, ends[i].when = transfers[i], i, 0
        ends[i].arrived, ends[i].tried = outcomes[i] == PAGEDKV_ARRIVED, outcomes[i] != PAGEDKV_NOT_TRIED
    num = join_ends(ends, n)
    p = enter(handle)
    for i in range(num):
        slot = handle_slot(ends[i].transfer)
        if (slot < 0 or slot >= p.transfers_capacity or p.transfers[slot].node == NIL
                or p.transfers[slot].id != ends[i].transfer):
            code = PAGEDKV_E_STALE
        elif is_not_taken(p, ends[i].transfer):
            code = PAGEDKV_E_STATE
        if code != PAGEDKV_OK:
            if bad != NULL:
                bad[0] = ends[i].at
            break
        if p.closed[p.coldest]:                     # parents arrive before their children
            ends[i].when = p.transfers[slot].number
    if code == PAGEDKV_OK:
        if p.closed[p.coldest]:
            qsort(ends, num, sizeof(End), by_time)
        for i in range(num):
            finish_as(p, ends[i].transfer, ends[i].arrived, ends[i].tried)
    leave(handle)
    free(ends)
    return code


cdef int in_flight(pagedkv_placement* handle, int64_t* num) noexcept nogil:
    cdef Place* p
    if handle == NULL or num == NULL:
        return PAGEDKV_E_ARGUMENT
    p = enter(handle)
    num[0] = p.in_flight
    leave(handle)
    return PAGEDKV_OK


# ---- for engines without a table

cdef int allocate(pagedkv_placement* handle, int32_t n, int32_t* ids) noexcept nogil:
    cdef int code
    if handle == NULL or n < 0 or (n > 0 and ids == NULL):
        return PAGEDKV_E_ARGUMENT
    enter(handle)
    code = (<Placement><void*>handle).allocate_in(n, ids)
    leave(handle)
    return code


cdef int insert(pagedkv_placement* handle, int64_t owner, const int32_t* tokens, int32_t* blocks, int32_t n, int32_t* done,
                int32_t* bad) noexcept nogil:
    cdef Place* p
    cdef int32_t slot, at = NIL
    if handle == NULL or n < 0 or (n > 0 and (tokens == NULL or blocks == NULL)) or done == NULL:
        return PAGEDKV_E_ARGUMENT
    p = enter(handle)
    slot = place_owner(p, owner)
    if slot >= 0:
        done[0] = (<Placement><void*>handle).insert_in(slot, tokens, blocks, n, &at)
    leave(handle)
    if at >= 0 and bad != NULL:
        bad[0] = at
    return PAGEDKV_E_STALE if slot < 0 else PAGEDKV_OK if at < 0 else PAGEDKV_E_STATE
