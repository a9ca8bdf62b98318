# cython: language_level=3, boundscheck=False, wraparound=False
"""Calls into the core from threads that never hold the GIL, under the pool's mutex.

Without the mutex too, to see a race reported.
"""

from libc.stdint cimport int32_t

from pagedkv._core.block_pool cimport BlockPool, Pool, pool_alloc, pool_available, pool_free
from pagedkv._core.lock cimport Lock
from pagedkv._core.owners cimport place_acquire, place_blocks, place_release
from pagedkv._core.placement cimport Placement
from pagedkv._core.types cimport OK
from pagedkv.threads.pthread cimport pthread_mutex_lock, pthread_mutex_unlock


def churn(BlockPool pool, int32_t rounds, bint locked=True):
    """Take some blocks and give them back, `rounds` times.

    Returns how often there were too few; a negative number is another code.
    """
    cdef Pool* p = &pool.pool
    cdef Lock lock = pool.lock
    cdef int32_t ids[8]
    cdef int32_t i, n, bad = -1, refused = 0
    cdef int code = OK
    with nogil:
        for i in range(rounds):
            n = 1 + i % 8
            if locked:
                pthread_mutex_lock(&lock.mutex)
            code = pool_alloc(p, n, ids)
            if locked:
                pthread_mutex_unlock(&lock.mutex)
            if code != OK:
                refused += 1
                continue
            if locked:
                pthread_mutex_lock(&lock.mutex)
            code = pool_free(p, ids, n, &bad) if pool_available(p) >= 0 else OK
            if locked:
                pthread_mutex_unlock(&lock.mutex)
            if code != OK:
                break
    return refused if code == OK or refused else code


def match(Placement placement, const int32_t[::1] tokens, int32_t root, int32_t rounds):
    """Own the cached prefix of `tokens` and let it go, so many times. Blocks seen in all."""
    cdef Lock lock = placement.lock
    cdef int32_t ids[256]
    cdef int32_t _, owner
    cdef long seen = 0
    with nogil:
        for _ in range(rounds):
            pthread_mutex_lock(&lock.mutex)
            owner = place_acquire(&placement.place, root, &tokens[0], tokens.shape[0], 256)
            if owner >= 0:
                place_blocks(&placement.place, owner, ids)
                seen += placement.place.owners[owner].num_blocks
                place_release(&placement.place, owner)
            pthread_mutex_unlock(&lock.mutex)
    return seen
