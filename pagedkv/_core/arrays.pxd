# Arguments in: checked NumPy arrays and tokens. No copy where the caller's array already has the right form.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

cdef cnp.ndarray int32_input(object obj, str name)      # int32, C-contiguous, any integer sequence accepted
cdef cnp.ndarray int64_input(object obj, str name)
cdef cnp.ndarray int32_inplace(object obj, str name)    # int32, C-contiguous, writeable: never copied
cdef cnp.ndarray tokens_input(object obj)
cdef cnp.ndarray bool_input(object obj, str name)       # uint8 view of bools [n]
cdef cnp.ndarray new_int32(Py_ssize_t n)
cdef object index_input(object obj, str name)             # an exact int
cdef int64_t count_input(object obj, str name, int64_t low, int64_t high) except? -1     # no Blocks, no Bytes
cdef int64_t blocks_input(object obj, str name, int64_t low, int64_t high) except? -1    # Blocks too; no Bytes
cdef double seconds_input(object obj, str name) except? -1      # 0 or more; infinity too
cdef int64_t session_input(object obj) except? -1               # a number from 0; None: -1
cdef double return_input(object obj) except? -1                 # seconds until an expected return; None: -1
cdef int64_t handle_input(object obj, str name) except? -1     # what is no int64 >= 0 names nothing: -1

cdef inline int32_t* i32(cnp.ndarray a) noexcept:
    return <int32_t*>cnp.PyArray_DATA(a)

cdef inline int64_t* i64(cnp.ndarray a) noexcept:
    return <int64_t*>cnp.PyArray_DATA(a)
