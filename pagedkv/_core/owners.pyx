"""Owners of prefixes: taking, sharing, changing and releasing a path of the tree.

Here a request's prompt is matched: ``place_acquire``, which ``Placement.acquire`` and ``BlockTable.open`` call.
An owner holds one reference on the hottest copy of every run from its root down to its deepest node.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memset

from pagedkv._core.group_room cimport drop_dead_end
from pagedkv._core.links cimport is_linked
from pagedkv._core.place cimport EXPIRED, Fate, Owner, Place
from pagedkv._core.radix_tree cimport Tree, chain_before, is_remainder, node_ids, node_top, tree_child, tree_common
from pagedkv._core.recency cimport is_owned, on_hit, place_ensure, recency_link, recency_unlink
from pagedkv._core.retention cimport DEFAULT_CLASS, set_class
from pagedkv._core.tail_moves cimport rising_tail, tail_rises
from pagedkv._core.tails cimport longest_usable, point_touch, tail_cut, tail_disown, tail_own, tail_share, usable_of_path
from pagedkv._core.transfers cimport copy_disown, copy_own, drop_subtree, split
from pagedkv._core.types cimport E_MEMORY, E_STALE, E_STATE, MAX_GROUPS, NIL, OK, handle_generation, handle_slot, next_generation
from pagedkv._core.write_behind cimport want_reused


cdef int32_t owner_new(Place* p, int32_t node) noexcept nogil:
    cdef int32_t slot, capacity
    cdef Owner* grown
    if p.free_owner == NIL:
        capacity = p.owners_capacity * 2 if p.owners_capacity else 16
        grown = <Owner*>realloc(p.owners, capacity * sizeof(Owner))
        if grown == NULL:
            return E_MEMORY
        p.owners = grown
        memset(grown + p.owners_capacity, 0, (capacity - p.owners_capacity) * sizeof(Owner))
        for slot in range(capacity - 1, p.owners_capacity - 1, -1):
            grown[slot].node = p.free_owner
            grown[slot].generation = 1              # so that no handle is 0, which a caller's memory may hold by chance
            p.free_owner = slot
        p.owners_capacity = capacity
    slot = p.free_owner
    p.free_owner = p.owners[slot].node
    p.serial += 1
    p.owners[slot].node = node
    p.owners[slot].num_blocks = 0
    p.owners[slot].serial = p.serial
    p.owners[slot].blocked = -1
    p.owners[slot].live = 1
    p.owners[slot].pinned = 0
    p.owners[slot].klass = DEFAULT_CLASS
    p.owners[slot].expires = 0
    p.owners[slot].visit = NIL
    p.owners[slot].agreed = 0
    p.live_owners += 1
    p.fates[p.tree.nodes[node].root].born += 1
    return slot


cdef void owner_end(Place* p, int32_t slot, int32_t root) noexcept nogil:
    p.fates[root].born -= 1
    p.owners[slot].live = 0
    p.live_owners -= 1
    if next_generation(&p.owners[slot].generation):
        p.owners[slot].node = p.free_owner
        p.free_owner = slot


cdef int32_t place_owner(Place* p, int64_t handle) noexcept nogil:
    cdef int32_t slot = handle_slot(handle)
    if slot < 0 or slot >= p.owners_capacity or p.owners[slot].live != 1:
        return E_STALE
    return slot if p.owners[slot].generation == handle_generation(handle) else E_STALE


# One owner more on run n: its hottest copy.
cdef void run_own(Place* p, int32_t n) noexcept nogil:
    cdef int32_t top = node_top(p.tree, n)
    copy_own(p, n, top)
    if not p.policy.keeps_owned:
        recency_unlink(p, top, n)


# What was just used is as hot in the closed tiers, whose copies outlive the others: the last that should go there.
cdef inline void refresh(Place* p, int32_t n, int32_t top) noexcept nogil:
    cdef int32_t tier
    for tier in range(top + 1, p.num_tiers):
        if p.closed[tier] and not p.policy.keeps_owned and is_linked(&p.links[tier], n):
            recency_unlink(p, tier, n)
            recency_link(p, tier, n)


# One owner less. A run that the tree alone owns then is hotter than everything released before it, or is dropped with
# what hangs on it where it can never be matched again.
cdef void run_disown(Place* p, int32_t n) noexcept nogil:
    cdef int32_t top = node_top(p.tree, n)
    cdef Fate* f = &p.fates[n]
    copy_disown(p, n, top)
    if is_owned(p, n, top):
        return
    f.last_use = p.clock
    if f.transfer >= 0:
        return
    if not is_linked(&p.links[top], n):
        recency_link(p, top, n)
    refresh(p, n, top)
    if f.failed or p.fates[p.tree.nodes[n].root].failed:
        drop_subtree(p, n)


cdef int32_t place_acquire(
    Place* p, int32_t root, const int32_t* tokens, int64_t num_tokens, int64_t max_blocks
) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int64_t done = 0, total = num_tokens // t.block_size
    cdef int32_t n = root, child, k, upper, owner, usable
    cdef Fate* f
    if place_ensure(p, 2) != OK:
        return E_MEMORY
    owner = owner_new(p, root)
    if owner < 0:
        return owner
    if max_blocks >= 0 and total > max_blocks:
        total = max_blocks
    if p.fates[root].failed:
        total = 0
    if p.groups != NULL:
        usable = longest_usable(p, root, tokens, total, &p.owners[owner].agreed)
        p.counters.lagging += p.owners[owner].agreed - usable
        total = usable
    while done < total:
        child = tree_child(t, n, tokens + done * t.block_size)
        if child == NIL or is_remainder(t, child):
            break
        f = &p.fates[child]
        if f.failed:
            break
        if p.groups != NULL:                        # they were compared
            k = <int32_t>min(<int64_t>t.nodes[child].length, total - done)
        else:
            k = tree_common(t, child, tokens + done * t.block_size, total - done)
        if f.transfer >= 0 and (k < t.nodes[child].length or f.top == node_top(t, child)):
            p.owners[owner].blocked = f.transfer    # being promoted for another owner, or cannot be cut while it moves
            p.counters.blocked_matches += 1
            break
        if k < t.nodes[child].length:
            upper = split(p, child, k)
            if upper == NIL:
                break
            child = upper
        if p.fates[child].klass == EXPIRED:
            set_class(p, child, DEFAULT_CLASS)
        on_hit(p, child)
        run_own(p, child)
        p.counters.hit_blocks[node_top(t, child)] += k
        done += k
        n = child
    if p.groups != NULL and done and done == total and tail_rises(p, n):
        p.owners[owner].blocked = rising_tail(p, n)     # for another owner, which may give it up
        p.counters.blocked_matches += 1
        total += 1                                      # as a run that cannot be had now
    p.counters.acquired += 1
    if p.policy.on_miss != NULL and t.keep_chain and done < total:
        p.policy.on_miss(p, chain_before(t, n, t.nodes[n].length), tokens + done * t.block_size, total - done)
    if p.groups != NULL and done < total:           # it could not be cut where it may be used
        while n != root:
            child, n = n, t.nodes[n].parent
            p.counters.hit_blocks[node_top(t, child)] -= t.nodes[child].length
            run_disown(p, child)
        done = 0
    p.owners[owner].node = n
    p.owners[owner].num_blocks = <int32_t>done
    if p.groups != NULL:
        tail_own(p, owner)
        if done:
            point_touch(p, n)
    return owner


# The runs that continue an owner's path on the device as `tokens` do are its own, too. With `ids` they are found, and their
# blocks stand there; without, the caller computes them again. How many blocks.
cdef int32_t own_runs(
    Place* p, int32_t owner, const int32_t* tokens, int32_t num_blocks, int32_t* ids
) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t done = 0, n = p.owners[owner].node, child, k
    cdef const int32_t* at
    while done < num_blocks and not p.fates[t.nodes[n].root].failed:
        at = tokens + <int64_t>done * t.block_size
        child = tree_child(t, n, at)
        if (child == NIL or p.fates[child].failed or p.fates[child].transfer >= 0 or node_top(t, child) != 0
                or is_remainder(t, child)):
            break
        k = tree_common(t, child, at, num_blocks - done)
        if k < t.nodes[child].length:
            child = split(p, child, k)
            if child == NIL:
                break
        if p.fates[child].klass == EXPIRED:
            set_class(p, child, DEFAULT_CLASS)
        if ids == NULL:
            want_reused(p, child)
        else:
            on_hit(p, child)
            memcpy(ids + done, node_ids(t, child, 0), k * sizeof(int32_t))
            p.counters.hit_blocks[0] += k
        run_own(p, child)
        done += k
        n = child
    p.owners[owner].node = n
    p.owners[owner].num_blocks += done
    return done


cdef int32_t place_follow(
    Place* p, int32_t owner, const int32_t* tokens, int32_t num_blocks, int32_t* ids
) noexcept nogil:
    cdef int32_t done = 0 if p.groups != NULL else own_runs(p, owner, tokens, num_blocks, ids)
    if done:
        want_found(p, p.owners[owner].node)             # by a second request
    return done


cdef int32_t place_retrace(Place* p, int32_t owner, const int32_t* tokens, int32_t num_blocks) noexcept nogil:
    cdef int32_t done
    if place_ensure(p, 2) != OK:
        return 0
    tail_disown(p, owner)
    done = own_runs(p, owner, tokens, num_blocks, NULL)
    owns_no_pages(p, owner)
    return done


cdef void owns_no_pages(Place* p, int32_t owner) noexcept nogil:
    cdef int32_t group
    for group in range(MAX_GROUPS):
        p.owners[owner].first[group] = p.owners[owner].num_blocks


cdef int32_t place_own_run(Place* p, int32_t n) noexcept nogil:
    cdef int32_t owner = owner_new(p, n)
    if owner < 0:
        return owner
    p.owners[owner].num_blocks = p.tree.nodes[n].depth + p.tree.nodes[n].length
    owns_no_pages(p, owner)                         # place_share takes them
    while p.tree.nodes[n].length > 0:
        run_own(p, n)
        n = p.tree.nodes[n].parent
    return owner


cdef int32_t place_share(Place* p, int32_t owner) noexcept nogil:
    cdef int32_t other = place_own_run(p, p.owners[owner].node)
    if other >= 0:
        p.owners[other].num_blocks = p.owners[owner].num_blocks
        p.owners[other].klass = p.owners[owner].klass
        p.owners[other].expires = p.owners[owner].expires
        if p.groups != NULL:
            tail_share(p, owner, other)
    return other


cdef void place_release(Place* p, int32_t owner) noexcept nogil:
    cdef int32_t n = p.owners[owner].node, parent, root = p.tree.nodes[n].root, end = n, generation
    place_depart(p, owner, True, -1, False)
    p.clock += 1
    p.pinned_blocks -= p.owners[owner].pinned
    if p.groups != NULL:
        tail_disown(p, owner)
    while p.tree.nodes[n].length > 0:               # deepest first, so that the root ends hottest
        parent, generation = p.tree.nodes[n].parent, p.tree.nodes[n].generation
        run_disown(p, n)
        if p.tree.nodes[n].generation != generation:
            end = parent                            # it could not be read, and is gone with what hung on it
        n = parent
    if p.groups != NULL and not p.fates[root].failed:
        drop_dead_end(p, end)
    owner_end(p, owner, root)


cdef int place_shorten(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil:
    cdef int32_t n = p.owners[owner].node, parent, old_node, old_blocks, end, generation
    if p.groups != NULL:
        num_blocks = usable_of_path(p, n, num_blocks, 0)
    while p.tree.nodes[n].length > 0 and p.tree.nodes[n].depth >= num_blocks:
        n = p.tree.nodes[n].parent
    if p.tree.nodes[n].depth + p.tree.nodes[n].length > num_blocks:
        if p.fates[n].transfer >= 0:
            return E_STATE                              # a run in flight cannot be cut: nothing has changed
        if split(p, n, num_blocks - p.tree.nodes[n].depth) == NIL:
            return E_MEMORY                             # nor has anything here
    n = old_node = end = p.owners[owner].node
    p.clock += 1
    if p.groups != NULL:                                # pages first, while the runs are there
        old_blocks = p.owners[owner].num_blocks
        while p.tree.nodes[n].length > 0 and p.tree.nodes[n].depth >= num_blocks:
            n = p.tree.nodes[n].parent
        p.owners[owner].node = n
        p.owners[owner].num_blocks = p.tree.nodes[n].depth + p.tree.nodes[n].length
        tail_cut(p, owner, old_node, old_blocks)
        n = old_node
    while p.tree.nodes[n].length > 0 and p.tree.nodes[n].depth >= num_blocks:
        parent, generation = p.tree.nodes[n].parent, p.tree.nodes[n].generation
        run_disown(p, n)
        if p.tree.nodes[n].generation != generation:
            end = parent                                # it could not be read, and is gone with what hung on it
        n = parent
        p.owners[owner].node = n
        p.owners[owner].num_blocks = p.tree.nodes[n].depth + p.tree.nodes[n].length
    if p.groups != NULL and old_node != n and not p.fates[p.tree.nodes[n].root].failed:
        drop_dead_end(p, end)
    return OK


cdef int32_t place_uncut(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil:
    cdef int32_t n = p.owners[owner].node
    while True:
        if p.groups != NULL:
            num_blocks = usable_of_path(p, n, num_blocks, 0)
        while p.tree.nodes[n].length > 0 and p.tree.nodes[n].depth >= num_blocks:
            n = p.tree.nodes[n].parent
        if p.tree.nodes[n].depth + p.tree.nodes[n].length <= num_blocks or p.fates[n].transfer < 0:
            return num_blocks
        num_blocks = p.tree.nodes[n].depth              # over groups, a boundary without a tail perhaps: look again


cdef void place_blocks(Place* p, int32_t owner, int32_t* ids) noexcept nogil:
    cdef int32_t n = p.owners[owner].node
    while p.tree.nodes[n].length > 0:
        memcpy(ids + p.tree.nodes[n].depth, node_ids(p.tree, n, node_top(p.tree, n)), p.tree.nodes[n].length * sizeof(int32_t))
        n = p.tree.nodes[n].parent
