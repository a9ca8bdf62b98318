"""Exact block hits of a single tier with foresight, which no online policy beats; and LRU.

Plain LRU is what policies are measured from.

A request hits its leading run of cached blocks. LRU and MIN (Belady) admit every block of a request (only the first
``capacity`` of a longer one), evict leaves only and never a block of the running request; MIN-bypass keeps after each
request the ``capacity`` blocks used again soonest, which bounds every demand-filled cache.

Why foresight is exact here: each use of a child uses its parent, so the parent's next use is never later. Victims are
ordered by (next use, depth), latest and deepest first; a child is always ahead of its parent, so the first in order is
always a leaf, and a heap that holds leaves alone suffices: one push a request, one an eviction.

Requests that take time. ``events`` (schedule.py) says when requests arrive and when they are over; from one to the other
a request holds its path, and what is held cannot leave. A request that finds no room beside the others' paths holds
the leading blocks that fit (``held_prefixes``). How many these are follows from the trace and the size of the device: a
cached block beyond them would lie in the cache beside all that is held, and would fit. So no policy chooses what is held,
and every policy has the same room for the rest. A policy chooses which blocks, used last by request j and next by request
i, it keeps until i: each takes one block of room from the moment when no request holds it until i. Among intervals of one
block each, where room is short at some moment, one that is there has to go; giving up the one that ends last leaves
at least as much room at every later moment as giving up another. That is MIN. So with ``events`` it has the most hits that
any policy can have, and it is the bound itself. There is no MIN-bypass above it: not keeping what a request computed is
evicting it when the request is over, which MIN does, and earlier than that it lies in memory. Capacity may be more
than the device that the held prefixes were cut for: then it is a bound for several tiers of that many blocks in all, in
which only the device holds what runs. LRU counts from when the last of its requests is over.

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
    """For each access, the number of the next request that uses that block.

    int32 [num_accesses]; NEVER if none does.
    """
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


def held_prefixes(
    const int32_t[::1] paths, const int64_t[::1] offsets, Py_ssize_t num_unique, const int32_t[::1] events,
    Py_ssize_t capacity
):
    """Leading blocks of each request that fit beside what others hold.

    In a cache of ``capacity`` blocks; int32 [num_requests].
    """
    cdef Py_ssize_t num_requests = _validate(paths, offsets, num_unique), e, i, a
    cdef Py_ssize_t used = 0
    cdef int32_t[::1] holders = np.zeros(num_unique, np.int32)
    result = np.zeros(num_requests, np.int32)
    cdef int32_t[::1] held = result
    _validate_events(events, num_requests)
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, not {capacity}")
    with nogil:
        for e in range(events.shape[0]):
            i = events[e] if events[e] >= 0 else ~events[e]
            a = offsets[i]
            if events[e] < 0:
                for a in range(offsets[i], offsets[i] + held[i]):
                    holders[paths[a]] -= 1
                    used -= holders[paths[a]] == 0
                continue
            while a < offsets[i + 1] and (holders[paths[a]] or used < capacity):
                used += holders[paths[a]] == 0
                holders[paths[a]] += 1
                a += 1
            held[i] = <int32_t> (a - offsets[i])
    return result


def lru_hits(paths, offsets, parents, Py_ssize_t capacity, events=None):
    """Hit blocks of leaf-first LRU with mandatory admission, int32 [num_requests].

    With ``events`` a request holds its path until it is over, and all that is held at once must fit in ``capacity``.
    """
    return _leaf_first(paths, offsets, parents, np.empty(0, np.int32), _events(events, offsets), capacity, LRU)


def min_hits(paths, offsets, parents, next_use, Py_ssize_t capacity, events=None):
    """Hit blocks of Belady's MIN, leaf-first, with mandatory admission, int32 [num_requests].

    With ``events`` a request holds its path until it is over, and all that is held at once must fit in ``capacity``.
    """
    if len(next_use) != len(paths):
        raise ValueError(f"next_use has {len(next_use)} entries, paths has {len(paths)}")
    return _leaf_first(paths, offsets, parents, next_use, _events(events, offsets), capacity, MIN)


cdef _events(events, offsets):
    """As given; by default every request is over as soon as it has come."""
    if events is not None:
        return events
    requests = np.arange(max(len(offsets) - 1, 0), dtype=np.int32)
    return np.stack((requests, ~requests), axis=1).reshape(-1)


cdef _leaf_first(
    const int32_t[::1] paths, const int64_t[::1] offsets, const int32_t[::1] parents, const int32_t[::1] uses,
    const int32_t[::1] events, Py_ssize_t capacity, int order
):
    cdef Py_ssize_t num_unique = parents.shape[0], num_requests = _validate(paths, offsets, num_unique)
    cdef Py_ssize_t e, i, j, start, kept, hit
    cdef Py_ssize_t used = 0
    cdef int32_t block, parent
    cdef Entry victim
    cdef uint8_t[::1] cached = np.zeros(num_unique, np.uint8)
    cdef int32_t[::1] children = np.zeros(num_unique, np.int32)
    cdef int32_t[::1] holders = np.zeros(num_unique, np.int32)
    cdef int64_t[::1] keys = np.zeros(num_unique, np.int64)
    result = np.zeros(num_requests, np.int32)
    cdef int32_t[::1] hits = result
    cdef Heap heap
    _validate_events(events, num_requests)
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, not {capacity}")
    heap.count, heap.room = 0, 1024
    heap.entries = <Entry *> malloc(heap.room * sizeof(Entry))
    if heap.entries == NULL:
        raise MemoryError("no memory for the heap of leaves")
    try:
        with nogil:
            for e in range(events.shape[0]):
                i = events[e] if events[e] >= 0 else ~events[e]
                start = offsets[i]
                kept = offsets[i + 1] - start
                if kept > capacity:
                    kept = capacity
                if kept == 0:
                    continue
                if events[e] < 0:
                    for j in range(kept):
                        block = paths[start + j]
                        holders[block] -= 1
                        if order == LRU:
                            keys[block] = (<int64_t> (C_NEVER - e) << 32) | j
                    block = paths[start + kept - 1]     # the others have a child: the next on the path
                    if children[block] == 0:
                        heap_push(&heap, keys[block], block)
                    continue
                hit = 0
                while hit < kept and cached[paths[start + hit]]:
                    hit += 1
                hits[i] = <int32_t> hit
                for j in range(kept):
                    block = paths[start + j]
                    holders[block] += 1
                    if order == MIN:
                        keys[block] = (<int64_t> uses[start + j] << 32) | j
                while capacity - used < kept - hit:
                    # What is cached and not held has a leaf below it that is not held either: the heap has it.
                    # A held leaf is dropped from the heap: it gains a child, or is pushed again when it is let go.
                    if heap.count == 0:
                        raise ValueError(f"requests hold more than {capacity} blocks at once: cut them to held_prefixes")
                    victim = heap_pop(&heap)
                    block = victim.block
                    if not cached[block] or children[block] or keys[block] != victim.key or holders[block]:
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
    finally:
        free(heap.entries)
    return result


def min_bypass_hits(
    const int32_t[::1] paths, const int64_t[::1] offsets, const int32_t[::1] parents, const int32_t[::1] next_use,
    Py_ssize_t capacity
):
    """Hit blocks of MIN with optional admission, int32 [num_requests].

    A bound above every demand-filled cache.
    """
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
    """Check the arrays: offsets rise from 0 to the end of paths, ids lie in 0..num_unique-1."""
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


cdef int _validate_events(const int32_t[::1] events, Py_ssize_t num_requests) except -1:
    """Every request comes once, and is over once after that."""
    cdef uint8_t[::1] seen = np.zeros(num_requests, np.uint8)
    cdef Py_ssize_t e, i
    cdef bint good = events.shape[0] == 2 * num_requests
    if good:
        for e in range(2 * num_requests):
            i = events[e] if events[e] >= 0 else ~events[e]
            good = i < num_requests and seen[i] == (events[e] < 0)
            if not good:
                break
            seen[i] += 1
    if not good:
        raise ValueError(f"events do not say when each of {num_requests} requests comes and when it is over")
    return 0
