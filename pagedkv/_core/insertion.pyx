"""Insertion: a sequence's filled device blocks join the tree.

They give way to blocks that the tree has already.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from pagedkv._core.block_pool cimport COUNT, TREE, Pool, pool_drop_one
from pagedkv._core.links cimport is_linked
from pagedkv._core.owners cimport place_begin, run_own
from pagedkv._core.place cimport Fate, Place
from pagedkv._core.radix_tree cimport (
    Tree, chain_before, chain_step, is_remainder, node_ids, node_top, tree_child, tree_common, tree_extend, tree_new,
    whole_blocks,
)
from pagedkv._core.recency cimport fate_new, place_ensure, queue_of, recency_link, set_top
from pagedkv._core.retention cimport DEFAULT_CLASS, expiry_push, set_class
from pagedkv._core.telling cimport event_shown, event_stored
from pagedkv._core.transfers cimport (
    copy_add, copy_disown, copy_own, copy_remove, drop_for, drop_subtree, make_room, must_stay, quota_of, split, usage_of,
)
from pagedkv._core.types cimport NIL, OK
from pagedkv._core.write_behind cimport want_committed, want_copy, want_reused


# Our device blocks for a run the tree has already: use the tree's, or give it ours where its copy is colder or failed.
cdef void adopt(Place* p, int32_t n, int32_t* blocks) noexcept nogil:
    cdef int32_t i, owners, top = node_top(p.tree, n), length = p.tree.nodes[n].length
    cdef bint failed = p.fates[n].failed
    want_reused(p, n)                               # another sequence has computed it too
    if top == 0:
        run_own(p, n)
        for i in range(length):
            pool_drop_one(p.pools[0], blocks[i])
        memcpy(blocks, node_ids(p.tree, n, 0), length * sizeof(int32_t))
        p.counters.adopted += length
        return
    p.fates[n].failed = 0
    if failed:
        event_shown(p, n)
    owners = <int32_t>(p.pools[top].refs[node_ids(p.tree, n, top)[0]] & COUNT) - 1
    for i in range(length):
        p.pools[0].refs[blocks[i]] = 2              # the owner's, which was the caller's, and the tree's
    copy_add(p, n, 0, blocks)
    set_top(p, n, 0)
    for _ in range(owners):                         # owners of the colder copy own the hottest one now
        copy_own(p, n, 0)
        copy_disown(p, n, top)
    if must_stay(p, n, top):
        p.fates[n].spoilt |= <uint8_t>(failed << top)
        want_copy(p, n, top)
    elif failed or not p.inclusive[top]:
        copy_remove(p, n, top)
    if (p.tree.nodes[n].tiers >> top) & 1 and not is_linked(&p.links[top], n):
        recency_link(p, top, n)
    if failed:
        set_class(p, n, DEFAULT_CLASS)
    if p.policy.keeps_owned:
        recency_link(p, 0, n)
    p.counters.inserted += length


cdef bint may_extend(Place* p, int32_t n, int32_t owner) noexcept nogil:
    # The run's last block is ours alone to continue, and new blocks will share its fate.
    cdef Fate* f = &p.fates[n]
    if (p.tree.nodes[n].length == 0 or p.tree.nodes[n].first_child != NIL or p.tree.nodes[n].tiers != 1 or f.transfer >= 0
            or f.copying >= 0 or f.failed or f.matched or f.tails or p.tree.nodes[n].length >= p.tree.max_run
            or is_remainder(p.tree, n) or f.klass != p.owners[owner].klass or f.expires != p.owners[owner].expires
            or p.pools[0].refs[node_ids(p.tree, n, 0)[0]] != (TREE | 2)):
        return False
    return p.policy.joins_requests or f.born == p.owners[owner].serial


# Leading blocks that only the caller holds: a block shared outside the tree would not share its run's fate.
cdef int32_t mine(Place* p, const int32_t* blocks, int32_t num_blocks) noexcept nogil:
    cdef int32_t i
    for i in range(num_blocks):
        if p.pools[0].refs[blocks[i]] != 1:
            return i
    return num_blocks


cdef int32_t quota_room(Place* p, int32_t n, int32_t want) noexcept nogil:
    cdef int64_t quota = quota_of(p, n, 0), over
    if quota < 0:
        return want
    over = usage_of(p, n, 0)[0] + want - quota
    if over > 0:
        make_room(p, 0, over, p.domain_of[p.tree.nodes[n].root])
        over = usage_of(p, n, 0)[0] + want - quota
    if over > 0:                                    # the tiers below are busy: better the old blocks are lost than the new
        drop_for(p, 0, over, p.domain_of[p.tree.nodes[n].root])
        over = usage_of(p, n, 0)[0] + want - quota
    if over <= 0:
        return want
    return <int32_t>(want - over) if over < want else 0


cdef int32_t extend(Place* p, int32_t n, const int32_t* tokens, const int32_t* blocks, int32_t k) noexcept nogil:
    cdef int32_t i, length = p.tree.nodes[n].length
    k = tree_extend(p.tree, n, tokens, k)
    if k > 0:
        memcpy(node_ids(p.tree, n, 0) + length, blocks, k * sizeof(int32_t))
        for i in range(k):
            p.pools[0].refs[blocks[i]] = TREE | 2
        p.size[0][p.fates[n].queue[0]] += k
        usage_of(p, n, 0)[0] += k
        event_stored(p, n, 0, length)
    return k


cdef int32_t new_run(
    Place* p, int32_t owner, int32_t parent, const int32_t* tokens, const int32_t* blocks, int32_t k, int32_t queue
) noexcept nogil:
    cdef int32_t i, n = tree_new(p.tree, parent, tokens, k)
    if n == NIL:
        return NIL
    fate_new(p, n, 0, p.owners[owner].klass, p.owners[owner].serial)
    p.fates[n].expires = p.owners[owner].expires
    p.fates[n].queue[0] = <uint8_t>queue
    for i in range(k):
        p.pools[0].refs[blocks[i]] = 2              # the owner's, which was the caller's, and the tree's
    copy_add(p, n, 0, blocks)
    if p.fates[n].expires:
        expiry_push(p, n)
    return n


cdef int32_t place_insert(
    Place* p, int32_t owner, const int32_t* tokens, int32_t* blocks, int32_t num_blocks
) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t done = 0, n = p.owners[owner].node, child, k, i, queue, first_new = NIL, length, generation
    cdef const int32_t* at
    cdef uint64_t chain
    if p.fates[t.nodes[n].root].failed:
        return 0                                    # the namespace was dropped: nothing of it is cached any more
    if num_blocks > 0:
        place_begin(p, owner)
    while done < num_blocks:
        if place_ensure(p, 2) != OK:
            break
        at = tokens + <int64_t>done * t.block_size
        child = tree_child(t, n, at)
        if child != NIL:
            k = tree_common(t, child, at, num_blocks - done)
            if p.fates[child].transfer >= 0 or is_remainder(t, child):
                break
            if k < t.nodes[child].length:
                child = split(p, child, k)
                if child == NIL:
                    break
            if node_top(t, child) != 0:
                generation = t.nodes[child].generation
                if mine(p, blocks + done, k) < k or quota_room(p, n, k) < k:
                    break
                if (t.nodes[child].generation != generation or t.nodes[child].length != k
                        or p.fates[child].transfer >= 0):
                    continue                        # making room within the quota took or moves this very run: look again
            adopt(p, child, blocks + done)
            n = child
            p.owners[owner].node = n
            done += k
            continue
        k = quota_room(p, n, mine(p, blocks + done, num_blocks - done))
        if k == 0:
            if quota_of(p, n, 0) >= 0 and mine(p, blocks + done, num_blocks - done) > 0:
                p.counters.refused_by_quota += num_blocks - done
            break
        k = whole_blocks(t, at, min(k, t.max_run))
        if k == 0 or place_ensure(p, 1) != OK:      # making room may have split runs
            break
        queue = 0
        if t.keep_chain:                            # blocks of one run share a queue
            chain = chain_step(t, chain_before(t, n, t.nodes[n].length), at)
            queue = queue_of(p, 0, chain, False)
            for i in range(1, k):
                chain = chain_step(t, chain, at + <int64_t>i * t.block_size)
                if queue_of(p, 0, chain, False) != queue:
                    k = i
                    break
        length = 0
        if may_extend(p, n, owner) and p.fates[n].queue[0] == queue:
            length = t.nodes[n].length
            k = extend(p, n, at, blocks + done, k)
        else:
            k = min(k, t.max_run)
            n = new_run(p, owner, n, at, blocks + done, k, queue)
            if n == NIL:
                k = 0
                n = p.owners[owner].node
            elif first_new == NIL:
                first_new = n
        if k == 0:
            break
        p.owners[owner].node = n
        if t.keep_chain and p.policy.queue_of != NULL:
            for i in range(length, t.nodes[n].length):
                queue_of(p, 0, t.nodes[n].chain[i], True)
        p.counters.inserted += k
        done += k
    p.owners[owner].node = n
    p.owners[owner].num_blocks = t.nodes[n].depth + t.nodes[n].length
    if done > 0:
        want_committed(p, n)
    if p.policy.keeps_owned and first_new != NIL:     # into the queue deepest first
        while True:
            if not is_linked(&p.links[0], n) and (t.nodes[n].tiers & 1):
                recency_link(p, 0, n)
            if n == first_new:
                break
            n = t.nodes[n].parent
    return done


# Leading blocks that make one run; a partly filled one is a run of its own.
cdef int32_t restored(Place* p, const int32_t* tokens, int32_t num_blocks) noexcept nogil:
    cdef int32_t k = whole_blocks(p.tree, tokens, num_blocks)
    if k < num_blocks:
        p.has_remainders = True
    return max(k, 1)


cdef int32_t place_restore(
    Place* p, int32_t root, const int32_t* tokens, const int32_t* ids, int32_t num_blocks, int32_t tier, int32_t piece,
    int32_t* taken
) noexcept nogil:
    cdef Tree* t = p.tree
    cdef Pool* pool = p.pools[tier]
    cdef int32_t n = root, done = 0, k, child, first_new = NIL, i, bad = 0
    taken[0] = num_blocks
    if place_ensure(p, 2) != OK or p.fates[root].failed:
        return 0
    while done < num_blocks:                            # what the tree has already
        child = tree_child(t, n, tokens + <int64_t>done * t.block_size)
        if child == NIL:
            break
        if p.fates[child].failed:                       # it could not be read: the block found now takes its place
            if not drop_subtree(p, child):
                return done
            break
        k = tree_common(t, child, tokens + <int64_t>done * t.block_size, num_blocks - done)
        if k < t.nodes[child].length:
            if p.fates[child].transfer >= 0 or done + k == num_blocks:
                return done + k                         # nothing to add behind it, or it cannot be cut while it moves
            child = split(p, child, k)
            if child == NIL:
                return done
        n = child
        done += k
        if p.closed[tier] and not (t.nodes[n].tiers >> tier) & 1:
            return done                                 # behind it nothing would be found again
    for i in range(done, num_blocks):                   # each of the rest is the caller's alone, and stands there once
        if <uint32_t>ids[i] >= <uint32_t>pool.fresh or pool.refs[ids[i]] != 1:
            bad = -i - 1
            break
        pool.refs[ids[i]] |= TREE
    for i in range(done, num_blocks if bad == 0 else -bad - 1):
        pool.refs[ids[i]] &= COUNT
    if bad < 0:
        return bad
    taken[0] = done
    while done < num_blocks:
        if place_ensure(p, 1) != OK:
            break
        k = restored(p, tokens + <int64_t>done * t.block_size, min(num_blocks - done, piece, t.max_run))
        child = tree_new(t, n, tokens + <int64_t>done * t.block_size, k)
        if child == NIL:
            break
        fate_new(p, child, tier, DEFAULT_CLASS, 0)
        copy_add(p, child, tier, ids + done)
        if first_new == NIL:
            first_new = child
        n = child
        done += k
    while first_new != NIL:                             # deepest coldest
        recency_link(p, tier, n)
        if n == first_new:
            break
        n = t.nodes[n].parent
    return done


# Whether the runs above run s of a forest are in the tree as a whole.
cdef bint has_parent(const int32_t* parents, const int64_t* first, const int32_t* done, int32_t s) noexcept nogil:
    cdef int32_t above = parents[s]
    return above < 0 or done[above] == first[above + 1] - first[above]


cdef int64_t place_restore_forest(
    Place* p, const int32_t* roots, const int32_t* parents, const int64_t* first, int32_t num_runs,
    const int32_t* tokens, const int32_t* ids, int32_t tier, int32_t* tails, int32_t* done
) noexcept nogil:
    cdef Tree* t = p.tree
    cdef Pool* pool = p.pools[tier]
    cdef int64_t i, at, total = first[num_runs], bad = -1
    cdef int32_t s, n, k, child, above
    for i in range(total):
        if <uint32_t>ids[i] >= <uint32_t>pool.fresh or pool.refs[ids[i]] != 1:
            bad = i
            break
        pool.refs[ids[i]] |= TREE                       # the same id twice shows
    for i in range(total if bad < 0 else bad):
        pool.refs[ids[i]] &= COUNT
    if bad >= 0:
        return -bad - 1
    for s in range(num_runs):
        done[s] = 0
        n = roots[s] if parents[s] < 0 else tails[parents[s]]
        at = first[s]
        if not has_parent(parents, first, done, s) or place_ensure(p, 1) != OK or p.fates[t.nodes[n].root].failed:
            continue
        if tree_child(t, n, tokens + at * t.block_size) != NIL:
            continue
        while at < first[s + 1] and place_ensure(p, 1) == OK:
            k = restored(p, tokens + at * t.block_size, <int32_t>min(first[s + 1] - at, <int64_t>t.max_run))
            child = tree_new(t, n, tokens + at * t.block_size, k)
            if child == NIL:
                break
            fate_new(p, child, tier, DEFAULT_CLASS, 0)
            p.fates[child].matched = 1                  # it was worth its writing once
            copy_add(p, child, tier, ids + at)
            n = child
            at += k
        done[s] = <int32_t>(at - first[s])
        tails[s] = n
    for s in range(num_runs - 1, -1, -1):               # children before their parents, the newest last
        if done[s] == 0:
            continue
        n = tails[s]
        above = roots[s] if parents[s] < 0 else tails[parents[s]]
        while n != above:
            recency_link(p, tier, n)
            n = t.nodes[n].parent
    return OK
