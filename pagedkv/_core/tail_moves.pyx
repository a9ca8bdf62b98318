"""Tails on their way between tiers."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from pagedkv._core.block_pool cimport COUNT, TREE, pool_alloc, pool_drop_one
from pagedkv._core.place cimport Place, Transfer
from pagedkv._core.radix_tree cimport node_pages
from pagedkv._core.tails cimport (
    LET, MARK, MOVING, POINTS, UNMARK, has_tail, holds_rise, lacks_extents, need, page_top, point_enter, point_leave, to_page,
)
from pagedkv._core.transfers cimport transfer_end, transfer_new
from pagedkv._core.types cimport (
    DEVICE, E_BLOCKS, E_MEMORY, E_STATE, EVICTED, MAX_GROUPS, NIL, OK, Move, Reason,
)
from pagedkv.threads.pthread cimport pthread_cond_signal

cdef enum:
    THERE = -2          # of a transfer's dst_ids: another one brought the page, or computed it, meanwhile


# ---- the pages of a tail, one after the other, the last block of each group first

cdef struct Walk:
    int32_t group
    int32_t block           # of the prefix
    int32_t first           # block of the group's tail
    int32_t n               # the run that has the block, and the block's place in it
    int32_t i
    int32_t j               # pages so far


cdef inline Walk walk_of(int32_t n) noexcept nogil:
    cdef Walk w
    w.group, w.block, w.first, w.n, w.i, w.j = 0, 0, 0, n, 0, -1
    return w


# `end`: the run at whose end the tail's boundary is. False behind the last page.
cdef inline bint walk_on(Place* p, int32_t end, Walk* w) noexcept nogil:
    cdef int32_t k = p.tree.nodes[end].depth + p.tree.nodes[end].length
    w.block -= 1
    while w.group == 0 or w.block < w.first:
        w.group += 1
        if w.group == p.groups.num:
            return False
        w.n, w.block, w.first = end, k - 1, k - need(p.groups, w.group, k)
    while p.tree.nodes[w.n].depth > w.block:
        w.n = p.tree.nodes[w.n].parent
    w.i = w.block - p.tree.nodes[w.n].depth
    w.j += 1
    return True


cdef inline int32_t* page_in(Place* p, const Walk* w, int32_t tier) noexcept nogil:
    return node_pages(p.tree, w.n, tier, w.group) + w.i


# ---- missing pages

cdef void tail_lacks(Place* p, int32_t n, int32_t tier, int64_t* more) noexcept nogil:
    cdef Walk w = walk_of(n)
    cdef int32_t group
    for group in range(MAX_GROUPS):
        more[group] = 0
    while walk_on(p, n, &w):
        more[w.group] += page_in(p, &w, tier)[0] == NIL


cdef bint tail_rises(Place* p, int32_t n) noexcept nogil:
    return rising_tail(p, n) >= 0


cdef int64_t rising_tail(Place* p, int32_t n) noexcept nogil:
    cdef int32_t slot
    for slot in range(p.transfers_capacity if p.fates[n].tails & ~POINTS else 0):
        if p.transfers[slot].node == n and p.transfers[slot].is_tail and p.transfers[slot].promotes:
            return p.transfers[slot].id
    return -1


cdef void tail_cold(Place* p, int32_t n, int64_t* more) noexcept nogil:
    cdef int32_t group
    tail_lacks(p, n, DEVICE, more)
    for group in range(MAX_GROUPS if tail_rises(p, n) else 0):
        more[group] = 0


# ---- transfers

# Whether a transfer moves a page: it lacks in `dst`, and is to come from its hottest tier.
cdef inline bint is_moved(Place* p, const Walk* w, int32_t src, int32_t dst) noexcept nogil:
    return page_in(p, w, dst)[0] == NIL and (src < dst or page_top(p.tree, w.n, w.group, w.i) == src)


# Whether a transfer of another tail copies a page down to `dst` already. On their way up, requests that share pages do not wait
# for each other.
cdef inline bint is_leaving(Place* p, const Walk* w, int32_t src, int32_t dst) noexcept nogil:
    return (p.groups.pools[src][w.group].leaving[page_in(p, w, src)[0]] >> dst) & 1


cdef int start_tail(
    Place* p, int32_t n, int32_t src, int32_t dst, bint copies, int64_t* group_id, Reason reason, int64_t until
) noexcept nogil:
    cdef Walk w = walk_of(n)
    cdef int32_t group, num_pages = 0, moved = 0, slot
    cdef int64_t more[MAX_GROUPS]
    cdef Transfer* t
    cdef Move* move
    for group in range(MAX_GROUPS):
        more[group] = 0
    while walk_on(p, n, &w):
        if is_moved(p, &w, src, dst):
            if is_leaving(p, &w, src, dst):
                return E_STATE
            more[w.group] += 1
        num_pages += 1
    if lacks_extents(p, dst, more) > 0:
        return E_BLOCKS
    slot = transfer_new(p, num_pages)
    if slot == NIL:
        return E_MEMORY
    t = &p.transfers[slot]
    t.node, t.src, t.dst, t.is_tail = n, <signed char>src, <signed char>dst, True
    t.promotes, t.copies = dst < src, copies
    t.number, t.until, t.clock = p.num_started, until, p.fates[n].point
    t.group = t.id if group_id == NULL or group_id[0] < 0 else group_id[0]
    for group in range(MAX_GROUPS):
        t.frees[group] = 0
    w = walk_of(n)
    while walk_on(p, n, &w):
        t.dst_ids[w.j] = NIL
        if not t.promotes and not copies and p.groups.pools[src][w.group].refs[page_in(p, &w, src)[0]] & COUNT == 1:
            t.frees[w.group] += 1
        if not is_moved(p, &w, src, dst):
            continue
        pool_alloc(p.groups.pools[dst][w.group], 1, &t.dst_ids[w.j])
        to_page(p, w.n, src, w.group, w.i, MARK)
        if not t.promotes:
            p.groups.pools[src][w.group].leaving[page_in(p, &w, src)[0]] |= <uint8_t>(1 << dst)
        move = &p.moves[p.num_moves + moved]
        move.transfer, move.src_tier, move.dst_tier = t.id, <signed char>src, <signed char>dst
        move.group, move.reason, move.lane = t.group, <signed char>reason, <signed char>w.group
        move.src_block, move.dst_block = page_in(p, &w, src)[0], t.dst_ids[w.j]
        move.node, move.depth = n, w.block
        moved += 1
    for group in range(p.groups.num):
        p.groups.pending[src][group] += t.frees[group]
    p.fates[n].tails |= <uint8_t>(MOVING << src)
    p.num_copying += copies
    p.num_reading[src] += t.promotes
    if moved == 0:                                  # all of it is there
        return finish_tail(p, slot, True, True)
    if group_id != NULL:
        group_id[0] = t.group
    p.num_started += 1
    p.num_moves += moved
    if p.decided != NULL:
        pthread_cond_signal(p.decided)
    return OK


cdef int promote_tail(Place* p, int32_t n, int64_t until) noexcept nogil:
    cdef Walk w
    cdef int32_t src, started = 0
    cdef int code
    if tail_rises(p, n):
        return 0
    for src in range(1, p.num_tiers):
        w = walk_of(n)
        while walk_on(p, n, &w):
            if is_moved(p, &w, src, DEVICE):
                code = start_tail(p, n, src, DEVICE, False, NULL, EVICTED, until)
                if code != OK:
                    return code
                started += 1
                break
    return started


cdef int32_t unowned_pages(Place* p, Transfer* t) noexcept nogil:
    cdef Walk w = walk_of(t.node)
    cdef int32_t pages = 0, page
    while walk_on(p, t.node, &w):
        if t.dst_ids[w.j] != NIL:
            page = page_in(p, &w, t.src)[0]
            pages += p.groups.pools[t.src][w.group].refs[page] & COUNT == p.groups.pools[t.src][w.group].marks[page]
    return pages


# Pages that have arrived join the tree; the transfer holds them still.
cdef void pages_arrive(Place* p, Transfer* t) noexcept nogil:
    cdef Walk w = walk_of(t.node)
    cdef int32_t* page
    while walk_on(p, t.node, &w):
        if t.dst_ids[w.j] == NIL:
            continue
        page = page_in(p, &w, t.dst)
        if page[0] != NIL:
            pool_drop_one(p.groups.pools[t.dst][w.group], t.dst_ids[w.j])
            t.dst_ids[w.j] = THERE
            continue
        page[0] = t.dst_ids[w.j]
        p.groups.pools[t.dst][w.group].refs[page[0]] |= TREE
        if t.promotes:
            holds_rise(p, w.n, t.dst, w.group, w.i)


# The transfer lets go of the pages that it wrote and read.
cdef void pages_let(Place* p, Transfer* t, bint arrived) noexcept nogil:
    cdef Walk w = walk_of(t.node)
    while walk_on(p, t.node, &w):
        if t.dst_ids[w.j] == NIL:
            continue
        if t.dst_ids[w.j] != THERE and arrived:
            to_page(p, w.n, t.dst, w.group, w.i, LET)
        elif t.dst_ids[w.j] != THERE:
            pool_drop_one(p.groups.pools[t.dst][w.group], t.dst_ids[w.j])
        if not t.promotes:
            p.groups.pools[t.src][w.group].leaving[page_in(p, &w, t.src)[0]] &= <uint8_t>~(1 << t.dst)
        to_page(p, w.n, t.src, w.group, w.i, UNMARK)


# Whether another transfer of the tail at the end of run n reads it from `src`.
cdef bint moves_from(Place* p, int32_t n, int32_t src) noexcept nogil:
    cdef int32_t slot
    for slot in range(p.transfers_capacity):
        if p.transfers[slot].node == n and p.transfers[slot].is_tail and p.transfers[slot].src == src:
            return True
    return False


cdef int finish_tail(Place* p, int32_t slot, bint succeeded, bint tried) noexcept nogil:
    cdef Transfer* t = &p.transfers[slot]
    cdef int32_t n = t.node, src = t.src, dst = t.dst, group
    cdef bint copies = t.copies
    cdef bint stays = not t.promotes and p.fates[n].point != t.clock       # a request came back for it, or it is gone
    for group in range(p.groups.num):
        p.groups.pending[src][group] -= t.frees[group]
    p.num_copying -= copies
    p.num_reading[src] -= t.promotes
    succeeded = succeeded and not p.fates[p.tree.nodes[n].root].failed
    if succeeded:
        pages_arrive(p, t)
        if (p.fates[n].point and (copies or not stays or p.inclusive[dst])
                and has_tail(p, n, p.tree.nodes[n].depth + p.tree.nodes[n].length, dst)):
            point_enter(p, n, dst)
            if not copies and not stays and not (t.promotes and p.inclusive[src]):
                point_leave(p, n, src)
    elif not copies and (tried if t.promotes else not stays):   # it cannot be read, or was to make room
        point_leave(p, n, src)
    pages_let(p, t, succeeded)
    transfer_end(p, slot)
    if not moves_from(p, n, src):
        p.fates[n].tails &= <uint8_t>~(MOVING << src)
    return OK
