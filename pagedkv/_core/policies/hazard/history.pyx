"""Pasts: records of used prefixes, cached or not. Decides nothing."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from pagedkv._core.links cimport (
    Links, coldest, int32s_grow, is_linked, link_hottest, links_close, links_grow, links_open, unlink,
)
from pagedkv._core.policies.hazard.past_table cimport slot_of, table_drop, table_grow, table_put
from pagedkv._core.types cimport E_MEMORY, NIL, OK, next_generation

cdef enum:
    SCAN = 64                   # pasts that cannot be forgotten are stepped over at most this often in a stage


cdef int history_open(History* h, int64_t max_blocks, int64_t lru_capacity) noexcept nogil:
    memset(h, 0, sizeof(History))
    h.free_past = NIL
    h.max_blocks, h.lru_capacity = max_blocks, lru_capacity
    h.mask = 1023
    h.table = <int32_t*>malloc(1024 * sizeof(int32_t))
    if h.table == NULL or not links_open(&h.ages, NUM_STAGES) or not links_open(&h.recency, 1):
        history_close(h)
        return E_MEMORY
    memset(h.table, 0xFF, 1024 * sizeof(int32_t))
    return OK


cdef void history_close(History* h) noexcept nogil:
    cdef int32_t p
    for p in range(h.num_pasts):
        free(h.pasts[p].keys)
    free(h.pasts)
    free(h.table)
    free(h.of_root)
    links_close(&h.ages)
    links_close(&h.recency)
    memset(h, 0, sizeof(History))


cdef int history_ensure(History* h, int32_t extra) noexcept nogil:
    cdef int32_t used = h.num_live + h.num_retired, capacity = h.capacity
    cdef Past* grown
    if capacity - used < extra:
        while capacity - used < extra:
            capacity = capacity * 2 if capacity else 256
        grown = <Past*>realloc(h.pasts, capacity * sizeof(Past))
        if grown == NULL:
            return E_MEMORY
        h.pasts = grown
        if not links_grow(&h.ages, h.capacity, capacity) or not links_grow(&h.recency, h.capacity, capacity):
            return E_MEMORY
        h.capacity = capacity
    return table_grow(h, extra)


cdef int history_roots(History* h, int32_t capacity) noexcept nogil:
    if capacity <= h.roots_capacity:
        return OK
    if not int32s_grow(&h.of_root, capacity):
        return E_MEMORY
    memset(h.of_root + h.roots_capacity, 0, (capacity - h.roots_capacity) * sizeof(int32_t))
    h.roots_capacity = capacity
    return OK


cdef int32_t take_id(History* h) noexcept nogil:
    cdef int32_t p = h.free_past, generation = 0        # a new id's memory was never written
    if p == NIL:
        p = h.num_pasts
        h.num_pasts += 1
    else:
        h.free_past = h.pasts[p].parent
        generation = h.pasts[p].generation
    memset(&h.pasts[p], 0, sizeof(Past))
    h.pasts[p].generation = generation
    h.pasts[p].first_child = h.pasts[p].next_sibling = h.pasts[p].prev_sibling = NIL
    h.num_live += 1
    return p


cdef void give_id(History* h, int32_t p) noexcept nogil:
    free(h.pasts[p].keys)
    h.of_root[h.pasts[p].root] -= 1
    h.pasts[p].keys = NULL
    h.pasts[p].length = 0
    h.num_live -= 1
    if next_generation(&h.pasts[p].generation):
        h.pasts[p].parent = h.free_past
        h.free_past = p
    else:
        h.num_retired += 1


cdef void adopt_child(History* h, int32_t parent, int32_t p) noexcept nogil:
    cdef Past* past = &h.pasts[p]
    past.parent, past.prev_sibling, past.next_sibling = parent, NIL, NIL
    if parent != NIL:
        past.next_sibling = h.pasts[parent].first_child
        if past.next_sibling != NIL:
            h.pasts[past.next_sibling].prev_sibling = p
        h.pasts[parent].first_child = p


cdef void leave_parent(History* h, int32_t p) noexcept nogil:
    cdef Past* past = &h.pasts[p]
    if past.next_sibling != NIL:
        h.pasts[past.next_sibling].prev_sibling = past.prev_sibling
    if past.prev_sibling != NIL:
        h.pasts[past.prev_sibling].next_sibling = past.next_sibling
    elif past.parent != NIL:
        h.pasts[past.parent].first_child = past.next_sibling


cdef int32_t history_child(History* h, int32_t parent, uint64_t key) noexcept nogil:
    cdef int64_t slot = slot_of(h, key)
    cdef int32_t p = h.table[slot]
    while p >= 0:
        if h.pasts[p].keys[0] == key and h.pasts[p].parent == parent:
            return p
        slot = (slot + 1) & h.mask
        p = h.table[slot]
    return NIL


cdef int32_t history_common(History* h, int32_t p, const uint64_t* keys, int32_t num_blocks) noexcept nogil:
    # A hash stands for the whole prefix: equal at k means equal before k, so the first difference is found by halving.
    cdef Past* past = &h.pasts[p]
    cdef int32_t low = 0, high = past.length if past.length < num_blocks else num_blocks, middle
    if high > 0 and past.keys[high - 1] == keys[high - 1]:
        return high
    while low < high:
        middle = (low + high) >> 1
        if past.keys[middle] == keys[middle]:
            low = middle + 1
        else:
            high = middle
    return low


cdef int32_t history_new(History* h, int32_t root, int32_t parent, const uint64_t* keys, int32_t length) noexcept nogil:
    cdef uint64_t* copy = <uint64_t*>malloc(length * sizeof(uint64_t))
    cdef int32_t p
    cdef Past* past
    if copy == NULL:
        return NIL
    memcpy(copy, keys, length * sizeof(uint64_t))
    p = take_id(h)
    past = &h.pasts[p]
    past.root = root
    h.of_root[root] += 1
    past.keys, past.length, past.capacity = copy, length, length
    past.depth = h.pasts[parent].depth + h.pasts[parent].length if parent != NIL else 0
    past.last_gap = past.mean_gap = past.least_gap = past.output = -1
    past.rated = -1
    adopt_child(h, parent, p)
    table_put(h, p)
    h.num_blocks += length
    return p


cdef inline void link_above(Links* links, int32_t upper, int32_t p) noexcept nogil:
    cdef int32_t hotter = links.next[p]
    links.prev[upper], links.next[upper] = p, hotter
    links.next[p] = upper
    if hotter >= 0:
        links.prev[hotter] = upper
    else:
        links.ends[2 * ~hotter + 1] = upper


cdef inline int64_t lacks(Past* past) noexcept nogil:
    return past.lru - past.kept if past.lru > past.kept and past.users == 0 else 0


cdef int32_t history_split(History* h, int32_t p, int32_t k) noexcept nogil:
    cdef uint64_t* keys = <uint64_t*>malloc(k * sizeof(uint64_t))
    cdef int32_t upper, generation
    cdef Past* a
    cdef Past* b
    if keys == NULL:
        return NIL
    upper = take_id(h)
    a, b = &h.pasts[upper], &h.pasts[p]
    generation = a.generation
    table_drop(h, p)
    leave_parent(h, p)
    a[0] = b[0]
    h.of_root[a.root] += 1
    a.generation = generation
    a.first_child = NIL
    a.keys, a.length, a.capacity = keys, k, k
    memcpy(keys, b.keys, k * sizeof(uint64_t))
    b.length -= k
    b.depth += k
    memmove(b.keys, b.keys + k, b.length * sizeof(uint64_t))
    a.tail += b.length
    a.lru = min(a.lru, k)
    a.kept = min(a.kept, k)
    b.lru -= a.lru
    a.had = min(a.had, k)
    b.had -= a.had
    b.kept -= a.kept
    adopt_child(h, a.parent, upper)
    adopt_child(h, upper, p)
    table_put(h, upper)
    table_put(h, p)
    if is_linked(&h.ages, p):           # next to each other in every list, the upper half hotter
        link_above(&h.ages, upper, p)
    if is_linked(&h.recency, p):
        if b.lru == 0:
            link_above(&h.recency, upper, p)
            unlink(&h.recency, p)
        else:
            link_above(&h.recency, upper, p)
    return upper


cdef bint history_join(History* h, int32_t p) noexcept nogil:
    cdef Past* a = &h.pasts[p]
    cdef int32_t child = a.first_child, room
    cdef Past* b = &h.pasts[child]
    cdef uint64_t* keys
    cdef bint in_recency = is_linked(&h.recency, child)
    if a.length + b.length > a.capacity:        # its keys grow in place, turn by turn
        room = 2 * (a.length + b.length)
        keys = <uint64_t*>realloc(a.keys, room * sizeof(uint64_t))
        if keys == NULL:
            return False
        a.keys, a.capacity = keys, room
    table_drop(h, p)
    table_drop(h, child)
    leave_parent(h, child)
    leave_parent(h, p)
    memcpy(a.keys + a.length, b.keys, b.length * sizeof(uint64_t))
    keys, a.keys = a.keys, b.keys
    b.keys, b.capacity = keys, a.capacity
    h.lacking -= lacks(a) + lacks(b)
    b.length += a.length
    b.depth = a.depth
    b.lru += a.lru
    b.kept += a.kept
    h.lacking += lacks(b)
    adopt_child(h, a.parent, child)
    table_put(h, child)
    if is_linked(&h.recency, p):
        if not in_recency:
            link_above(&h.recency, child, p)
        unlink(&h.recency, p)
    if is_linked(&h.ages, p):
        unlink(&h.ages, p)
    give_id(h, p)
    return True


cdef void history_keep(History* h, int32_t p, int32_t kept) noexcept nogil:
    cdef Past* past = &h.pasts[p]
    h.lacking -= lacks(past)
    past.kept = kept
    h.lacking += lacks(past)


cdef void history_lru_set(History* h, int32_t p, int32_t lru) noexcept nogil:
    cdef Past* past = &h.pasts[p]
    h.lacking -= lacks(past)
    h.lru_blocks += lru - past.lru
    past.lru = lru
    h.lacking += lacks(past)


cdef void history_touch(History* h, int32_t p) noexcept nogil:
    history_lru_set(h, p, h.pasts[p].length)
    if h.pasts[p].users == 0:
        if is_linked(&h.recency, p):
            unlink(&h.recency, p)
        link_hottest(&h.recency, 0, p)


cdef void history_hold(History* h, int32_t p) noexcept nogil:
    h.lacking -= lacks(&h.pasts[p])
    if h.pasts[p].users == 0:
        h.pasts[p].had = h.pasts[p].lru
    h.pasts[p].users += 1
    if is_linked(&h.recency, p):
        unlink(&h.recency, p)


cdef void history_let_go(History* h, int32_t p) noexcept nogil:
    h.pasts[p].users -= 1
    h.lacking += lacks(&h.pasts[p])
    if h.pasts[p].users == 0 and h.pasts[p].lru > 0:
        link_hottest(&h.recency, 0, p)


cdef int64_t history_lru_fit(History* h) noexcept nogil:
    cdef int64_t surplus = h.lru_blocks + h.lru_reserved - h.lru_capacity
    cdef int32_t p = coldest(&h.recency, 0), gone
    while surplus > 0 and p >= 0:
        gone = <int32_t>min(surplus, <int64_t>h.pasts[p].lru)
        history_lru_set(h, p, h.pasts[p].lru - gone)
        surplus -= gone
        if h.pasts[p].lru == 0:
            unlink(&h.recency, p)
        p = coldest(&h.recency, 0)
    return surplus


cdef void history_stage(History* h, int32_t p, int32_t stage) noexcept nogil:
    if is_linked(&h.ages, p):
        unlink(&h.ages, p)
    h.pasts[p].stage = <unsigned char>stage
    link_hottest(&h.ages, stage, p)


cdef void history_wait(History* h, int32_t p, double now) noexcept nogil:
    h.pasts[p].born = now
    h.pasts[p].learned = h.pasts[p].bin = 0
    history_stage(h, p, 0)


cdef void history_drop(History* h, int32_t p) noexcept nogil:
    table_drop(h, p)
    leave_parent(h, p)
    if is_linked(&h.ages, p):
        unlink(&h.ages, p)
    h.num_blocks -= h.pasts[p].length
    give_id(h, p)


cdef void history_forget(History* h) noexcept nogil:
    cdef int32_t stage = NUM_STAGES - 1, p, following, tries
    while h.num_blocks > h.max_blocks and stage >= 0:
        p, tries = coldest(&h.ages, stage), SCAN
        while p >= 0 and h.num_blocks > h.max_blocks and tries > 0:
            following = h.ages.next[p]
            if h.pasts[p].first_child == NIL and h.pasts[p].lru == 0 and h.pasts[p].kept == 0:
                history_drop(h, p)
            else:
                history_stage(h, p, stage)      # or those that stay would hide all others from the next scan
                tries -= 1
            p = following
        stage -= 1


cdef void history_purge(History* h, int32_t root) noexcept nogil:
    cdef int32_t p
    if root >= h.roots_capacity or h.of_root[root] == 0:
        return
    for p in range(h.num_pasts):        # whole trees go: no past's parent or child is of another namespace
        if h.pasts[p].length > 0 and h.pasts[p].root == root:
            history_lru_set(h, p, 0)
            history_keep(h, p, 0)
            if is_linked(&h.recency, p):
                unlink(&h.recency, p)
            if is_linked(&h.ages, p):
                unlink(&h.ages, p)
            table_drop(h, p)
            h.num_blocks -= h.pasts[p].length
            give_id(h, p)


cdef void history_lru_clear(History* h) noexcept nogil:
    cdef int32_t p = coldest(&h.recency, 0), hotter
    while p >= 0:
        hotter = h.recency.next[p]
        history_lru_set(h, p, min(h.pasts[p].lru, h.pasts[p].kept))
        if h.pasts[p].lru == 0:
            unlink(&h.recency, p)
        p = hotter


cdef int64_t history_bytes(History* h) noexcept nogil:
    cdef int64_t keys = 0
    cdef int32_t p
    for p in range(h.num_pasts):
        keys += h.pasts[p].capacity if h.pasts[p].keys != NULL else 0
    return (h.capacity * (sizeof(Past) + 4 * sizeof(int32_t)) + (h.mask + 1 + h.roots_capacity) * sizeof(int32_t)
            + keys * sizeof(uint64_t))
