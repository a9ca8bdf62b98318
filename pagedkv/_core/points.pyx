"""Points: the boundaries of a path that stay usable when no sequence runs there any more."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from pagedkv._core.block_pool cimport TREE
from pagedkv._core.place cimport Place
from pagedkv._core.radix_tree cimport Tree, node_pages
from pagedkv._core.tails cimport LET, has_tail, holds_rise, need, point_enter, point_leave, point_touch, to_page
from pagedkv._core.transfers cimport split
from pagedkv._core.types cimport DEVICE, MAX_GROUPS, NIL
from pagedkv._core.write_behind cimport want_committed


cdef bint point_make(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t n = p.owners[owner].node, tier
    if num_blocks <= 0:
        return False
    while t.nodes[n].depth >= num_blocks:
        n = t.nodes[n].parent
    if not has_tail(p, n, num_blocks, DEVICE):
        return False
    if t.nodes[n].depth + t.nodes[n].length > num_blocks:
        n = split(p, n, num_blocks - t.nodes[n].depth)
        if n == NIL:
            return False
    point_enter(p, n, DEVICE)
    for tier in range(1, p.num_tiers):
        if not p.inclusive[tier]:
            point_leave(p, n, tier)
    point_touch(p, n)
    want_committed(p, n)
    return True


# The run of the path to run n that has block `at`.
cdef inline int32_t run_of(Tree* t, int32_t n, int32_t at) noexcept nogil:
    while t.nodes[n].depth > at:
        n = t.nodes[n].parent
    return n


cdef int32_t point_at(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil:
    cdef int32_t n = p.owners[owner].node
    if not 0 < num_blocks <= p.owners[owner].num_blocks:
        return NIL
    n = run_of(p.tree, n, num_blocks - 1)
    return n if p.tree.nodes[n].depth + p.tree.nodes[n].length == num_blocks and p.fates[n].point else NIL


cdef void point_lacks(Place* p, int32_t owner, int32_t num_blocks, int64_t* more) noexcept nogil:
    cdef int32_t group, at, n
    for group in range(1, p.groups.num):
        n = p.owners[owner].node
        for at in range(num_blocks - 1, num_blocks - need(p.groups, group, num_blocks) - 1, -1):
            n = run_of(p.tree, n, at)
            more[group] += node_pages(p.tree, n, DEVICE, group)[at - p.tree.nodes[n].depth] == NIL


cdef bint point_give(Place* p, int32_t owner, int32_t num_blocks, int32_t** pages) noexcept nogil:
    cdef int32_t group, at, i, n, left
    cdef int32_t given[MAX_GROUPS]
    cdef int32_t* page
    cdef bint made
    for group in range(1, p.groups.num):
        n, given[group] = p.owners[owner].node, 0
        for at in range(num_blocks - 1, num_blocks - need(p.groups, group, num_blocks) - 1, -1):
            n = run_of(p.tree, n, at)
            page = node_pages(p.tree, n, DEVICE, group) + at - p.tree.nodes[n].depth
            if page[0] == NIL:
                page[0] = pages[group - 1][given[group]]
                p.groups.pools[0][group].refs[page[0]] |= TREE
                holds_rise(p, n, DEVICE, group, at - p.tree.nodes[n].depth)
                given[group] += 1
    made = point_make(p, owner, num_blocks)
    for group in range(1, p.groups.num):                # without the point, the caller's were the only references
        n, left = p.owners[owner].node, 0
        for at in range(num_blocks - 1, num_blocks - need(p.groups, group, num_blocks) - 1, -1):
            n = run_of(p.tree, n, at)
            i = at - p.tree.nodes[n].depth
            if left < given[group] and node_pages(p.tree, n, DEVICE, group)[i] == pages[group - 1][left]:
                to_page(p, n, DEVICE, group, i, LET)
                left += 1
    return made


# One thing to the pages of a run's blocks [first, last), which end with node `end`: they join the tree, or their caller lets go.
cdef void run_pages(Place* p, int64_t first, int64_t last, int32_t end, int32_t tier, int32_t** pages, bint join) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t n = end, i = t.nodes[end].length, group
    cdef int64_t at
    for at in range(last - 1, first - 1, -1):
        i -= 1
        for group in range(1, p.groups.num):
            if pages[group - 1][at] == NIL:
                continue
            if join:
                node_pages(t, n, tier, group)[i] = pages[group - 1][at]
                p.groups.pools[tier][group].refs[pages[group - 1][at]] |= TREE
            else:
                to_page(p, n, tier, group, i, LET)
        if i == 0:
            n = t.nodes[n].parent
            i = t.nodes[n].length


cdef void points_restore(
    Place* p, const int64_t* first, const int32_t* ends, const int32_t* done, int32_t num_runs, int32_t tier,
    int32_t** pages, const uint8_t* points
) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t s
    for s in range(num_runs):
        if done[s] == first[s + 1] - first[s]:
            run_pages(p, first[s], first[s + 1], ends[s], tier, pages, True)
    for s in range(num_runs - 1, -1, -1):
        if (points[s] and done[s] == first[s + 1] - first[s]
                and has_tail(p, ends[s], t.nodes[ends[s]].depth + t.nodes[ends[s]].length, tier)):
            point_enter(p, ends[s], tier)
    for s in range(num_runs):
        if done[s] == first[s + 1] - first[s]:
            run_pages(p, first[s], first[s + 1], ends[s], tier, pages, False)
