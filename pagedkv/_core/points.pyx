"""Points: the boundaries of a path that stay usable when no sequence runs there any more."""

from libc.stdint cimport int32_t

from pagedkv._core.place cimport Place
from pagedkv._core.radix_tree cimport Tree
from pagedkv._core.tails cimport has_tail, point_enter, point_leave, point_touch
from pagedkv._core.transfers cimport split
from pagedkv._core.types cimport DEVICE, NIL


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
    return True
