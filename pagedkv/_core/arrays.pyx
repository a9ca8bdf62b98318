"""Arguments in: what callers pass as ids and tokens, as C-contiguous int32 or int64 arrays.

An int32 array is used as it is. A list is read digit by digit (CPython keeps an int below 2**30 in one digit), which
is three times faster than ``PyLong_AsLong``. Everything else goes through NumPy with a range check.
"""

import operator
from numbers import Real
import reprlib

import numpy as np

cimport numpy as cnp
from cpython.list cimport PyList_CheckExact, PyList_GET_SIZE
from libc.math cimport INFINITY
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t

from pagedkv.errors import InvalidArgument, WrongType

cnp.import_array()

cdef extern from *:
    """
    #include <Python.h>
    #include <stdint.h>
    /* The value of an exact int in one machine read where CPython's layout allows it; 0 and *ok = 0 otherwise. */
    static inline int64_t pkv_small_int(PyObject* o, int* ok) {
        if (!PyLong_CheckExact(o)) { *ok = 0; return 0; }
    #if PY_VERSION_HEX >= 0x030C0000
        if (PyUnstable_Long_IsCompact((PyLongObject*)o))
            return (int64_t)PyUnstable_Long_CompactValue((PyLongObject*)o);
    #else
        { Py_ssize_t size = Py_SIZE(o);
          if (size == 1) return (int64_t)((PyLongObject*)o)->ob_digit[0];
          if (size == 0) return 0; }
    #endif
        *ok = 0; return 0;
    }
    /* The value of any exact int that fits in 64 bits; *ok = 0 and no error set otherwise. */
    static inline int64_t pkv_int64(PyObject* o, int* ok) {
        int overflow = 0;
        long long value;
        if (!PyLong_CheckExact(o)) { *ok = 0; return 0; }
        value = PyLong_AsLongLongAndOverflow(o, &overflow);
        if (overflow) *ok = 0;
        return value;
    }
    /* Items [first, n) of a list into out, up to the first that is not a small exact int: its index, or n. */
    static inline Py_ssize_t pkv_small_ints(PyObject* list, Py_ssize_t first, Py_ssize_t n, int32_t* out) {
        PyObject** items = ((PyListObject*)list)->ob_item;
        Py_ssize_t i;
        for (i = first; i < n; i++) {
            int ok = 1;
            int64_t value;
            if (i + 32 < n) __builtin_prefetch(items[i + 32]);
            value = pkv_small_int(items[i], &ok);
            if (__builtin_expect(!ok || value > INT32_MAX, 0)) break;
            out[i] = (int32_t)value;
        }
        return i;
    }
    """
    int64_t pkv_int64(object o, int* ok) noexcept
    Py_ssize_t pkv_small_ints(object list_, Py_ssize_t first, Py_ssize_t n, int32_t* out) noexcept


cdef cnp.ndarray new_int32(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT32, 0)


cdef cnp.ndarray _from_list(list obj, str name):
    cdef Py_ssize_t i, n = PyList_GET_SIZE(obj)
    cdef cnp.ndarray out = new_int32(n)
    cdef int32_t* data = i32(out)
    cdef object item
    i = pkv_small_ints(obj, 0, n, data)
    while i < n:
        item = index_input(obj[i], f"{name}[{i}]")
        if not INT32_MIN <= item <= INT32_MAX:
            raise InvalidArgument(f"{name}[{i}] = {item} does not fit in int32")
        if PyList_GET_SIZE(obj) != n:       # __index__ ran foreign code
            raise InvalidArgument(f"{name} changed its length while it was read")
        data[i] = <int32_t>item
        i = pkv_small_ints(obj, i + 1, n, data)
    return out


cdef cnp.ndarray _integers(object obj, str name, int typenum, object low, object high):
    cdef cnp.ndarray array
    if isinstance(obj, (str, bytes, dict, set, float)) or obj is None:
        raise WrongType(f"{name} is {type(obj).__name__}: a one-dimensional sequence or array of integers is needed")
    try:
        array = np.asarray(obj)
    except (ValueError, TypeError, OverflowError) as error:
        raise WrongType(f"{name} cannot be read as an array of integers: {error}") from None
    if array.size == 0 and array.ndim == 1 and array.dtype.kind in "biufO":
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise WrongType(f"{name} has dtype {array.dtype} and {array.ndim} dimensions: one dimension of integers is needed")
    if cnp.PyArray_TYPE(array) != typenum and array.size and not (low <= int(array.min()) and int(array.max()) <= high):
        raise InvalidArgument(f"{name} holds values outside {low}..{high}")
    return cnp.PyArray_GETCONTIGUOUS(cnp.PyArray_Cast(array, typenum))


cdef cnp.ndarray int32_input(object obj, str name):
    if cnp.PyArray_Check(obj):
        if (cnp.PyArray_TYPE(obj) == cnp.NPY_INT32 and cnp.PyArray_NDIM(obj) == 1
                and cnp.PyArray_ISCARRAY_RO(obj)):
            return obj
    elif PyList_CheckExact(obj):
        return _from_list(obj, name)
    return _integers(obj, name, cnp.NPY_INT32, INT32_MIN, INT32_MAX)


cdef cnp.ndarray _int64_from_list(list obj):
    # None where an item is no plain int that fits: NumPy then finds the words for it.
    cdef Py_ssize_t i, n = PyList_GET_SIZE(obj)
    cdef cnp.npy_intp shape = n
    cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT64, 0)
    cdef int64_t* data = i64(out)
    cdef int ok = 1
    for i in range(n):
        data[i] = pkv_int64(obj[i], &ok)         # runs no foreign code, so the list stays as it is
    return out if ok else None


cdef cnp.ndarray int64_input(object obj, str name):
    cdef cnp.ndarray from_list
    if PyList_CheckExact(obj):
        from_list = _int64_from_list(obj)
        if from_list is not None:
            return from_list
    if (cnp.PyArray_Check(obj) and cnp.PyArray_TYPE(obj) == cnp.NPY_INT64 and cnp.PyArray_NDIM(obj) == 1
            and cnp.PyArray_ISCARRAY_RO(obj)):
        return obj
    return _integers(obj, name, cnp.NPY_INT64, -(2**63), 2**63 - 1)


cdef cnp.ndarray int32_inplace(object obj, str name):
    if not (cnp.PyArray_Check(obj) and cnp.PyArray_TYPE(obj) == cnp.NPY_INT32 and cnp.PyArray_NDIM(obj) == 1
            and cnp.PyArray_ISCARRAY(obj)):
        raise WrongType(f"{name} must be a one-dimensional, C-contiguous, writeable int32 array: it is rewritten in place")
    return obj


cdef cnp.ndarray tokens_input(object obj):
    return int32_input(obj, "tokens")


cdef object index_input(object obj, str name):
    return _index_in(obj, name, None)


# An exact int of an integer without a unit, or with this one: pagedkv.Blocks and pagedkv.Bytes name theirs in `unit`.
cdef object _index_in(object obj, str name, str unit):
    if type(obj) is int:
        return obj
    own = getattr(type(obj), "unit", None)
    if isinstance(own, str) and own != unit:
        raise WrongType(f"{name} is not in {own}: write a plain int, not {reprlib.repr(obj)}")
    if not isinstance(obj, bool):
        try:
            return int(operator.index(obj))         # an exact int: nothing of the caller's is asked again
        except TypeError:
            pass
    raise WrongType(f"{name} is {type(obj).__name__} {reprlib.repr(obj)}: an integer is needed")


cdef int64_t count_input(object obj, str name, int64_t low, int64_t high) except? -1:
    return _within(index_input(obj, name), name, low, high)


cdef int64_t blocks_input(object obj, str name, int64_t low, int64_t high) except? -1:
    return _within(_index_in(obj, name, "blocks"), name, low, high)


cdef int64_t _within(object value, str name, int64_t low, int64_t high) except? -1:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} = {value} is outside {low}..{high}")
    return <int64_t>value


cdef double seconds_input(object obj, str name) except? -1:
    if isinstance(obj, bool) or not isinstance(obj, Real):
        raise WrongType(f"{name} must be a number, not {type(obj).__name__}")
    if not obj >= 0:
        raise InvalidArgument(f"{name} must be 0 or more, not {obj}")
    return float(obj if obj == INFINITY else min(obj, 1e12))


cdef int64_t session_input(object obj) except? -1:
    return -1 if obj is None else count_input(obj, "session", 0, 2**63 - 1)


cdef double return_input(object obj) except? -1:
    return -1 if obj is None else seconds_input(obj, "expected_return_s")


cdef int64_t handle_input(object obj, str name) except? -1:
    value = index_input(obj, name)
    return <int64_t>value if 0 <= value < 1 << 63 else -1


cdef cnp.ndarray bool_input(object obj, str name):
    try:
        array = np.asarray(obj)
    except (ValueError, TypeError) as error:
        raise WrongType(f"{name} cannot be read as an array of bools: {error}") from None
    if array.ndim == 1 and array.size == 0:
        array = array.astype(np.bool_)
    if array.ndim != 1 or array.dtype != np.bool_:
        raise WrongType(f"{name} has dtype {array.dtype} and {array.ndim} dimensions: one dimension of bools is needed")
    return np.ascontiguousarray(array).view(np.uint8)
