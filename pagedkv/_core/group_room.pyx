"""Room in a tier whose memory groups of layers share."""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t
from libc.string cimport memset

from pagedkv._core.block_pool cimport Pool, extents_for
from pagedkv._core.links cimport coldest
from pagedkv._core.place cimport NUM_CLASSES, WRITE_REUSED, Place
from pagedkv._core.policies.choosing cimport may_go
from pagedkv._core.radix_tree cimport Tree, node_top
from pagedkv._core.recency cimport is_owned, set_top
from pagedkv._core.tail_moves cimport start_tail, tail_lacks
from pagedkv._core.tails cimport POINTS, coldest_point, has_point_in, lacks_extents, need, point_drop, point_leave
from pagedkv._core.transfers cimport (
    UNDER_WAY, colder_tier, copy_path, drop_children, drop_tail, give_up_copy, lacking, make_room_behind, quota_left, split,
    start,
)
from pagedkv._core.types cimport E_BLOCKS, EVICTED, MAX_GROUPS, NIL, OK


cdef void drop_dead_end(Place* p, int32_t n) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t parent, end, dead
    while t.nodes[n].length > 0:
        if (t.nodes[n].first_child != NIL or p.fates[n].tails or p.fates[n].transfer >= 0 or p.fates[n].copying >= 0
                or is_owned(p, n, node_top(t, n))):
            return
        parent, end = t.nodes[n].parent, t.nodes[n].depth + t.nodes[n].length
        dead = min(end % p.groups.free_every if p.groups.free_every else end, t.nodes[n].length)
        if dead == 0:
            return
        drop_tail(p, n, dead)
        if end - dead > t.nodes[parent].depth + t.nodes[parent].length:
            return
        n = parent


# The coldest run that may go from `tier`, of those colder than `point`: NIL without one. Runs with a point or a child are
# passed over, and behind a run without either there are few of them, as a parent is hotter than its children.
cdef int32_t coldest_run(Place* p, int32_t tier, int32_t point, int32_t domain, bint childless) noexcept nogil:
    cdef int32_t d, klass, n, found, best = NIL
    for d in range(p.num_domains):
        if domain >= 0 and d != domain:
            continue
        found = NIL
        for klass in range(NUM_CLASSES if point == NIL else p.fates[point].klass + 1):
            n = coldest(&p.links[tier], (d * NUM_CLASSES + klass) * 2)
            while n >= 0 and (point == NIL or klass < p.fates[point].klass or p.fates[n].last_use < p.fates[point].point):
                if may_go(p, tier, n, childless):
                    found = n
                    break
                n = p.links[tier].next[n]
            if found != NIL:
                break
        if found != NIL and (best == NIL or p.fates[found].klass < p.fates[best].klass
                             or (p.fates[found].klass == p.fates[best].klass
                                 and p.fates[found].last_use < p.fates[best].last_use)):
            best = found
    return best


# Whether all tiers below `tier` together could hold the path to the end of run n and its tail. One that they cannot would push
# out everything else there and then itself.
cdef bint fits_below(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef int32_t group, k = p.tree.nodes[n].depth + p.tree.nodes[n].length
    cdef int64_t extents
    cdef double fits = 0
    tier = colder_tier(p, tier)
    while tier != NIL and fits < 1:
        extents = 0
        for group in range(p.groups.num):
            extents += extents_for(p.groups.pools[tier][group], need(p.groups, group, k) if group else k)
        fits += <double>p.groups.pools[tier][0].extents.num / extents
        tier = colder_tier(p, tier)
    return fits >= 1


# Whether `tier` may have room later without more being done: transfers leave it, or runs there are being copied and no victims.
cdef bint may_come(Place* p, int32_t tier) noexcept nogil:
    return is_leaving(p, tier) or (p.closed[tier] and p.num_copying > 0)


# Whether a run or a point goes on to `lower` when it leaves `tier`; `copies`: a bit for each tier that has it. A run that
# the coldest tier mirrors goes to the tiers between all the same: from there it comes back sooner.
cdef bint goes_down(Place* p, uint32_t copies, int32_t tier, int32_t lower) noexcept nogil:
    cdef uint32_t others = copies & ~(<uint32_t>1 << tier)
    if lower == NIL or others == 0:
        return lower != NIL
    return (p.closed[p.coldest] and p.writes[p.coldest] >= WRITE_REUSED
            and others & ((<uint32_t>2 << lower) - 1) == 0)


# A closed tier gives up its copies of the path to run n, from its end on, as far as no request could go on behind them there:
# after a restart they would be freed. Those that lie nowhere else stay, for the points of hotter tiers.
cdef void give_up_path(Place* p, int32_t n, int32_t tier) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t parent, end
    while t.nodes[n].length > 0 and (t.nodes[n].tiers >> tier) & 1 and not has_point_in(p, n, tier):
        parent, end = t.nodes[n].parent, t.nodes[n].depth + t.nodes[n].length
        if (t.nodes[n].tiers == <uint32_t>1 << tier or p.fates[n].below[tier] > 0 or p.fates[n].transfer >= 0
                or p.fates[n].copying >= 0 or (p.groups.free_every and end % p.groups.free_every < t.nodes[n].length)
                or not give_up_copy(p, n, tier, t.nodes[n].length)):
            return
        n = parent


# ---- one leaves. True: something is free now, or will be; False: nothing more can be done now.

cdef bint evict_point(Place* p, int32_t n, int32_t tier, int32_t lower) noexcept nogil:
    cdef int64_t more[MAX_GROUPS]
    cdef int32_t generation = p.tree.nodes[n].generation
    cdef bint fits
    cdef int code
    if goes_down(p, p.fates[n].tails & POINTS, tier, lower) and fits_below(p, n, tier):
        while True:
            tail_lacks(p, n, lower, more)
            fits = make_room_for(p, lower, more)
            if p.tree.nodes[n].generation != generation or not has_point_in(p, n, tier):
                return True                         # it went along with a run below
            if not fits:
                if may_come(p, lower):
                    return False
                break                               # all there is held
            code = start_tail(p, n, tier, lower, False, NULL, EVICTED, 0)
            if code != E_BLOCKS:                    # making room took pages that the tail would have shared
                return code == OK
    point_leave(p, n, tier)
    if p.closed[tier]:
        give_up_path(p, n, tier)
    drop_dead_end(p, n)
    return True


cdef enum Demoted:
    STARTED             # or the run itself went when room was made below
    LATER               # room is being made there, or there is no memory
    NEVER               # all there is held

# The last k blocks of run n go down; to a closed tier behind the blocks of their path that lack there.
cdef Demoted demote_run(Place* p, int32_t n, int32_t tier, int32_t lower, int32_t k) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t length = t.nodes[n].length, generation = t.nodes[n].generation, before = 0
    cdef int64_t more[MAX_GROUPS]
    cdef int64_t group = -1
    cdef bint fits
    if p.closed[lower]:
        before = lacking(p, t.nodes[n].parent, lower)
        if before < 0:
            return LATER if before == UNDER_WAY else NEVER
        before += length - k
    memset(more, 0, sizeof(more))
    more[0] = before + k
    if more[0] > quota_left(p, n, lower):           # then its namespace's own coldest blocks go first, once all are there
        if p.in_flight > 0:
            return LATER
        if not p.closed[lower]:
            evict_blocks(p, lower, more[0] - quota_left(p, n, lower), p.domain_of[t.nodes[n].root])
        if t.nodes[n].generation != generation or t.nodes[n].length != length:
            return STARTED
    if p.closed[lower]:
        make_room_behind(p, n, lower, more, INT64_MAX)      # for the quota, too, and nothing of the path goes
    else:
        make_room_for(p, lower, more)
    if (t.nodes[n].generation != generation or t.nodes[n].length != length or p.fates[n].transfer >= 0
            or p.fates[n].copying >= 0):
        return STARTED
    fits = more[0] <= quota_left(p, n, lower) and lacks_extents(p, lower, more) <= 0
    if not fits:
        return LATER if may_come(p, lower) else NEVER
    if k < length and split(p, n, length - k) == NIL:
        return LATER
    if p.closed[lower] and not copy_path(p, t.nodes[n].parent, lower, before, EVICTED, &group):
        return LATER
    if start(p, n, tier, lower, False, group, EVICTED) != OK:
        return LATER
    set_top(p, n, lower)                            # for its parent it has left already
    p.pending[tier] += k
    return STARTED


cdef bint evict_run(Place* p, int32_t n, int32_t tier, int32_t lower, int64_t most) noexcept nogil:
    cdef Tree* t = p.tree
    cdef int32_t length = t.nodes[n].length, k = <int32_t>min(most, <int64_t>length), parent
    cdef Demoted demoted
    if not p.fates[n].failed and goes_down(p, t.nodes[n].tiers, tier, lower) and fits_below(p, n, tier):
        demoted = demote_run(p, n, tier, lower, k)
        if demoted != NEVER:
            return demoted == STARTED
    if t.nodes[n].tiers != <uint32_t>1 << tier:
        if p.closed[tier] and p.fates[n].tails & POINTS != 1 << tier:
            point_leave(p, n, tier)                 # of no use there without the run
        return give_up_copy(p, n, tier, k)
    if p.fates[n].tails & ~POINTS:
        return False
    point_drop(p, n)                                # it is in a colder tier, and of no use without the run
    if t.nodes[n].first_child != NIL:               # all of them are colder, and lost without it
        if not drop_children(p, n):
            return False
        drop_dead_end(p, n)
        return True
    parent = t.nodes[n].parent
    drop_tail(p, n, k)
    drop_dead_end(p, parent if k == length else n)
    return True


# `before`: nothing goes that was used at that clock, or later.
cdef bint evict_one(Place* p, int32_t tier, int64_t most, int32_t domain, int64_t before) noexcept nogil:
    cdef int32_t lower = colder_tier(p, tier), point = coldest_point(p, tier, domain)
    cdef int32_t run = coldest_run(p, tier, point, domain, lower == NIL)
    if run != NIL:
        return p.fates[run].last_use < before and evict_run(p, run, tier, lower, most)
    return point != NIL and p.fates[point].point < before and evict_point(p, point, tier, lower)


# ---- enough of them

# What transfers under way will free in `tier`, in extents.
cdef double leaving(Place* p, int32_t tier) noexcept nogil:
    cdef double extents = 0
    cdef int32_t group
    cdef Pool* pool
    for group in range(p.groups.num):
        pool = p.groups.pools[tier][group]
        extents += <double>(p.groups.pending[tier][group] if group else p.pending[tier]) * pool.span / pool.per_extent
    return extents


cdef bint is_leaving(Place* p, int32_t tier) noexcept nogil:
    return leaving(p, tier) > 0


cdef bint make_room_for(Place* p, int32_t tier, const int64_t* more) noexcept nogil:
    return make_room_before(p, tier, more, INT64_MAX)


cdef bint make_room_before(Place* p, int32_t tier, const int64_t* more, int64_t before) noexcept nogil:
    cdef Pool* pool = p.groups.pools[tier][0]
    cdef int64_t missing
    while True:
        missing = lacks_extents(p, tier, more)
        if missing <= 0:
            return True
        if (leaving(p, tier) >= missing
                or not evict_one(p, tier, (missing + pool.span - 1) // pool.span * pool.per_extent, -1, before)):
            return False


cdef void evict_blocks(Place* p, int32_t tier, int64_t want, int32_t domain) noexcept nogil:
    cdef int64_t goal = p.counters.dropped[tier] + p.counters.trimmed[tier] + p.pending[tier] + want, done = 0
    while True:
        done = p.counters.dropped[tier] + p.counters.trimmed[tier] + p.pending[tier]
        if done >= goal or not evict_one(p, tier, goal - done, domain, INT64_MAX):
            return
