"""What no online policy can beat, and plain LRU to measure from: exact block hits of a single tier with foresight.

A request hits its leading run of cached blocks. LRU and MIN (Belady) admit every block of a request (only the first
``capacity`` of a longer one), evict leaves only and never a block of the running request; MIN-bypass keeps after each
request the ``capacity`` blocks used again soonest, which bounds every demand-filled cache.

Why foresight is exact here: each use of a child uses its parent, so the parent's next use is never later. Victims are
ordered by (next use, depth), latest and deepest first; a child is always ahead of its parent, so the first in order is
always a leaf, and a heap that holds leaves alone suffices: one push a request, one an eviction.

A heap entry counts only while its block is cached, childless and its key unchanged; others are skipped when popped.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, malloc, realloc

import numpy as np

NEVER = 2**31 - 1

cdef enum:
    LRU = 0
    MIN = 1
    C_NEVER = 0x7FFFFFFF


cdef struct Entry:
    int64_t key    # (next use or age) << 32 | depth; the largest goes first
    int32_t block


cdef struct Heap:
    Entry *entries
    int64_t count, room


cdef int heap_push(Heap *heap, int64_t key, int32_t block) except -1 nogil:
    cdef int64_t i, above
    cdef Entry *grown
    if heap.count == heap.room:
        grown = <Entry *> realloc(heap.entries, 2 * heap.room * sizeof(Entry))
        if grown == NULL:
            raise MemoryError("no memory for the heap of leaves")
        heap.entries = grown
        heap.room *= 2
    i = heap.count
    heap.count += 1
    while i > 0:
        above = (i - 1) >> 1
        if heap.entries[above].key >= key:
            break
        heap.entries[i] = heap.entries[above]
        i = above
    heap.entries[i].key = key
    heap.entries[i].block = block
    return 0


cdef Entry heap_pop(Heap *heap) noexcept nogil:
    cdef Entry top = heap.entries[0], last
    cdef int64_t i = 0, below
    heap.count -= 1
    last = heap.entries[heap.count]
    while True:
        below = 2 * i + 1
        if below >= heap.count:
            break
        if below + 1 < heap.count and heap.entries[below + 1].key > heap.entries[below].key:
            below += 1
        if heap.entries[below].key <= last.key:
            break
        heap.entries[i] = heap.entries[below]
        i = below
    heap.entries[i] = last
    return top


def next_uses(const int32_t[::1] paths, const int64_t[::1] offsets, Py_ssize_t num_unique):
    """For each access the number of the next request that uses that block, NEVER if none: int32 [num_accesses]."""
    cdef Py_ssize_t num_requests = _validate(paths, offsets, num_unique), i, a
    cdef int32_t[::1] last = np.full(num_unique, C_NEVER, np.int32)
    result = np.empty(paths.shape[0], np.int32)
    cdef int32_t[::1] uses = result
    with nogil:
        for i in range(num_requests - 1, -1, -1):
            for a in range(offsets[i], offsets[i + 1]):
                uses[a] = last[paths[a]]
                last[paths[a]] = <int32_t> i
    return result


def lru_hits(paths, offsets, parents, Py_ssize_t capacity):
    """Leaf-first LRU with mandatory admission: hit blocks of each request, int32 [num_requests]."""
    return _leaf_first(paths, offsets, parents, np.empty(0, np.int32), capacity, LRU)


def min_hits(paths, offsets, parents, next_use, Py_ssize_t capacity):
    """Belady's MIN, leaf-first, with mandatory admission: hit blocks of each request, int32 [num_requests]."""
    if len(next_use) != len(paths):
        raise ValueError(f"next_use has {len(next_use)} entries, paths has {len(paths)}")
    return _leaf_first(paths, offsets, parents, next_use, capacity, MIN)


cdef _leaf_first(
    const int32_t[::1] paths, const int64_t[::1] offsets, const int32_t[::1] parents, const int32_t[::1] uses,
    Py_ssize_t capacity, int order
):
    cdef Py_ssize_t num_unique = parents.shape[0], num_requests = _validate(paths, offsets, num_unique)
    cdef Py_ssize_t i, j, start, length, kept, hit
    cdef Py_ssize_t used = 0
    cdef int32_t block, parent
    cdef Entry victim
    cdef uint8_t[::1] cached = np.zeros(num_unique, np.uint8)
    cdef int32_t[::1] children = np.zeros(num_unique, np.int32)
    cdef int32_t[::1] pinned_by = np.full(num_unique, -1, np.int32)
    cdef int64_t[::1] keys = np.zeros(num_unique, np.int64)
    result = np.zeros(num_requests, np.int32)
    cdef int32_t[::1] hits = result
    cdef Heap heap
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, not {capacity}")
    heap.count, heap.room = 0, 1024
    heap.entries = <Entry *> malloc(heap.room * sizeof(Entry))
    if heap.entries == NULL:
        raise MemoryError("no memory for the heap of leaves")
    try:
        with nogil:
            for i in range(num_requests):
                start = offsets[i]
                length = offsets[i + 1] - start
                hit = 0
                while hit < length and cached[paths[start + hit]]:
                    hit += 1
                hits[i] = <int32_t> hit
                kept = length if length <= capacity else capacity
                if kept == 0:
                    continue
                for j in range(kept):
                    block = paths[start + j]
                    pinned_by[block] = <int32_t> i
                    if order == MIN:
                        keys[block] = (<int64_t> uses[start + j] << 32) | j
                    else:
                        keys[block] = (<int64_t> (C_NEVER - i) << 32) | j
                while capacity - used < kept - hit:
                    # Never empty here: what is cached and not on this path has an unpinned leaf below it.
                    # A pinned leaf may be dropped from the heap: it gains a child, or is the path's end, pushed below.
                    victim = heap_pop(&heap)
                    block = victim.block
                    if not cached[block] or children[block] or keys[block] != victim.key or pinned_by[block] == i:
                        continue
                    cached[block] = 0
                    used -= 1
                    parent = parents[block]
                    if parent >= 0:
                        children[parent] -= 1
                        if children[parent] == 0:
                            heap_push(&heap, keys[parent], parent)
                for j in range(hit, kept):
                    block = paths[start + j]
                    cached[block] = 1
                    children[block] = 0
                    if j:
                        children[paths[start + j - 1]] += 1
                used += kept - hit
                block = paths[start + kept - 1]
                if children[block] == 0:
                    heap_push(&heap, keys[block], block)
    finally:
        free(heap.entries)
    return result


def min_bypass_hits(
    const int32_t[::1] paths, const int64_t[::1] offsets, const int32_t[::1] parents, const int32_t[::1] next_use,
    Py_ssize_t capacity
):
    """MIN with optional admission, above every demand-filled cache: hit blocks of each request, int32 [num_requests]."""
    cdef Py_ssize_t num_unique = parents.shape[0], num_requests = _validate(paths, offsets, num_unique)
    cdef Py_ssize_t i, j, start, length, kept, hit
    cdef Py_ssize_t used = 0
    cdef int32_t block, parent
    cdef Entry victim
    cdef uint8_t[::1] cached = np.zeros(num_unique, np.uint8)
    cdef int32_t[::1] children = np.zeros(num_unique, np.int32)
    cdef int64_t[::1] keys = np.zeros(num_unique, np.int64)
    result = np.zeros(num_requests, np.int32)
    cdef int32_t[::1] hits = result
    cdef Heap heap
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, not {capacity}")
    if next_use.shape[0] != paths.shape[0]:
        raise ValueError(f"next_use has {next_use.shape[0]} entries, paths has {paths.shape[0]}")
    heap.count, heap.room = 0, 1024
    heap.entries = <Entry *> malloc(heap.room * sizeof(Entry))
    if heap.entries == NULL:
        raise MemoryError("no memory for the heap of leaves")
    try:
        with nogil:
            for i in range(num_requests):
                start = offsets[i]
                length = offsets[i + 1] - start
                hit = 0
                while hit < length and cached[paths[start + hit]]:
                    hit += 1
                hits[i] = <int32_t> hit
                # Next uses never fall along a path: what is never used again is its tail, and so are those cached of it.
                kept = length
                while kept and next_use[start + kept - 1] == C_NEVER:
                    kept -= 1
                    block = paths[start + kept]
                    if cached[block]:
                        cached[block] = 0
                        used -= 1
                        if parents[block] >= 0:
                            children[parents[block]] -= 1
                for j in range(kept):
                    block = paths[start + j]
                    keys[block] = (<int64_t> next_use[start + j] << 32) | j
                    if not cached[block]:
                        cached[block] = 1
                        children[block] = 0
                        used += 1
                        if j:
                            children[paths[start + j - 1]] += 1
                if kept and children[paths[start + kept - 1]] == 0:
                    heap_push(&heap, keys[paths[start + kept - 1]], paths[start + kept - 1])
                while used > capacity:
                    victim = heap_pop(&heap)
                    block = victim.block
                    if not cached[block] or children[block] or keys[block] != victim.key:
                        continue
                    cached[block] = 0
                    used -= 1
                    parent = parents[block]
                    if parent >= 0:
                        children[parent] -= 1
                        if children[parent] == 0:
                            heap_push(&heap, keys[parent], parent)
    finally:
        free(heap.entries)
    return result


cdef Py_ssize_t _validate(const int32_t[::1] paths, const int64_t[::1] offsets, Py_ssize_t num_unique) except -1:
    """The arrays describe each other: offsets rise from 0 to the end of paths, ids lie in 0..num_unique-1."""
    cdef Py_ssize_t i, n = offsets.shape[0] - 1
    cdef bint good = n >= 0 and num_unique >= 0 and n < C_NEVER
    if good:
        good = offsets[0] == 0 and offsets[n] == paths.shape[0]
        for i in range(n):
            good = good and offsets[i] <= offsets[i + 1]
        for i in range(paths.shape[0]):
            good = good and 0 <= paths[i] < num_unique
    if not good:
        raise ValueError("paths, offsets and parents do not describe one trace")
    return n
