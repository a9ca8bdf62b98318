"""Write-behind: runs are copied to a closed tier while they stay where they are.

A ring holds what is to be copied. What its tier lacks of a run's path goes before it, so the tier stays closed, and what is
written first is of use without what comes later.
"""

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t
from libc.stdlib cimport malloc, free
from libc.string cimport memset

from pagedkv._core.block_pool cimport pool_available
from pagedkv._core.place cimport WRITE_ALL, WRITE_NEVER, WRITE_REUSED, Place, Wanted, Write
from pagedkv._core.point_copies cimport copy_point, lacks_point
from pagedkv._core.radix_tree cimport node_top
from pagedkv._core.recency cimport is_owned, pick_victim
from pagedkv._core.sends cimport want_send
from pagedkv._core.transfers cimport UNDER_WAY, copy_path, lacking, make_room_behind, quota_left, start
from pagedkv._core.types cimport ASKED, MAX_GROUPS, NIL, OK, WANTED, Reason
from pagedkv.threads.pthread cimport pthread_cond_signal


cdef bint ring_grow(Place* p) noexcept nogil:
    cdef int64_t i, capacity = 2 * p.wanted_capacity if p.wanted_capacity else 64
    cdef Wanted* grown = <Wanted*>malloc(capacity * sizeof(Wanted))
    if grown == NULL:
        return False
    for i in range(p.num_wanted):
        grown[i] = p.wanted[(p.wanted_head + i) % p.wanted_capacity]
    free(p.wanted)
    p.wanted, p.wanted_capacity, p.wanted_head = grown, capacity, 0
    return True


cdef void want(Place* p, int32_t n, int32_t tier, int32_t left=0) noexcept nogil:
    cdef Wanted* entry
    if (p.fates[n].wanted >> tier) & 1 or (p.num_wanted == p.wanted_capacity and not ring_grow(p)):
        return                                      # without memory it is not copied before it is evicted
    entry = &p.wanted[(p.wanted_head + p.num_wanted) % p.wanted_capacity]
    entry.node, entry.generation, entry.tier, entry.left = n, p.tree.nodes[n].generation, tier, left
    p.fates[n].wanted |= <uint8_t>(1 << tier)
    p.num_wanted += 1
    if p.decided != NULL:                           # as for a move: who carries them out decides
        pthread_cond_signal(p.decided)


cdef void want_where(Place* p, int32_t n, Write least) noexcept nogil:
    cdef int32_t tier
    for tier in range(1, p.num_tiers):
        if p.closed[tier] and p.writes[tier] >= least and node_top(p.tree, n) < tier and is_worth(p, n, tier):
            want(p, n, tier)


# Whether `tier` could have more of a path that ends with n.
cdef inline bint is_worth(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return lacks_point(p, n, tier) if p.groups != NULL else not (p.tree.nodes[n].tiers >> tier) & 1


cdef void want_reused(Place* p, int32_t n) noexcept nogil:
    p.fates[n].matched = 1
    want_where(p, n, WRITE_REUSED)                  # and its path
    want_send(p, n, WRITE_REUSED)


cdef void want_found(Place* p, int32_t n) noexcept nogil:
    if p.tree.nodes[n].length > 0:
        want_reused(p, n)
        n = p.tree.nodes[n].parent
    while p.tree.nodes[n].length > 0 and not p.fates[n].matched:
        p.fates[n].matched = 1
        n = p.tree.nodes[n].parent


cdef void want_committed(Place* p, int32_t n) noexcept nogil:
    want_where(p, n, WRITE_ALL)
    want_send(p, n, WRITE_ALL)


cdef void want_copy(Place* p, int32_t n, int32_t tier) noexcept nogil:
    if p.closed[tier] and p.writes[tier] != WRITE_NEVER:
        want(p, n, tier)


# Copies what `tier` lacks of the path that ends with n, and n itself where its copy there is bad. Blocks; UNDER_WAY to be
# asked again; 0 if there is nothing to copy or no room.
cdef int64_t copy_one(Place* p, int32_t n, int32_t tier, int32_t most, Reason reason) noexcept nogil:
    cdef int64_t group = -1, num_moves
    cdef int64_t more[MAX_GROUPS]
    cdef int32_t missing, room
    cdef bint again = (p.fates[n].spoilt >> tier) & 1 and not p.fates[n].failed
    if p.fates[n].failed or p.fates[p.tree.nodes[n].root].failed:
        return 0
    if again and (p.fates[n].copying >= 0 or p.fates[n].transfer >= 0 or node_top(p.tree, n) == tier):
        return UNDER_WAY if node_top(p.tree, n) != tier else 0
    if p.groups != NULL and not again:
        return copy_point(p, n, tier, most, reason, INT64_MAX)
    missing = p.tree.nodes[n].length if again else lacking(p, n, tier)
    if missing <= 0:
        return UNDER_WAY if missing == UNDER_WAY else 0
    if missing > most and not again:
        missing = most
    memset(more, 0, sizeof(more))
    more[0] = missing
    if not make_room_behind(p, n, tier, more, INT64_MAX):
        return 0
    if p.fates[n].copying >= 0:
        return UNDER_WAY                            # what went from there takes along a copy of it
    room = min(pool_available(p.pools[tier]), <int32_t>min(quota_left(p, n, tier), <int64_t>INT32_MAX))
    if room < missing:
        if again or room <= 0:
            return 0
        missing = room
    if again:
        return missing if start(p, n, node_top(p.tree, n), tier, True, -1, reason) == OK else 0
    num_moves = p.num_moves
    copy_path(p, n, tier, missing, reason, &group)
    return p.num_moves - num_moves if group >= 0 else UNDER_WAY


# As lacking; a tail that lacks counts as one block more.
cdef int32_t lacking_with_tail(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t blocks = lacking(p, n, tier)
    return blocks + (blocks >= 0 and p.groups != NULL and lacks_point(p, n, tier))


cdef int64_t copy_wanted(Place* p, int32_t most) noexcept nogil:
    cdef int64_t started = 0, count = p.num_wanted, now
    cdef int32_t tier, before
    cdef Wanted entry
    if p.num_copying or p.num_wanted == 0:
        return 0
    for tier in range(1, p.num_tiers):
        if p.closed[tier] and p.num_reading[tier]:
            return 0                                # a request waits for it
    p.batch = p.num_started
    for _ in range(count):
        if started >= most:
            break
        entry = p.wanted[p.wanted_head]
        p.wanted_head = (p.wanted_head + 1) % p.wanted_capacity
        p.num_wanted -= 1
        if p.tree.nodes[entry.node].root == NIL or p.tree.nodes[entry.node].generation != entry.generation:
            continue
        p.fates[entry.node].wanted &= <uint8_t>~(1 << entry.tier)
        before = lacking_with_tail(p, entry.node, entry.tier)
        if 0 < entry.left <= before:                # nothing that was started has arrived: wanted no more
            continue
        now = copy_one(p, entry.node, entry.tier, <int32_t>(most - started), WANTED)
        if now == UNDER_WAY:                        # room in the ring is there
            want(p, entry.node, entry.tier, entry.left)
        elif now > 0 and lacks_more(p, entry.node, entry.tier):
            want(p, entry.node, entry.tier, before)
        if now > 0:
            started += now
    p.batch = NO_BATCH
    return started


# Whether something of the path that ends with n is neither in `tier` nor on its way there.
cdef bint lacks_more(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return is_worth(p, n, tier) and p.fates[n].copying < 0


cdef int64_t copy_asked(Place* p, int32_t n, int32_t tier, int32_t most) noexcept nogil:
    cdef int32_t limit, missing, coldest
    missing = lacking(p, n, tier)
    if p.groups != NULL:
        return copy_point(p, n, tier, most, ASKED, INT64_MAX if in_use(p, n) else p.fates[n].point)
    if missing <= 0:
        return missing
    missing = min(missing, most)
    if pool_available(p.pools[tier]) < missing:
        coldest = pick_victim(p, tier, -1, False, &limit)
        if coldest == NIL or (p.fates[coldest].last_use >= p.fates[n].last_use and not in_use(p, n)):
            most = min(most, pool_available(p.pools[tier]))     # what is there was used later
    return copy_one(p, n, tier, most, ASKED) if most > 0 else 0


cdef bint in_use(Place* p, int32_t n) noexcept nogil:
    return is_owned(p, n, node_top(p.tree, n))
