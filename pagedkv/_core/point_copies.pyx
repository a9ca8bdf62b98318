"""Points written to a closed tier while they stay where they are.

A crash leaves a shorter path that ends in a point, or blocks that are freed when the tier is opened again.
"""

from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place
from pagedkv._core.radix_tree cimport hottest_of
from pagedkv._core.tail_moves cimport start_tail, tail_lacks
from pagedkv._core.tails cimport POINTS, has_point_in, lacks_extents
from pagedkv._core.transfers cimport UNDER_WAY, copy_path, lacking, make_room_behind, quota_left
from pagedkv._core.types cimport E_STATE, MAX_GROUPS, OK, Reason


cdef bint lacks_point(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return p.fates[n].point and not ((p.tree.nodes[n].tiers >> tier) & 1 and has_point_in(p, n, tier))


# Blocks that `tier` lacks of the path, UNDER_WAY or UNABLE; in *more the room for a copy of `most` of them, and for the tail in
# the end.
cdef int32_t wanted_of(Place* p, int32_t n, int32_t tier, int32_t most, int64_t* more) noexcept nogil:
    cdef int32_t missing = lacking(p, n, tier), group
    for group in range(MAX_GROUPS):
        more[group] = 0
    if missing < 0:
        return missing
    if not has_point_in(p, n, tier):
        if p.fates[n].tails & ~POINTS:
            return UNDER_WAY                        # perhaps to there
        if missing <= most:
            tail_lacks(p, n, tier, more)
    more[0] = min(missing, most)
    return missing


cdef int64_t copy_point(Place* p, int32_t n, int32_t tier, int32_t most, Reason reason, int64_t before) noexcept nogil:
    cdef int64_t more[MAX_GROUPS]
    cdef int64_t group = -1, num_moves
    cdef int32_t missing = wanted_of(p, n, tier, most, more)
    cdef int code
    if p.fates[n].failed or p.fates[p.tree.nodes[n].root].failed:
        return 0
    if not lacks_point(p, n, tier) or missing < 0:
        return UNDER_WAY if missing == UNDER_WAY and p.fates[n].point else 0
    if not make_room_behind(p, n, tier, more, before):
        return 0
    missing = wanted_of(p, n, tier, most, more)     # what went from there may take along a copy, or have taken pages
    if not p.fates[n].point or missing < 0:
        return UNDER_WAY if missing == UNDER_WAY and p.fates[n].point else 0
    if lacks_extents(p, tier, more) > 0 or quota_left(p, n, tier) < more[0]:
        return 0
    num_moves = p.num_moves
    if missing <= most and not has_point_in(p, n, tier):
        code = start_tail(p, n, hottest_of(p.fates[n].tails & POINTS), tier, True, &group, reason, 0)
        if code != OK:
            return UNDER_WAY if code == E_STATE else 0
    copy_path(p, n, tier, <int32_t>more[0], reason, &group)
    if p.num_moves == num_moves and missing > 0:
        return UNDER_WAY                            # its first run moves, and cannot be cut
    return p.num_moves - num_moves
