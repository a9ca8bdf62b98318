# cython: language_level=3, boundscheck=False, wraparound=False
"""Mistakes that the sanitizers for addresses and undefined behaviour have to report.

Each runs in a process of its own.
"""

from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc


def element(int32_t count, int32_t which):
    """Reads an element of an array, which may not be one."""
    cdef int32_t* ids = <int32_t*>malloc(count * sizeof(int32_t))
    cdef int32_t i, found = 0
    for i in range(count):
        ids[i] = i
    found = ids[which]
    free(ids)
    return found


def after_free(int32_t count):
    """Reads what was given back."""
    cdef int32_t* ids = <int32_t*>malloc(count * sizeof(int32_t))
    ids[0] = count
    free(ids)
    return ids[0]


def overflow(int32_t block, int32_t stride):
    """A block's offset in 32 bits."""
    return block * stride


def leak(size_t count):
    """Never gives back what it takes."""
    cdef char* forgotten = <char*>malloc(count)
    cdef char found
    forgotten[0] = <char>count
    found = forgotten[0]
    forgotten = NULL
    return found
