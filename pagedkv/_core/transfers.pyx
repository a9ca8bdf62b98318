"""Copies and transfers.

Making room in a tier, promoting runs, and what becomes of a transfer that succeeded or failed.

A transfer owns its source (one reference more) and its destination (the only reference) until `finish`. A block becomes
visible in the destination tier only there, and only on success.
"""
# Over 400 lines: begin, finish and give up of a transfer, whose counts only balance when they are read together.

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from pagedkv._core.block_pool cimport (
    COUNT, TREE, Pool, pool_alloc, pool_available, pool_cache, pool_drop_one, pool_uncache,
)
from pagedkv._core.events cimport EVENT_REMOVED
from pagedkv._core.links cimport coldest, is_linked
from pagedkv._core.place cimport EXPIRED, NUM_CLASSES, WRITE_NEVER, WRITE_REUSED, Fate, Place, Transfer
from pagedkv._core.radix_tree cimport Node, is_remainder, node_ids, node_top, tree_merge, tree_split, tree_trim
from pagedkv._core.recency cimport (
    child_left, end_moved, fate_split, is_owned, must_not_be_chosen, on_evict, pick_victim, place_ensure, queue_of,
    recency_link, recency_link_demoted, recency_unlink, set_top,
)
from pagedkv._core.retention cimport expiry_push, set_class
from pagedkv._core.group_room cimport drop_dead_end, evict_blocks, make_room_before
from pagedkv._core.tail_moves cimport finish_tail, unowned_pages
from pagedkv._core.tails cimport point_drop
from pagedkv._core.telling cimport event, event_hidden, event_stored
from pagedkv._core.types cimport (
    E_BLOCKS, E_MEMORY, E_STALE, EVICTED, MAX_GROUPS, NIL, OK, Move, Reason, handle_slot, make_handle, next_generation,
)
from pagedkv.threads.pthread cimport pthread_cond_signal


cdef int64_t* usage_of(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return &p.domains[p.domain_of[p.tree.nodes[n].root]].usage[tier]


cdef int32_t quota_of(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return p.domains[p.domain_of[p.tree.nodes[n].root]].quota[tier]


# Blocks that the namespace of run n may still have in `tier`; negative where its quota was lowered.
cdef int64_t quota_left(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t quota = quota_of(p, n, tier)
    return INT32_MAX if quota < 0 else quota - usage_of(p, n, tier)[0]


cdef void copy_own(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t i, length = p.tree.nodes[n].length
    cdef int32_t* ids = node_ids(p.tree, n, tier)
    cdef Pool* pool = p.pools[tier]
    assert pool.refs[ids[0]] == pool.refs[ids[length - 1]], "a run's blocks share their owners"
    if pool.refs[ids[0]] == (TREE | 1):
        pool_uncache(pool, ids, length)
    for i in range(length):
        pool.refs[ids[i]] += 1


cdef void copy_disown(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t i, length = p.tree.nodes[n].length
    cdef int32_t* ids = node_ids(p.tree, n, tier)
    cdef Pool* pool = p.pools[tier]
    assert pool.refs[ids[0]] & COUNT > 1 and pool.refs[ids[0]] & TREE, "only the tree owns this copy"
    for i in range(length):
        pool.refs[ids[i]] -= 1
    if pool.refs[ids[0]] == (TREE | 1):
        pool_cache(pool, ids, length)


cdef void copy_add(Place* p, int32_t n, int32_t tier, const int32_t* ids) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef int32_t i
    cdef Pool* pool = p.pools[tier]
    assert not (node.tiers >> tier) & 1, "the run has a copy there"
    memcpy(node_ids(p.tree, n, tier), ids, node.length * sizeof(int32_t))
    for i in range(node.length):
        pool.refs[ids[i]] |= TREE
    if pool.refs[ids[0]] == (TREE | 1):
        pool_cache(pool, ids, node.length)
    node.tiers |= <uint32_t>1 << tier
    p.fates[node.parent].below[tier] += 1
    p.size[tier][p.fates[n].queue[tier]] += node.length
    usage_of(p, n, tier)[0] += node.length
    event_stored(p, n, tier, 0)


# Frees the tree's blocks [first, length) of the copy in `tier`; the node's own fields are left to the caller.
cdef void copy_free(Place* p, int32_t n, int32_t tier, int32_t first) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef int32_t i
    cdef Pool* pool = p.pools[tier]
    cdef int32_t* ids = node_ids(p.tree, n, tier)
    assert pool.refs[ids[first]] == (TREE | 1), "blocks that the tree gives up have an owner"
    event(p, EVENT_REMOVED, n, tier, first, node.length - first)
    pool_uncache(pool, ids + first, node.length - first)
    for i in range(first, node.length):
        pool.refs[ids[i]] &= COUNT
        pool_drop_one(pool, ids[i])
    p.size[tier][p.fates[n].queue[tier]] -= node.length - first
    usage_of(p, n, tier)[0] -= node.length - first


# One child fewer of `parent` is in `tier` or on its way there.
cdef void left_below(Place* p, int32_t parent, int32_t tier) noexcept nogil:
    p.fates[parent].below[tier] -= 1
    if p.closed[tier] and p.fates[parent].below[tier] == 0:
        child_left(p, parent)


cdef void copy_remove(Place* p, int32_t n, int32_t tier) noexcept nogil:
    assert not p.closed[tier] or p.fates[n].below[tier] == 0, "a copy leaves a closed tier after those behind it"
    recency_unlink(p, tier, n)
    copy_free(p, n, tier, 0)
    p.tree.nodes[n].tiers &= ~(<uint32_t>1 << tier)
    p.fates[n].spoilt &= <uint8_t>~(1 << tier)
    left_below(p, p.tree.nodes[n].parent, tier)


cdef bint must_stay(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return p.fates[n].copying >= 0 or (p.closed[tier] and p.fates[n].below[tier] > 0)


cdef void drop_tail(Place* p, int32_t n, int32_t k) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef int32_t tier, first = node.length - k
    p.counters.dropped[node_top(p.tree, n)] += k
    on_evict(p, node_top(p.tree, n), n, first, k)
    if p.policy.on_lost != NULL:
        p.policy.on_lost(p, n, k)
    for tier in range(p.num_tiers):
        if (node.tiers >> tier) & 1:
            if first == 0:
                recency_unlink(p, tier, n)
            copy_free(p, n, tier, first)
            if first == 0:
                left_below(p, node.parent, tier)
    if first == 0:
        p.fates[node.parent].kids[p.fates[n].top] -= 1
        child_left(p, node.parent)
        p.fates[n].failed = 0                       # the id may come back as a root
    tree_trim(p.tree, n, k)
    if first == 0:
        memset(&p.fates[n], 0, sizeof(Fate))
    else:
        end_moved(p, n)


cdef bint drop_subtree(Place* p, int32_t n) noexcept nogil:
    # Postorder without recursion: go down to a leaf, drop it or step over it, go on with its sibling or parent.
    cdef int32_t at = n, following, kept = 0
    cdef bint ascending = False
    while True:
        if not ascending and p.tree.nodes[at].first_child != NIL:
            at = p.tree.nodes[at].first_child
            continue
        point_drop(p, at)
        following = p.tree.nodes[at].next_sibling if at != n else NIL
        ascending = following == NIL
        if following == NIL:
            following = p.tree.nodes[at].parent
        if (p.tree.nodes[at].first_child == NIL and p.fates[at].transfer < 0 and p.fates[at].copying < 0
                and p.fates[at].tails == 0 and not is_owned(p, at, node_top(p.tree, at)) and p.tree.nodes[at].length > 0):
            drop_tail(p, at, p.tree.nodes[at].length)
        else:
            kept += 1
        if at == n:
            return kept == 0
        at = following


# Drops everything below run n; False if some of it is owned or in flight, and stays.
cdef bint drop_children(Place* p, int32_t n) noexcept nogil:
    cdef int32_t child = p.tree.nodes[n].first_child, following
    while child != NIL:
        following = p.tree.nodes[child].next_sibling
        drop_subtree(p, child)
        child = following
    return p.tree.nodes[n].first_child == NIL


cdef int32_t split(Place* p, int32_t n, int32_t k) noexcept nogil:
    cdef int32_t upper = tree_split(p.tree, n, k) if place_ensure(p, 1) == OK else NIL
    if upper == NIL:
        p.no_memory = True
        return NIL
    fate_split(p, upper, n)
    if p.fates[upper].expires:
        expiry_push(p, upper)
    return upper


# ---- transfers

cdef bint moves_ensure(Place* p, int32_t num_blocks) noexcept nogil:
    cdef int64_t capacity = 2 * (p.moves_capacity + num_blocks)
    cdef Move* moves
    if p.num_moves + num_blocks <= p.moves_capacity:
        return True
    moves = <Move*>realloc(p.moves, capacity * sizeof(Move))
    if moves == NULL:
        return False
    p.moves = moves
    p.moves_capacity = capacity
    return True


cdef int32_t transfer_new(Place* p, int32_t num_blocks) noexcept nogil:
    cdef int32_t slot, capacity
    cdef Transfer* grown
    cdef int32_t* ids = <int32_t*>malloc(max(num_blocks, 1) * sizeof(int32_t)) if moves_ensure(p, num_blocks) else NULL
    if ids == NULL:
        p.no_memory = True
        return NIL
    if p.free_transfer == NIL:
        capacity = p.transfers_capacity * 2 if p.transfers_capacity else 16
        grown = <Transfer*>realloc(p.transfers, capacity * sizeof(Transfer))
        if grown == NULL:
            free(ids)
            p.no_memory = True
            return NIL
        p.transfers = grown
        for slot in range(capacity - 1, p.transfers_capacity - 1, -1):
            grown[slot].node = NIL
            grown[slot].generation = 0
            grown[slot].num_blocks = p.free_transfer
            p.free_transfer = slot
        p.transfers_capacity = capacity
    slot = p.free_transfer
    p.free_transfer = p.transfers[slot].num_blocks
    p.transfers[slot].dst_ids = ids
    p.transfers[slot].num_blocks = num_blocks
    p.transfers[slot].void = p.transfers[slot].is_tail = False
    p.transfers[slot].id = make_handle(slot, p.transfers[slot].generation)
    p.in_flight += 1
    return slot


cdef void transfer_end(Place* p, int32_t slot) noexcept nogil:
    cdef Transfer* t = &p.transfers[slot]
    free(t.dst_ids)
    t.dst_ids = NULL
    t.node = NIL
    p.in_flight -= 1
    if next_generation(&t.generation):
        t.num_blocks = p.free_transfer
        p.free_transfer = slot


cdef int start(
    Place* p, int32_t n, int32_t src, int32_t dst, bint copies, int64_t group, Reason reason
) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef bint promotes = dst < src
    cdef int32_t slot, i, tier
    cdef Transfer* t
    cdef Move* moves
    slot = transfer_new(p, node.length)
    if slot == NIL:
        return E_MEMORY
    t = &p.transfers[slot]
    if pool_alloc(p.pools[dst], node.length, t.dst_ids) != OK:
        transfer_end(p, slot)
        return E_BLOCKS
    t.node, t.src, t.dst, t.promotes, t.copies = n, <signed char>src, <signed char>dst, promotes, copies
    t.number, t.until = p.num_started, 0
    t.group = t.id if group < 0 else group
    p.num_started += 1
    usage_of(p, n, dst)[0] += node.length       # towards the quota from now on
    if copies:
        p.num_copying += 1
        p.fates[n].copying = t.id
    else:
        for tier in range(p.num_tiers):
            recency_unlink(p, tier, n)
        copy_own(p, n, src)
        p.fates[n].transfer = t.id
    if promotes:
        p.num_reading[src] += 1
    else:
        p.fates[node.parent].below[dst] += 1
        if not copies:
            usage_of(p, n, src)[0] -= node.length   # no more there, unless it stays
    for i in range(node.length):
        moves = &p.moves[p.num_moves + i]
        moves.transfer, moves.src_tier, moves.dst_tier = t.id, <signed char>src, <signed char>dst
        moves.group, moves.reason, moves.lane = t.group, <signed char>reason, 0
        moves.src_block, moves.dst_block = node_ids(p.tree, n, src)[i], t.dst_ids[i]
        moves.node, moves.depth = n, node.depth + i
    p.num_moves += node.length
    if p.decided != NULL:                       # heard once the caller lets go of the mutex: all it decides is taken at once
        pthread_cond_signal(p.decided)
    return OK


cdef int promote_run(Place* p, int32_t n) noexcept nogil:
    return start(p, n, node_top(p.tree, n), 0, False, -1, EVICTED)


# The links of a run after a transfer: in each tier where it may be evicted.
cdef void relink(Place* p, int32_t n, bint demoted) noexcept nogil:
    cdef int32_t tier
    for tier in range(p.num_tiers):
        if (p.tree.nodes[n].tiers >> tier) & 1 and not is_linked(&p.links[tier], n):
            if not is_owned(p, n, tier) or p.policy.keeps_owned:
                if demoted:
                    recency_link_demoted(p, tier, n)
                else:
                    recency_link(p, tier, n)


# Joins n with its only child where nothing tells the two apart any more, so that piecewise demotion leaves whole runs. A
# remainder that goes first leaves its path as it was: a run that was used again beside one that was not.
cdef void try_merge(Place* p, int32_t n) noexcept nogil:
    cdef Node* up
    cdef Fate* a
    cdef Fate* b
    cdef int32_t child, tier, length
    up = &p.tree.nodes[n]
    child = up.first_child
    if up.length == 0 or child == NIL or p.tree.nodes[child].next_sibling != NIL or is_remainder(p.tree, child):
        return
    a, b, length = &p.fates[n], &p.fates[child], up.length
    if (up.length + p.tree.nodes[child].length > p.tree.max_run or up.tiers != p.tree.nodes[child].tiers
            or a.transfer >= 0 or b.transfer >= 0 or a.copying >= 0 or b.copying >= 0 or a.wanted != b.wanted
            or a.spoilt or b.spoilt or (p.has_remainders and a.matched != b.matched) or a.last_use != b.last_use
            or a.klass != b.klass or a.tails or a.frequency != b.frequency or a.expires != b.expires or a.failed or b.failed):
        return
    for tier in range(p.num_tiers):
        if (up.tiers >> tier) & 1 and (a.queue[tier] != b.queue[tier] or is_owned(p, n, tier) or is_owned(p, child, tier)
                                       or not is_linked(&p.links[tier], child) or p.links[tier].next[child] != n):
            return
    for tier in range(p.num_tiers):
        must_not_be_chosen(p, tier, n)
    if tree_merge(p.tree, child):
        end_moved(p, child)
        if b.past == NIL:                           # of the lower part nothing is remembered
            b.past, b.past_generation = a.past, a.past_generation
        b.matched |= a.matched
        b.sent = a.sent + b.sent if a.sent == length else a.sent
        for tier in range(p.num_tiers):
            recency_unlink(p, tier, n)
        memset(&p.fates[n], 0, sizeof(Fate))


# Run n, all of a copy's or the part of it that begins with `ids`, has arrived in `tier` or has not.
cdef void finish_copied(Place* p, int32_t n, int32_t tier, const int32_t* ids, bint succeeded) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef Fate* f = &p.fates[n]
    cdef int32_t i, src = f.top
    f.copying = -1
    left_below(p, node.parent, tier)
    if not succeeded or f.failed or not has_parent_in(p, n, tier):
        for i in range(node.length):
            pool_drop_one(p.pools[tier], ids[i])
        p.counters.failed_copies += node.length
        return
    p.counters.copied[tier] += node.length
    if (node.tiers >> tier) & 1:                    # in the place of a copy that could not be read
        event(p, EVENT_REMOVED, n, tier, 0, node.length)
        pool_uncache(p.pools[tier], node_ids(p.tree, n, tier), node.length)
        pool_cache(p.pools[tier], ids, node.length)
        for i in range(node.length):
            p.pools[tier].refs[ids[i]] |= TREE
            p.pools[tier].refs[node_ids(p.tree, n, tier)[i]] &= COUNT
            pool_drop_one(p.pools[tier], node_ids(p.tree, n, tier)[i])
            node_ids(p.tree, n, tier)[i] = ids[i]
        f.spoilt &= <uint8_t>~(1 << tier)
        event_stored(p, n, tier, 0)
        return
    f.queue[tier] = <uint8_t>queue_of(p, tier, node.chain[0] if p.tree.keep_chain else 0, True)
    copy_add(p, n, tier, ids)
    if f.transfer < 0:                              # else it is linked when that is over
        recency_link_demoted(p, tier, n)
    for src in range(f.top + 1, tier):              # copies that only the reading kept
        if (node.tiers >> src) & 1 and not p.inclusive[src] and not p.closed[src] and f.transfer < 0:
            copy_remove(p, n, src)


cdef bint has_parent_in(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t parent = p.tree.nodes[n].parent
    return not p.closed[tier] or p.tree.nodes[parent].length == 0 or (p.tree.nodes[parent].tiers >> tier) & 1


# Its run may have been cut since it began: each part on its own, parents first.
cdef int finish_copy(Place* p, int32_t slot, bint succeeded, bint tried) noexcept nogil:
    cdef Transfer* t = &p.transfers[slot]
    cdef int32_t part, above, done = 0, num_blocks = t.num_blocks
    usage_of(p, t.node, t.dst)[0] -= num_blocks
    p.num_copying -= 1
    if not tried:
        p.counters.refused_copies += num_blocks
        p.counters.failed_copies -= num_blocks      # which the parts count below
    while done < num_blocks:
        part = t.node
        above = num_blocks - p.tree.nodes[part].length
        while above > done:
            part = p.tree.nodes[part].parent
            above -= p.tree.nodes[part].length
        finish_copied(p, part, t.dst, t.dst_ids + done, succeeded and not t.void)
        done += p.tree.nodes[part].length
    part = t.node
    transfer_end(p, slot)
    above = p.tree.nodes[part].parent
    try_merge(p, part)
    try_merge(p, above)
    return OK


cdef int finish_one(Place* p, int64_t transfer, bint succeeded, bint tried) noexcept nogil:
    cdef int32_t slot = handle_slot(transfer)
    cdef int32_t n, src, dst, i, num_blocks, owners, parent
    cdef Transfer* t
    cdef Fate* f
    cdef bint promotes
    if slot < 0 or slot >= p.transfers_capacity or p.transfers[slot].node == NIL or p.transfers[slot].id != transfer:
        return E_STALE
    t = &p.transfers[slot]
    if t.is_tail:
        return finish_tail(p, slot, succeeded, tried)
    if t.copies:
        return finish_copy(p, slot, succeeded, tried)
    n, src, dst, num_blocks, promotes = t.node, t.src, t.dst, t.num_blocks, t.promotes
    f = &p.fates[n]
    f.transfer = -1
    if promotes:
        p.num_reading[src] -= 1
    else:
        left_below(p, p.tree.nodes[n].parent, dst)
        succeeded = succeeded and has_parent_in(p, n, dst)      # or it would not be found there
    usage_of(p, n, dst)[0] -= num_blocks
    copy_disown(p, n, src)                          # the transfer lets go of its source
    owners = <int32_t>(p.pools[src].refs[node_ids(p.tree, n, src)[0]] & COUNT) - 1
    if not promotes:
        p.pending[src] -= num_blocks
        usage_of(p, n, src)[0] += num_blocks        # it stays, or is taken away below
    if not succeeded:
        for i in range(num_blocks):
            pool_drop_one(p.pools[dst], t.dst_ids[i])
        transfer_end(p, slot)
        if promotes and not tried:
            p.counters.late_promotions += num_blocks
            relink(p, n, False)
        elif promotes:
            p.counters.failed_promotions += num_blocks
            event_hidden(p, n)
            f.failed = 1
            if f.copying >= 0 and p.transfers[handle_slot(f.copying)].src == src:
                p.transfers[handle_slot(f.copying)].void = True
            f.klass = EXPIRED                       # first to go once its owners have let go
            relink(p, n, False)
        else:
            if tried:
                p.counters.failed_demotions += num_blocks
            else:
                p.counters.refused_demotions += num_blocks
            set_top(p, n, src)
            relink(p, n, False)
            if owners == 0 and p.tree.nodes[n].tiers == <uint32_t>1 << src:
                drop_subtree(p, n)
            elif owners == 0 and not must_stay(p, n, src):
                give_up_copy(p, n, src, num_blocks)
        return OK
    if promotes:
        p.counters.promoted[src] += num_blocks
        if p.beside[src]:
            f.sent = num_blocks
        f.queue[dst] = <unsigned char>queue_of(p, dst, p.tree.nodes[n].chain[0] if p.tree.keep_chain else 0, True)
        copy_add(p, n, dst, t.dst_ids)
        for _ in range(owners):                     # those who own the path own its hottest copy
            copy_own(p, n, dst)
            copy_disown(p, n, src)
        set_top(p, n, dst)
        if not p.inclusive[src] and not must_stay(p, n, src):
            copy_remove(p, n, src)
        relink(p, n, False)
        transfer_end(p, slot)
        return OK
    if owners > 0:                                  # a request came back for it: it stays where it was
        if p.inclusive[dst]:
            copy_add(p, n, dst, t.dst_ids)
        else:
            for i in range(num_blocks):
                pool_drop_one(p.pools[dst], t.dst_ids[i])
        set_top(p, n, src)
        relink(p, n, False)
    else:
        p.counters.demoted[src] += num_blocks
        on_evict(p, src, n, 0, num_blocks)
        f.queue[dst] = <unsigned char>queue_of(p, dst, p.tree.nodes[n].chain[0] if p.tree.keep_chain else 0, True)
        copy_add(p, n, dst, t.dst_ids)
        copy_remove(p, n, src)
        relink(p, n, True)
    transfer_end(p, slot)
    parent = p.tree.nodes[n].parent
    try_merge(p, n)
    try_merge(p, parent)
    return OK


cdef int finish(Place* p, int64_t transfer, bint succeeded) noexcept nogil:
    return finish_as(p, transfer, succeeded, True)


cdef bint is_not_taken(const Place* p, int64_t transfer) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(p.num_moves):
        if p.moves[i].transfer == transfer:
            return True
    return False


cdef int finish_as(Place* p, int64_t transfer, bint succeeded, bint tried) noexcept nogil:
    cdef int32_t slot = handle_slot(transfer), root = NIL, n = NIL, generation = 0, above = NIL, generation_above = 0
    cdef int code
    if 0 <= slot < p.transfers_capacity and p.transfers[slot].node != NIL:
        n = p.transfers[slot].node
        root, generation, above = p.tree.nodes[n].root, p.tree.nodes[n].generation, p.tree.nodes[n].parent
        generation_above = p.tree.nodes[above].generation
    code = finish_one(p, transfer, succeeded, tried)
    if code == OK and p.fates[root].failed:
        drop_children(p, root)
    elif code == OK and p.groups != NULL:           # what kept them may have left meanwhile
        if p.tree.nodes[n].generation == generation:
            drop_dead_end(p, n)
        elif p.tree.nodes[above].generation == generation_above:
            drop_dead_end(p, above)
    return code


cdef int64_t leaving_device(Place* p) noexcept nogil:
    cdef int64_t blocks = p.pending[0]
    cdef int32_t group
    for group in range(1, p.groups.num if p.groups != NULL else 1):
        blocks += p.groups.pending[0][group]
    return blocks


cdef int64_t read_for_nobody(Place* p) noexcept nogil:
    cdef int64_t blocks = 0
    cdef int32_t i
    cdef Transfer* t
    for i in range(p.transfers_capacity):
        t = &p.transfers[i]
        if t.node == NIL or t.dst != 0:
            continue
        if t.is_tail:
            blocks += unowned_pages(p, t)
        elif p.pools[t.src].refs[node_ids(p.tree, t.node, t.src)[0]] & COUNT == 2:  # of the tree and the transfer itself
            blocks += t.num_blocks
    return blocks


# ---- closed tiers

cdef int32_t lacking(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t blocks = 0
    while p.tree.nodes[n].length > 0 and not (p.tree.nodes[n].tiers >> tier) & 1:
        if p.fates[n].copying >= 0 and p.transfers[handle_slot(p.fates[n].copying)].number >= p.batch:
            break                                   # it will be there before what is decided next
        if p.fates[n].copying >= 0 or (p.fates[n].transfer >= 0
                                       and not p.transfers[handle_slot(p.fates[n].transfer)].promotes):
            return UNDER_WAY
        if p.fates[n].failed or node_top(p.tree, n) > tier:
            return UNABLE
        blocks += p.tree.nodes[n].length
        n = p.tree.nodes[n].parent
    return blocks


cdef bint copy_path(
    Place* p, int32_t n, int32_t tier, int32_t most, Reason reason, int64_t* group
) noexcept nogil:
    cdef int32_t at, first
    while most > 0:
        at, first = n, NIL
        while p.tree.nodes[at].length > 0 and not (p.tree.nodes[at].tiers >> tier) & 1 and p.fates[at].copying < 0:
            first = at
            at = p.tree.nodes[at].parent
        if first == NIL:
            return True
        if p.tree.nodes[first].length > most:
            first = split(p, first, most) if p.fates[first].transfer < 0 else NIL   # what moves cannot be cut
        if first == NIL or start(p, first, node_top(p.tree, first), tier, True, group[0], reason) != OK:
            return False
        if group[0] < 0:
            group[0] = p.fates[first].copying
        most -= p.tree.nodes[first].length
    return True


# False if n hung on a run that could not be read, too.
cdef bint make_room_behind(Place* p, int32_t n, int32_t tier, const int64_t* more, int64_t before) noexcept nogil:
    cdef int32_t at = p.tree.nodes[n].parent, generation = p.tree.nodes[n].generation, generation_at
    cdef int64_t over, want = more[0]
    while p.tree.nodes[at].length > 0 and not (p.tree.nodes[at].tiers >> tier) & 1:
        at = p.tree.nodes[at].parent
    generation_at = p.tree.nodes[at].generation
    p.fates[at].below[tier] += 1                        # as if n were there: the deepest of its path that is stays
    if p.groups != NULL:
        make_room_before(p, tier, more, before)
    elif pool_available(p.pools[tier]) < want:
        make_room(p, tier, want - pool_available(p.pools[tier]) - p.pending[tier], -1)
    if p.tree.nodes[n].generation == generation:
        over = want - quota_left(p, n, tier)
        if over > 0 and (p.groups == NULL or before == INT64_MAX):   # then its namespace's own coldest blocks go first
            make_room(p, tier, over, p.domain_of[p.tree.nodes[n].root])
    if p.tree.nodes[at].generation == generation_at:
        left_below(p, at, tier)
    return p.tree.nodes[n].generation == generation


# ---- making room

# The block nearest the root of the private branch above leaf n: what no other branch needs and no request owns.
cdef int32_t branch_head(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t parent = p.tree.nodes[n].parent
    while (p.tree.nodes[parent].length > 0 and p.tree.nodes[parent].first_child != NIL
           and p.tree.nodes[p.tree.nodes[parent].first_child].next_sibling == NIL
           and not p.fates[parent].failed and p.fates[parent].transfer < 0 and p.fates[parent].copying < 0
           and node_top(p.tree, parent) == tier and not is_owned(p, parent, tier)):
        n = parent
        parent = p.tree.nodes[n].parent
    return n


cdef int32_t colder_tier(Place* p, int32_t tier) noexcept nogil:
    for tier in range(tier + 1, p.num_tiers):
        if (p.pools[tier] != NULL and p.pools[tier].max_capacity > 0 and not p.beside[tier]
                and (not p.closed[tier] or p.writes[tier] != WRITE_NEVER)):
            return tier
    return NIL


# Any run that may be demoted although hotter runs continue it (oldest-first order only).
cdef int32_t any_unowned(Place* p, int32_t tier) noexcept nogil:
    cdef int32_t d, list_no, n
    for d in range(p.num_domains):
        for list_no in range(d * 204, (d + 1) * 204):
            n = p.links[tier].ends[2 * list_no]
            while n >= 0:
                if (p.fates[n].transfer < 0 and p.fates[n].copying < 0 and not is_owned(p, n, tier)
                        and not (p.closed[tier] and p.fates[n].below[tier])
                        and not (p.fates[n].failed and p.tree.nodes[n].first_child != NIL)):
                    return n
                n = p.links[tier].next[n]
    return NIL


# A run that could not be read, has no owner and is continued: what continues it is as lost as the run itself. One that
# nothing continues stays only where it counts as kept (make_room_behind): no call frees anything there.
cdef int32_t useless(Place* p, int32_t tier, int32_t domain) noexcept nogil:
    cdef int32_t d, queue, n
    for d in range(p.num_domains):
        if domain >= 0 and d != domain:
            continue
        for queue in range(2):
            n = coldest(&p.links[tier], (d * NUM_CLASSES + EXPIRED) * 2 + queue)
            while n >= 0:
                if (p.fates[n].failed and p.fates[n].transfer < 0 and p.fates[n].copying < 0 and not is_owned(p, n, tier)
                        and p.tree.nodes[n].first_child != NIL):
                    return n
                n = p.links[tier].next[n]
    return NIL


# Gives up `k` blocks of run n's copy in `tier` where another copy stays.
cdef bint give_up_copy(Place* p, int32_t n, int32_t tier, int32_t k) noexcept nogil:
    cdef int32_t length = p.tree.nodes[n].length, top
    if k < length:
        if split(p, n, length - k) == NIL:
            return False
    top = node_top(p.tree, n)
    p.counters.trimmed[tier] += k
    if top == tier:
        on_evict(p, tier, n, 0, k)
    copy_remove(p, n, tier)
    if top == tier:
        top = node_top(p.tree, n)
        set_top(p, n, top)
        if (p.fates[n].spoilt >> top) & 1:          # what is left could not be read
            p.fates[n].spoilt &= <uint8_t>~(1 << top)
            event_hidden(p, n)
            p.fates[n].failed = 1
            set_class(p, n, EXPIRED)
        recency_unlink(p, top, n)
        recency_link_demoted(p, top, n)
    return True


cdef void make_room(Place* p, int32_t tier, int64_t want, int32_t domain) noexcept nogil:
    free_up(p, tier, want, domain, False)


cdef void drop_for(Place* p, int32_t tier, int64_t want, int32_t domain) noexcept nogil:
    free_up(p, tier, want, domain, True)


# Demotes what goes first; with `childless`, and where nothing can be demoted, drops leaves.
cdef void free_up(Place* p, int32_t tier, int64_t want, int32_t domain, bint childless) noexcept nogil:
    cdef int32_t n, k, limit, lower, room, before, length
    cdef int64_t group
    cdef int64_t more[MAX_GROUPS]
    cdef uint32_t others
    cdef bint redundant, mirrored = p.closed[p.coldest] and p.writes[p.coldest] >= WRITE_REUSED
    cdef bint oldest_first = p.oldest_first and not p.closed[tier]  # a closed tier loses leaves only
    if p.groups != NULL:
        evict_blocks(p, tier, want, domain)
        return
    lower = colder_tier(p, tier)
    while want > 0:
        n = pick_victim(p, tier, domain, childless or lower == NIL, &limit)
        if n == NIL and oldest_first and lower != NIL and not childless:
            n = any_unowned(p, tier)
            limit = p.tree.max_run
        if n == NIL and not childless and lower != NIL:
            childless = True                        # nothing to demote; perhaps something to drop
            continue
        if n == NIL:                                # whatever could go still has colder blocks hanging on it: those first
            n = pick_victim(p, tier, domain, False, &limit)
            if n == NIL:
                n = useless(p, tier, domain)
            if n == NIL or not drop_children(p, n):
                return
            continue
        if oldest_first and lower != NIL and not childless and node_top(p.tree, n) == tier:
            n = branch_head(p, n, tier)
        k = p.tree.nodes[n].length
        if k > limit:
            k = limit
        if k > want:
            k = <int32_t>want
        others = p.tree.nodes[n].tiers & ~(<uint32_t>1 << tier)
        # Where the coldest tier has copies of what memory holds, one there is no reason not to go down: from the next tier
        # the run comes back sooner. Elsewhere the next tier's room is for what no other tier has.
        redundant = not mirrored or others & ((<uint32_t>1 << tier) - 1) != 0 or (lower != NIL and (others >> lower) & 1)
        if others != 0 and (redundant or lower == NIL or childless or p.fates[n].failed):
            if not give_up_copy(p, n, tier, k):
                return
            want -= k
            continue
        if lower == NIL or childless or p.fates[n].failed:
            if p.coldest + 1 < p.num_tiers and p.tree.nodes[n].first_child != NIL and not drop_children(p, n):
                return                              # behind one of the claims a run is on its way down
            drop_tail(p, n, k)
            want -= k
            continue
        before = 0                                  # blocks that have to be there before those of n
        if p.closed[lower]:
            before = lacking(p, p.tree.nodes[n].parent, lower)
            if before == UNDER_WAY:
                return                              # the caller finishes what is in flight and asks again
            if before == UNABLE:
                childless = True
                continue
            if not oldest_first:
                before += p.tree.nodes[n].length - k
        length = p.tree.nodes[n].length
        more[0] = before + k
        if (not make_room_behind(p, n, lower, more, 0) or p.fates[n].copying >= 0
                or p.tree.nodes[n].length != length):
            continue                                # it is gone, was cut, or what went from there takes along a copy of it
        room = pool_available(p.pools[lower])
        if room > quota_left(p, n, lower):
            room = <int32_t>quota_left(p, n, lower)
        room -= before
        if room <= 0 or (p.closed[lower] and room < k and not oldest_first):
            if p.pending[lower] > 0 or p.num_copying > 0:
                return                              # as above: a run that is being copied is no victim
            if p.tree.nodes[n].tiers != <uint32_t>1 << tier:
                if not give_up_copy(p, n, tier, k):
                    return
                want -= k
            elif room > 0 and p.tree.nodes[n].first_child == NIL:
                drop_tail(p, n, k - room)           # there is room for what comes before
                want -= k - room
            else:
                childless = True
            continue
        if room < k:
            k = room
        if oldest_first:
            if k < p.tree.nodes[n].length:
                n = split(p, n, k)                  # the upper part: the oldest blocks
        elif k < p.tree.nodes[n].length and split(p, n, p.tree.nodes[n].length - k) == NIL:
            n = NIL
        group = -1
        if n == NIL or (p.closed[lower] and not copy_path(p, p.tree.nodes[n].parent, lower, INT32_MAX, EVICTED, &group)):
            return
        if start(p, n, tier, lower, False, group, EVICTED) != OK:
            return
        set_top(p, n, lower)                        # for its parent it has left already
        p.pending[tier] += k
        want -= k
