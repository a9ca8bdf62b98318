"""Groups of layers that see equally far back: pages, tails and points.

tails.pxd has the words. The rule: a prefix of k blocks may be used if every group has its last need(k) blocks before k.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from pagedkv._core.block_pool cimport COUNT, TREE, Pool, extents_for, extents_needed, pool_cache, pool_drop_one, pool_uncache
from pagedkv._core.events cimport EVENT_NOT_RESUMABLE, EVENT_RESUMABLE
from pagedkv._core.links cimport Links, coldest, link_hottest, unlink
from pagedkv._core.place cimport NUM_CLASSES, Fate, Groups, Place
from pagedkv._core.radix_tree cimport Tree, hottest_of, is_remainder, node_pages, tree_child, tree_common
from pagedkv._core.recency cimport child_left
from pagedkv._core.telling cimport event_point
from pagedkv._core.types cimport DEVICE, NIL


cdef int32_t need(Groups* g, int32_t group, int32_t k) noexcept nogil:
    if g.chunk[group] > 0:
        return k % g.chunk[group]
    return k if k < g.window[group] else g.window[group]


# ---- pages: references are those of rows and owners, and `marks` of points. A page that points alone hold is cached.

cdef inline void page_hold(Pool* pool, int32_t page) noexcept nogil:
    if (pool.refs[page] & COUNT) == pool.marks[page]:
        pool_uncache(pool, &page, 1)
    pool.refs[page] += 1


# False where that was the last holder: the page is free, and the run has a hole there now.
cdef inline bint page_let(Pool* pool, int32_t page) noexcept nogil:
    cdef uint32_t left = (pool.refs[page] & COUNT) - 1
    if left == pool.marks[page] and left > 0:
        pool_cache(pool, &page, 1)
    if left == 0:
        pool.refs[page] = 1
    pool_drop_one(pool, page)
    return left > 0


cdef inline void page_mark(Pool* pool, int32_t page) noexcept nogil:
    pool.marks[page] += 1
    pool.refs[page] += 1


cdef inline bint page_unmark(Pool* pool, int32_t page) noexcept nogil:
    cdef uint32_t left = (pool.refs[page] & COUNT) - 1
    pool.marks[page] -= 1
    if left == 0:
        pool_uncache(pool, &page, 1)
        pool.refs[page] = 1
    pool_drop_one(pool, page)
    return left > 0


cdef void to_page(Place* p, int32_t n, int32_t tier, int32_t group, int32_t i, What what) noexcept nogil:
    cdef int32_t where = page_top(p.tree, n, group, i) if tier == ANY else tier
    cdef int32_t* page
    cdef Pool* pool
    cdef bint stays = True
    assert where != NIL, "a page that is needed is a hole"
    page, pool = node_pages(p.tree, n, where, group) + i, p.groups.pools[where][group]
    assert page[0] != NIL, "a page that is needed is a hole"
    if what == HOLD:
        page_hold(pool, page[0])
    elif what == MARK:
        page_mark(pool, page[0])
    elif what == LET:
        stays = page_let(pool, page[0])
    else:
        stays = page_unmark(pool, page[0])
    if not stays:
        page[0] = NIL


cdef void to_pages(Place* p, int32_t n, int32_t tier, int32_t group, int32_t first, int32_t last, What what) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t i, depth
    while last > first:
        depth = t.nodes[n].depth
        if depth < last:
            for i in range(max(first - depth, 0), last - depth):
                to_page(p, n, tier, group, i, what)
            last = depth
        n = t.nodes[n].parent


cdef void holds_rise(Place* p, int32_t n, int32_t tier, int32_t group, int32_t i) noexcept nogil:
    cdef int32_t below, page
    cdef Pool* pool
    for below in range(tier + 1, p.num_tiers):
        page = node_pages(p.tree, n, below, group)[i]
        if page == NIL:
            continue
        pool = p.groups.pools[below][group]
        while page != NIL and (pool.refs[page] & COUNT) > pool.marks[page]:
            page_hold(p.groups.pools[tier][group], node_pages(p.tree, n, tier, group)[i])
            if not page_let(pool, page):
                node_pages(p.tree, n, below, group)[i] = page = NIL
        return


# The last of blocks [first, last) of the path to run n that has no page of `group` in `tier`, NIL if each has one.
cdef int32_t last_hole(Place* p, int32_t n, int32_t tier, int32_t group, int32_t first, int32_t last) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t i, depth
    while last > first:
        depth = t.nodes[n].depth
        if depth < last:
            for i in range(last - 1 - depth, max(first - depth, 0) - 1, -1):
                if (page_top(t, n, group, i) if tier == ANY else node_pages(t, n, tier, group)[i]) == NIL:
                    return depth + i
            last = depth
        n = t.nodes[n].parent
    return NIL


cdef bint has_tail(Place* p, int32_t n, int32_t k, int32_t tier) noexcept nogil:
    cdef int32_t group
    for group in range(1, p.groups.num):
        if last_hole(p, n, tier, group, k - need(p.groups, group, k), k) != NIL:
            return False
    return True


# ---- matching

# No boundary between a hole in its tail and a boundary is usable: their tails have the hole, too. So no page is looked at twice.
cdef int32_t usable_of_path(Place* p, int32_t n, int32_t num_blocks, int32_t tier) noexcept nogil:
    cdef int32_t group, hole, k = num_blocks, below
    while k > 0:
        while p.tree.nodes[n].depth >= k:
            n = p.tree.nodes[n].parent
        below = k
        for group in range(1, p.groups.num):
            hole = last_hole(p, n, tier, group, k - need(p.groups, group, k), k)
            if hole != NIL and hole < below:
                below = hole
        if below == k:
            break
        k = below
    return k


cdef int32_t longest_usable(
    Place* p, int32_t root, const int32_t* tokens, int64_t num_blocks, int32_t* agreed
) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t n = root, child, k
    cdef int64_t done = 0
    while done < num_blocks:
        child = tree_child(t, n, tokens + done * t.block_size)
        if child == NIL or is_remainder(t, child) or p.fates[child].failed:
            break
        k = tree_common(t, child, tokens + done * t.block_size, num_blocks - done)
        n = child
        done += k
        if k < t.nodes[n].length:
            break
    agreed[0] = <int32_t>done
    return usable_of_path(p, n, agreed[0], ANY)


# ---- owners

cdef void tail_own(Place* p, int32_t owner) noexcept nogil:
    cdef int32_t group, k = p.owners[owner].num_blocks
    for group in range(1, p.groups.num):
        p.owners[owner].first[group] = k - need(p.groups, group, k)
        to_pages(p, p.owners[owner].node, ANY, group, p.owners[owner].first[group], k, HOLD)


cdef void tail_share(Place* p, int32_t owner, int32_t other) noexcept nogil:
    cdef int32_t group
    for group in range(1, p.groups.num):
        p.owners[other].first[group] = p.owners[owner].first[group]
        to_pages(p, p.owners[owner].node, ANY, group, p.owners[owner].first[group], p.owners[owner].num_blocks, HOLD)


cdef void tail_shorten(Place* p, int32_t owner, int32_t group, int32_t first) noexcept nogil:
    if first > p.owners[owner].first[group]:
        to_pages(p, p.owners[owner].node, ANY, group, p.owners[owner].first[group], first, LET)
        p.owners[owner].first[group] = first


cdef void tail_disown(Place* p, int32_t owner) noexcept nogil:
    cdef int32_t group
    for group in range(1, p.groups.num):
        tail_shorten(p, owner, group, p.owners[owner].num_blocks)


cdef void tail_cut(Place* p, int32_t owner, int32_t old_node, int32_t old_blocks) noexcept nogil:
    cdef int32_t group, first, held, k = p.owners[owner].num_blocks
    for group in range(1, p.groups.num):
        first, held = k - need(p.groups, group, k), p.owners[owner].first[group]
        if held >= k:                               # nothing that it held is needed
            to_pages(p, p.owners[owner].node, ANY, group, first, k, HOLD)
            to_pages(p, old_node, ANY, group, held, old_blocks, LET)
            p.owners[owner].first[group] = first
        else:
            if first < held:
                to_pages(p, p.owners[owner].node, ANY, group, first, held, HOLD)
                p.owners[owner].first[group] = first
            to_pages(p, old_node, ANY, group, k, old_blocks, LET)


cdef void pages_join(Place* p, int32_t owner, int32_t group, int32_t first, int32_t* pages) noexcept nogil:
    cdef Tree* t = p.tree
    cdef Pool* pool = p.groups.pools[0][group]
    cdef int32_t n = p.owners[owner].node, last = p.owners[owner].num_blocks, depth, i
    cdef int32_t* there
    cdef int32_t* mine
    while last > first:
        depth = t.nodes[n].depth
        for i in range(max(first - depth, 0), last - depth):
            there, mine = node_pages(t, n, DEVICE, group) + i, pages + (depth + i - first)
            if there[0] == NIL:
                there[0] = mine[0]
                pool.refs[mine[0]] |= TREE
                holds_rise(p, n, DEVICE, group, i)
            elif there[0] != mine[0]:
                page_hold(pool, there[0])
                pool_drop_one(pool, mine[0])
                mine[0] = there[0]
        last = depth
        n = t.nodes[n].parent


# ---- points

cdef bint point_unlink(Place* p, int32_t n) noexcept nogil:
    cdef int32_t tier
    if p.groups == NULL or p.fates[n].point == 0:
        return False
    for tier in range(p.num_tiers):
        if has_point_in(p, n, tier):
            unlink(&p.groups.points[tier], n)
    return True


cdef void point_link(Place* p, int32_t n) noexcept nogil:
    cdef int32_t tier
    for tier in range(p.num_tiers):
        if has_point_in(p, n, tier):
            link_hottest(&p.groups.points[tier], p.domain_of[p.tree.nodes[n].root] * NUM_CLASSES + p.fates[n].klass, n)


cdef void point_touch(Place* p, int32_t n) noexcept nogil:
    if p.fates[n].point == 0:
        return
    p.clock += 1
    p.fates[n].point = p.clock
    point_unlink(p, n)
    point_link(p, n)


cdef void to_tail(Place* p, int32_t n, int32_t tier, What what) noexcept nogil:
    cdef int32_t group, k = p.tree.nodes[n].depth + p.tree.nodes[n].length
    for group in range(1, p.groups.num):
        to_pages(p, n, tier, group, k - need(p.groups, group, k), k, what)


cdef void point_enter(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    if has_point_in(p, n, tier):
        return
    to_tail(p, n, tier, MARK)
    if f.point == 0:
        p.clock += 1
        f.point = p.clock
        p.groups.num_points += 1
    else:
        f.kids[hottest_of(f.tails)] -= 1
    f.tails |= <uint8_t>(1 << tier)
    f.kids[hottest_of(f.tails)] += 1
    link_hottest(&p.groups.points[tier], p.domain_of[p.tree.nodes[n].root] * NUM_CLASSES + f.klass, n)
    event_point(p, EVENT_RESUMABLE, n, tier)


cdef void point_leave(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef Fate* f = &p.fates[n]
    if not has_point_in(p, n, tier):
        return
    event_point(p, EVENT_NOT_RESUMABLE, n, tier)
    unlink(&p.groups.points[tier], n)
    f.kids[hottest_of(f.tails)] -= 1
    f.tails &= <uint8_t>~(1 << tier)
    if f.tails & POINTS:
        f.kids[hottest_of(f.tails)] += 1
    else:
        f.point = 0
        p.groups.num_points -= 1
    to_tail(p, n, tier, UNMARK)
    child_left(p, n)


cdef void point_drop(Place* p, int32_t n) noexcept nogil:
    cdef int32_t tier
    for tier in range(p.num_tiers if p.groups != NULL else 0):
        point_leave(p, n, tier)


cdef int32_t coldest_point(Place* p, int32_t tier, int32_t domain) noexcept nogil:
    cdef int32_t d, klass, n, best = NIL
    cdef Links* points = &p.groups.points[tier]
    for d in range(p.num_domains):
        if domain >= 0 and d != domain:
            continue
        for klass in range(NUM_CLASSES):
            n = coldest(points, d * NUM_CLASSES + klass)
            while n >= 0 and p.fates[n].tails & (MOVING << tier):
                n = points.next[n]                  # it leaves already, or is being read
            if n >= 0:
                if (best == NIL or klass < p.fates[best].klass
                        or (klass == p.fates[best].klass and p.fates[n].point < p.fates[best].point)):
                    best = n
                break
    return best


# ---- room

cdef int64_t lacks_extents(Place* p, int32_t tier, const int64_t* more) noexcept nogil:
    cdef int64_t extents = 0, lacking
    cdef int32_t group
    cdef Pool* pool
    for group in range(p.groups.num):
        pool = p.groups.pools[tier][group]
        lacking = more[group] - pool.num_stack + (pool.num_reserved + pool.watermark if more[group] else 0)
        if lacking > 0:
            extents += extents_for(pool, lacking)
    return extents - p.groups.pools[tier][0].extents.num_free


cdef bint could_have(Place* p, const int64_t* more) noexcept nogil:
    cdef int64_t extents = p.groups.pools[0][0].extents.num
    cdef int32_t group
    for group in range(p.groups.num):
        extents -= extents_needed(p.groups.pools[0][group], more[group])
    return extents >= 0
