"""What a scheduler asks of all tokens of a report.

Is each a token, and which of them end their lanes.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

cnp.import_array()


def are_tokens(cnp.ndarray tokens not None):
    """Whether all of `tokens` (int32 [n], contiguous) are 0 or more."""
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(tokens)
    cdef int32_t signs = 0
    cdef Py_ssize_t i
    for i in range(cnp.PyArray_SIZE(tokens)):
        signs |= data[i]
    return signs >= 0


def stopped(cnp.ndarray stops not None, cnp.ndarray tokens not None):
    """Lanes whose token is one of their stop tokens, ascending.

    Parameters
    ----------
    stops : int64 [k, capacity], C-contiguous
        Column i has lane i's stop tokens; -1 stands for none.
    tokens : int32 [n], contiguous, 0 or more; n <= capacity
    """
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(tokens)
    cdef const int64_t* lines = <const int64_t*>cnp.PyArray_DATA(stops)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(tokens), k = cnp.PyArray_DIM(stops, 0), capacity = cnp.PyArray_DIM(stops, 1), i, j
    cdef int32_t found = 0
    for j in range(k):
        for i in range(n):
            found |= lines[j * capacity + i] == data[i]
    ended = []
    if not found:
        return ended
    for i in range(n):
        found = 0
        for j in range(k):
            found |= lines[j * capacity + i] == data[i]
        if found:
            ended.append(i)
    return ended
