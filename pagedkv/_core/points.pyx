"""Points: the boundaries of a path that stay usable when no sequence runs there any more."""

from libc.stdint cimport int32_t

from pagedkv._core.place cimport Place
from pagedkv._core.radix_tree cimport Tree
from pagedkv._core.tails cimport MARK, has_tail, need, point_touch, to_pages
from pagedkv._core.transfers cimport split
from pagedkv._core.types cimport NIL


cdef bint point_make(Place* p, int32_t owner, int32_t num_blocks) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t n = p.owners[owner].node, group
    if num_blocks <= 0:
        return False
    while t.nodes[n].depth >= num_blocks:
        n = t.nodes[n].parent
    if not has_tail(p, n, num_blocks):
        return False
    if t.nodes[n].depth + t.nodes[n].length > num_blocks:
        n = split(p, n, num_blocks - t.nodes[n].depth)
        if n == NIL:
            return False
    if p.fates[n].point == 0:
        for group in range(1, p.groups.num):
            to_pages(p, n, group, num_blocks - need(p.groups, group, num_blocks), num_blocks, MARK)
        p.fates[n].point = 1
        p.fates[n].kids[p.fates[n].top] += 1
        p.groups.num_points += 1
    point_touch(p, n)
    return True
