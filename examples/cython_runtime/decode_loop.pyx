# cython: language_level=3, boundscheck=False, wraparound=False
"""A runtime in Cython over pagedkv's core.

It allocates, matches and releases without Python and without the GIL.
"""

from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc

from pagedkv._core.block_pool cimport BlockPool, Pool, pool_alloc, pool_available, pool_free
from pagedkv._core.lock cimport Lock
from pagedkv._core.owners cimport place_acquire, place_blocks, place_release
from pagedkv._core.place cimport Place
from pagedkv._core.placement cimport Placement
from pagedkv._core.types cimport OK


# A pool's functions ask for its mutex: hold it for as long as several calls belong together.
def allocate_rounds(BlockPool pool, int32_t blocks, int32_t rounds):
    """Take `blocks` blocks and give them back, `rounds` times.

    ``(blocks free in between, code of the last free)``.
    """
    cdef Pool* p = &pool.pool
    cdef Lock lock = pool.lock
    cdef int32_t* ids = <int32_t*>malloc(max(1, blocks) * sizeof(int32_t))
    cdef int32_t i, bad = -1, left = -1
    cdef int code = OK
    if ids == NULL:
        raise MemoryError()
    lock.acquire()
    with nogil:
        for i in range(rounds):
            code = pool_alloc(p, blocks, ids)
            if code != OK:
                break
            left = pool_available(p)
            code = pool_free(p, ids, blocks, &bad)
            if code != OK:
                break
    lock.release()
    free(ids)
    return left, code


def matched_blocks(Placement placement, const int32_t[::1] tokens, int32_t root=0):
    """Own the longest cached prefix of `tokens`, read its block ids, let go: a list of ids."""
    cdef Place* p = &placement.place
    cdef Lock lock = placement.lock
    cdef int32_t owner, i, num_blocks = 0, block_size = p.tree.block_size
    cdef int32_t* ids = <int32_t*>malloc((tokens.shape[0] // block_size + 1) * sizeof(int32_t))
    if ids == NULL:
        raise MemoryError()
    lock.acquire()
    with nogil:
        owner = place_acquire(p, root, &tokens[0] if tokens.shape[0] else NULL, tokens.shape[0], -1)
        if owner >= 0:
            num_blocks = p.owners[owner].num_blocks
            place_blocks(p, owner, ids)
            place_release(p, owner)
    lock.release()
    try:
        if owner < 0:
            raise MemoryError()
        return [ids[i] for i in range(num_blocks)]
    finally:
        free(ids)
