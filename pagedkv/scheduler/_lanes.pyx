"""The lanes' table in C.

A column for each lane: its row, the step that gives it its last token, and its stop tokens. :mod:`lanes` owns the table
and has checked all arguments.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memmove

cnp.import_array()

cdef enum:
    ROW, LAST, STOPS        # lines of the table; lanes.py has the same
    NO_STOP = -1


cdef inline int64_t* data_of(cnp.ndarray table) noexcept:
    return <int64_t*>cnp.PyArray_DATA(table)


def are_tokens(cnp.ndarray tokens not None):
    """Whether all of `tokens` (int32 [n], contiguous) are 0 or more."""
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(tokens)
    cdef int32_t signs = 0
    cdef Py_ssize_t i
    for i in range(cnp.PyArray_SIZE(tokens)):
        signs |= data[i]
    return signs >= 0


def put(cnp.ndarray table not None, Py_ssize_t i, int64_t row, int64_t last, tuple stops not None):
    """Fill column i of the table.

    The table is contiguous int64 [STOPS + k, capacity], with k >= len(stops).
    """
    cdef int64_t* data = data_of(table)
    cdef Py_ssize_t capacity = cnp.PyArray_DIM(table, 1), j, k = len(stops)
    data[ROW * capacity + i], data[LAST * capacity + i] = row, last
    for j in range(cnp.PyArray_DIM(table, 0) - STOPS):
        data[(STOPS + j) * capacity + i] = <int64_t>stops[j] if j < k else NO_STOP


def drop(cnp.ndarray table not None, Py_ssize_t i, Py_ssize_t n):
    """Columns i + 1 .. n - 1 of the table move up by one."""
    cdef int64_t* data = data_of(table)
    cdef Py_ssize_t capacity = cnp.PyArray_DIM(table, 1), j
    for j in range(cnp.PyArray_DIM(table, 0)):
        memmove(data + j * capacity + i, data + j * capacity + i + 1, (n - 1 - i) * sizeof(int64_t))


def ended(cnp.ndarray table not None, cnp.ndarray tokens not None, int64_t now):
    """Lanes that end with this step's token, ascending: a stop token of theirs, or their last.

    Parameters
    ----------
    table : int64 [STOPS + k, capacity], contiguous
    tokens : int32 [n], contiguous, 0 or more; n <= capacity
    now : number of the step
    """
    cdef const int32_t* token = <const int32_t*>cnp.PyArray_DATA(tokens)
    cdef const int64_t* data = data_of(table)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(tokens), capacity = cnp.PyArray_DIM(table, 1), i, j
    cdef int32_t found = 0
    for i in range(n):                          # most steps end none: without branches first
        found |= data[LAST * capacity + i] <= now
    for j in range(STOPS, cnp.PyArray_DIM(table, 0)):
        for i in range(n):
            found |= data[j * capacity + i] == token[i]
    lanes = []
    if found:
        for i in range(n):
            found = data[LAST * capacity + i] <= now
            for j in range(STOPS, cnp.PyArray_DIM(table, 0)):
                found |= data[j * capacity + i] == token[i]
            if found:
                lanes.append(i)
    return lanes
