"""Copies and transfers.

Making room in a tier, promoting runs, and what becomes of a transfer that succeeded or failed.

A transfer owns its source (one reference more) and its destination (the only reference) until `finish`. A block becomes
visible in the destination tier only there, and only on success.
"""
# Over 400 lines: begin, finish and give up of a transfer, whose counts only balance when they are read together.

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from pagedkv._core.block_pool cimport COUNT, TREE, Pool, pool_alloc, pool_available, pool_drop_one
from pagedkv._core.events cimport EVENT_REMOVED, EVENT_STORED, ring_put
from pagedkv._core.links cimport coldest, is_linked
from pagedkv._core.place cimport EXPIRED, NUM_CLASSES, Fate, Place, Transfer
from pagedkv._core.radix_tree cimport Node, node_ids, node_tokens, node_top, tree_merge, tree_split, tree_trim
from pagedkv._core.recency cimport (
    child_left, end_moved, fate_split, is_owned, must_not_be_chosen, on_evict, pick_victim, place_ensure, queue_of,
    recency_link, recency_link_demoted, recency_unlink, set_top,
)
from pagedkv._core.retention cimport expiry_push
from pagedkv._core.types cimport E_BLOCKS, E_MEMORY, E_STALE, NIL, OK, Move, handle_slot, make_handle, next_generation
from pagedkv.threads.pthread cimport pthread_cond_signal


cdef int64_t* usage_of(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return &p.domains[p.domain_of[p.tree.nodes[n].root]].usage[tier]


cdef int32_t quota_of(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return p.domains[p.domain_of[p.tree.nodes[n].root]].quota[tier]


# Blocks that the namespace of run n may still have in `tier`; negative where its quota was lowered.
cdef int64_t quota_left(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t quota = quota_of(p, n, tier)
    return INT32_MAX if quota < 0 else quota - usage_of(p, n, tier)[0]


cdef void event(Place* p, int32_t kind, int32_t n, int32_t tier, int32_t first, int32_t count) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef int32_t parent_block = NIL
    if p.events.words == NULL:
        return
    if first > 0:
        parent_block = node_ids(p.tree, n, tier)[first - 1]
    elif p.tree.nodes[node.parent].length and (p.tree.nodes[node.parent].tiers >> tier) & 1:
        parent_block = node_ids(p.tree, node.parent, tier)[p.tree.nodes[node.parent].length - 1]
    ring_put(&p.events, kind, tier, node.root, parent_block, node.depth + first, node_ids(p.tree, n, tier) + first, count,
             node_tokens(p.tree, n, first), count * p.tree.block_size if kind == EVENT_STORED else 0)
    p.fates[node.root].last_use = p.events.tail


cdef void event_stored(Place* p, int32_t n, int32_t tier, int32_t first) noexcept nogil:
    event(p, EVENT_STORED, n, tier, first, p.tree.nodes[n].length - first)


cdef void copy_own(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t i, length = p.tree.nodes[n].length
    cdef int32_t* ids = node_ids(p.tree, n, tier)
    cdef Pool* pool = p.pools[tier]
    assert pool.refs[ids[0]] == pool.refs[ids[length - 1]], "a run's blocks share their owners"
    if pool.refs[ids[0]] == (TREE | 1):
        pool.num_cached -= length
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
        pool.num_cached += length


cdef void copy_add(Place* p, int32_t n, int32_t tier, const int32_t* ids) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef int32_t i
    cdef Pool* pool = p.pools[tier]
    assert not (node.tiers >> tier) & 1, "the run has a copy there"
    memcpy(node_ids(p.tree, n, tier), ids, node.length * sizeof(int32_t))
    for i in range(node.length):
        pool.refs[ids[i]] |= TREE
    if pool.refs[ids[0]] == (TREE | 1):
        pool.num_cached += node.length
    node.tiers |= <uint32_t>1 << tier
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
    for i in range(first, node.length):
        pool.refs[ids[i]] &= COUNT
        pool_drop_one(pool, ids[i])
    pool.num_cached -= node.length - first
    p.size[tier][p.fates[n].queue[tier]] -= node.length - first
    usage_of(p, n, tier)[0] -= node.length - first


cdef void copy_remove(Place* p, int32_t n, int32_t tier) noexcept nogil:
    recency_unlink(p, tier, n)
    copy_free(p, n, tier, 0)
    p.tree.nodes[n].tiers &= ~(<uint32_t>1 << tier)


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
        following = p.tree.nodes[at].next_sibling if at != n else NIL
        ascending = following == NIL
        if following == NIL:
            following = p.tree.nodes[at].parent
        if (p.tree.nodes[at].first_child == NIL and p.fates[at].transfer < 0
                and not is_owned(p, at, node_top(p.tree, at)) and p.tree.nodes[at].length > 0):
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

cdef int32_t transfer_new(Place* p, int32_t num_blocks) noexcept nogil:
    cdef int32_t slot, capacity
    cdef Transfer* grown
    cdef int32_t* ids = <int32_t*>malloc(num_blocks * sizeof(int32_t))
    if ids == NULL:
        return NIL
    if p.free_transfer == NIL:
        capacity = p.transfers_capacity * 2 if p.transfers_capacity else 16
        grown = <Transfer*>realloc(p.transfers, capacity * sizeof(Transfer))
        if grown == NULL:
            free(ids)
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


# Starts a transfer of the whole run n; the destination must have room. OK or a Code with nothing changed.
cdef int start(Place* p, int32_t n, int32_t src, int32_t dst, bint promotes) noexcept nogil:
    cdef Node* node = &p.tree.nodes[n]
    cdef int32_t slot, i, tier
    cdef int64_t capacity
    cdef Transfer* t
    cdef Move* moves
    if p.num_moves + node.length > p.moves_capacity:
        capacity = 2 * (p.moves_capacity + node.length)
        moves = <Move*>realloc(p.moves, capacity * sizeof(Move))
        if moves == NULL:
            p.no_memory = True
            return E_MEMORY
        p.moves = moves
        p.moves_capacity = capacity
    slot = transfer_new(p, node.length)
    if slot == NIL:
        p.no_memory = True
        return E_MEMORY
    t = &p.transfers[slot]
    if pool_alloc(p.pools[dst], node.length, t.dst_ids) != OK:
        transfer_end(p, slot)
        return E_BLOCKS
    t.node, t.src, t.dst, t.promotes = n, <signed char>src, <signed char>dst, promotes
    t.number, t.until = p.num_started, 0
    p.num_started += 1
    usage_of(p, n, dst)[0] += node.length       # towards the quota from now on
    if not promotes:
        usage_of(p, n, src)[0] -= node.length   # and no more there, unless it stays
    for tier in range(p.num_tiers):
        recency_unlink(p, tier, n)
    copy_own(p, n, src)
    p.fates[n].transfer = t.id
    for i in range(node.length):
        moves = &p.moves[p.num_moves + i]
        moves.transfer, moves.src_tier, moves.dst_tier = t.id, <signed char>src, <signed char>dst
        moves.src_block, moves.dst_block = node_ids(p.tree, n, src)[i], t.dst_ids[i]
        moves.node, moves.index = n, i
    p.num_moves += node.length
    if p.decided != NULL:                       # heard once the caller lets go of the mutex: all it decides is taken at once
        pthread_cond_signal(p.decided)
    return OK


cdef int promote_run(Place* p, int32_t n) noexcept nogil:
    return start(p, n, node_top(p.tree, n), 0, True)


# A single copy's links after a transfer: in each tier where it may be evicted.
cdef void relink(Place* p, int32_t n, bint demoted) noexcept nogil:
    cdef int32_t tier
    for tier in range(p.num_tiers):
        if (p.tree.nodes[n].tiers >> tier) & 1 and not is_linked(&p.links[tier], n):
            if not is_owned(p, n, tier) or p.policy.keeps_owned:
                if demoted:
                    recency_link_demoted(p, tier, n)
                else:
                    recency_link(p, tier, n)


# Joins n with its only child where nothing tells the two apart any more, so that piecewise demotion leaves whole runs.
cdef void try_merge(Place* p, int32_t n) noexcept nogil:
    cdef Node* up
    cdef Fate* a
    cdef Fate* b
    cdef int32_t child, tier
    up = &p.tree.nodes[n]
    child = up.first_child
    if up.length == 0 or child == NIL or p.tree.nodes[child].next_sibling != NIL:
        return
    a, b = &p.fates[n], &p.fates[child]
    if (up.length + p.tree.nodes[child].length > p.tree.max_run or up.tiers != p.tree.nodes[child].tiers
            or a.transfer >= 0 or b.transfer >= 0 or a.last_use != b.last_use or a.klass != b.klass
            or a.frequency != b.frequency or a.expires != b.expires or a.failed or b.failed):
        return
    for tier in range(p.num_tiers):
        if (up.tiers >> tier) & 1 and (a.queue[tier] != b.queue[tier] or is_owned(p, n, tier) or is_owned(p, child, tier)
                                       or not is_linked(&p.links[tier], child) or p.links[tier].next[child] != n):
            return
    for tier in range(p.num_tiers):
        must_not_be_chosen(p, tier, n)
    if tree_merge(p.tree, child):
        b.matched |= a.matched
        end_moved(p, child)
        if b.past == NIL:                           # of the lower part nothing is remembered
            b.past, b.past_generation = a.past, a.past_generation
        for tier in range(p.num_tiers):
            recency_unlink(p, tier, n)
        memset(&p.fates[n], 0, sizeof(Fate))


cdef int finish_one(Place* p, int64_t transfer, bint succeeded, bint tried) noexcept nogil:
    cdef int32_t slot = handle_slot(transfer)
    cdef int32_t n, src, dst, i, num_blocks, owners, parent
    cdef Transfer* t
    cdef Fate* f
    cdef bint promotes
    if slot < 0 or slot >= p.transfers_capacity or p.transfers[slot].node == NIL or p.transfers[slot].id != transfer:
        return E_STALE
    t = &p.transfers[slot]
    n, src, dst, num_blocks, promotes = t.node, t.src, t.dst, t.num_blocks, t.promotes
    f = &p.fates[n]
    f.transfer = -1
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
            f.failed = 1
            f.klass = EXPIRED                       # first to go once its owners have let go
            relink(p, n, False)
        else:
            if tried:
                p.counters.failed_demotions += num_blocks
            else:
                p.counters.refused_demotions += num_blocks
            set_top(p, n, src)
            relink(p, n, False)
            if owners == 0:
                drop_subtree(p, n)
        return OK
    if promotes:
        p.counters.promoted[src] += num_blocks
        f.queue[dst] = <unsigned char>queue_of(p, dst, p.tree.nodes[n].chain[0] if p.tree.keep_chain else 0, True)
        copy_add(p, n, dst, t.dst_ids)
        for _ in range(owners):                     # those who own the path own its hottest copy
            copy_own(p, n, dst)
            copy_disown(p, n, src)
        set_top(p, n, dst)
        if not p.inclusive[src]:
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


cdef int finish_as(Place* p, int64_t transfer, bint succeeded, bint tried) noexcept nogil:
    cdef int32_t slot = handle_slot(transfer), root = NIL
    cdef int code
    if 0 <= slot < p.transfers_capacity and p.transfers[slot].node != NIL:
        root = p.tree.nodes[p.transfers[slot].node].root
    code = finish_one(p, transfer, succeeded, tried)
    if code == OK and p.fates[root].failed:
        drop_children(p, root)
    return code


# ---- making room

# The block nearest the root of the private branch above leaf n: what no other branch needs and no request owns.
cdef int32_t branch_head(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t parent = p.tree.nodes[n].parent
    while (p.tree.nodes[parent].length > 0 and p.tree.nodes[parent].first_child != NIL
           and p.tree.nodes[p.tree.nodes[parent].first_child].next_sibling == NIL
           and not p.fates[parent].failed and p.fates[parent].transfer < 0 and node_top(p.tree, parent) == tier
           and not is_owned(p, parent, tier)):
        n = parent
        parent = p.tree.nodes[n].parent
    return n


cdef int32_t colder_tier(Place* p, int32_t tier) noexcept nogil:
    for tier in range(tier + 1, p.num_tiers):
        if p.pools[tier] != NULL and p.pools[tier].max_capacity > 0:
            return tier
    return NIL


# Any run that may be demoted although hotter runs continue it (oldest-first order only).
cdef int32_t any_unowned(Place* p, int32_t tier) noexcept nogil:
    cdef int32_t d, list_no, n
    for d in range(p.num_domains):
        for list_no in range(d * 204, (d + 1) * 204):
            n = p.links[tier].ends[2 * list_no]
            while n >= 0:
                if (p.fates[n].transfer < 0 and not is_owned(p, n, tier)
                        and not (p.fates[n].failed and p.tree.nodes[n].first_child != NIL)):
                    return n
                n = p.links[tier].next[n]
    return NIL


# A run that could not be read and has no owner: what continues it is as lost as the run itself.
cdef int32_t useless(Place* p, int32_t tier, int32_t domain) noexcept nogil:
    cdef int32_t d, queue, n
    for d in range(p.num_domains):
        if domain >= 0 and d != domain:
            continue
        for queue in range(2):
            n = coldest(&p.links[tier], (d * NUM_CLASSES + EXPIRED) * 2 + queue)
            while n >= 0:
                if p.fates[n].failed and p.fates[n].transfer < 0 and not is_owned(p, n, tier):
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
        recency_unlink(p, top, n)
        recency_link_demoted(p, top, n)
    return True


cdef void make_room(Place* p, int32_t tier, int64_t want, int32_t domain) noexcept nogil:
    free_up(p, tier, want, domain, False)


cdef void drop_for(Place* p, int32_t tier, int64_t want, int32_t domain) noexcept nogil:
    free_up(p, tier, want, domain, True)


# Demotes what goes first; with `childless`, and where nothing can be demoted, drops leaves.
cdef void free_up(Place* p, int32_t tier, int64_t want, int32_t domain, bint childless) noexcept nogil:
    cdef int32_t n, k, limit, lower, room, generation
    cdef uint32_t others
    lower = colder_tier(p, tier)
    while want > 0:
        n = pick_victim(p, tier, domain, childless or lower == NIL, &limit)
        if n == NIL and p.oldest_first and lower != NIL and not childless:
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
        if p.oldest_first and lower != NIL and not childless and node_top(p.tree, n) == tier:
            n = branch_head(p, n, tier)
        k = p.tree.nodes[n].length
        if k > limit:
            k = limit
        if k > want:
            k = <int32_t>want
        others = p.tree.nodes[n].tiers & ~(<uint32_t>1 << tier)
        if others != 0:
            if not give_up_copy(p, n, tier, k):
                return
            want -= k
            continue
        if lower == NIL or childless or p.fates[n].failed:
            drop_tail(p, n, k)
            want -= k
            continue
        if pool_available(p.pools[lower]) < k:
            generation = p.tree.nodes[n].generation
            make_room(p, lower, k - pool_available(p.pools[lower]) - p.pending[lower], -1)
            if p.tree.nodes[n].generation != generation:
                continue                            # oldest-first: n hung below what had to go there
        if k > quota_left(p, n, lower):             # then its namespace's own coldest blocks go first
            generation = p.tree.nodes[n].generation
            make_room(p, lower, k - quota_left(p, n, lower), p.domain_of[p.tree.nodes[n].root])
            if p.tree.nodes[n].generation != generation:
                continue
        room = pool_available(p.pools[lower])
        if room > quota_left(p, n, lower):
            room = <int32_t>quota_left(p, n, lower)
        if room <= 0:
            if p.pending[lower] > 0:
                return                              # the caller finishes what is in flight and asks again
            childless = True
            continue
        if room < k:
            k = room
        if p.oldest_first:
            if k < p.tree.nodes[n].length:
                n = split(p, n, k)                  # the upper part: the oldest blocks
        elif k < p.tree.nodes[n].length and split(p, n, p.tree.nodes[n].length - k) == NIL:
            n = NIL
        if n == NIL or start(p, n, tier, lower, False) != OK:
            return
        set_top(p, n, lower)                        # for its parent it has left already
        p.pending[tier] += k
        want -= k
