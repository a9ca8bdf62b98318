"""Python bindings of write.c and merge.c, with one GIL release per call.

The callers, `pagedkv.cpu.kv_writer` and `pagedkv.cpu.merge`, have checked shapes, dtypes and slots. A wrong one here
would write outside the arrays.
"""

cimport numpy as cnp
from libc.stdint cimport int64_t

from pagedkv.cpu._attend cimport run_shared

cnp.import_array()

cdef extern from "write.h" nogil:
    enum:
        F32, F16, BF16, I8, F8_E4M3, F8_E5M2, F64
    ctypedef struct write_side_t:
        const char *from_ "from"
        char *to
        char *scale
        int64_t from_token, from_head, from_item
        int64_t to_block, to_token, to_head, to_item
        int64_t scale_block, scale_token, scale_head
        int64_t dim
        int from_type, to_type
    ctypedef struct write_call_t:
        write_side_t sides[2]
        const int64_t *slots
        int64_t num_tokens, block_size, num_heads
        int computed
        int *overflowed
    ctypedef void run_t(void (*work)(void *, long, int) noexcept nogil, void *argument, long items, int threads)
    void write_rows(const write_call_t *call, run_t *run, int threads)

cdef extern from "merge.h" nogil:
    ctypedef struct merge_call_t:
        const char *states
        const char *lses
        char *out
        char *lse
        int64_t states_state, states_token, states_head, states_item
        int64_t lses_state, lses_token, lses_head
        int64_t out_token, out_head, out_item
        int64_t lse_token, lse_head
        int64_t num_states, num_tokens, num_heads, dim
        int states_type, out_type
    void merge_rows(const merge_call_t *call, run_t *run, int threads)

SOURCES = {"float32": F32, "float16": F16, "bfloat16": BF16, "float64": F64}
CACHES = {"float32": F32, "float16": F16, "bfloat16": BF16, "int8": I8, "float8_e4m3": F8_E4M3, "float8_e5m2": F8_E5M2}
BYTES = "uint8"  # into a cache of the same, as they are


def plainly_fits(object k, object v, object k_cache, object v_cache, object slots) -> bool:
    """Fast check of a call without scales: True if its arrays are valid and share no memory.

    False where something is wrong, and where it is merely unusual: the full check then decides.
    """
    if not (cnp.PyArray_CheckExact(k) and cnp.PyArray_CheckExact(v) and cnp.PyArray_CheckExact(k_cache)
            and cnp.PyArray_CheckExact(v_cache) and cnp.PyArray_CheckExact(slots)):
        return False
    cdef cnp.ndarray places = slots, kc = k_cache, vc = v_cache
    cdef int64_t i, num_slots
    cdef const int64_t *at
    if kc.ndim != 4 or vc.ndim != 4 or kc.descr.type_num != vc.descr.type_num:
        return False
    if kc.shape[0] != vc.shape[0] or kc.shape[1] != vc.shape[1] or kc.shape[2] != vc.shape[2]:
        return False
    if places.ndim != 1 or places.descr.type_num != cnp.NPY_INT64 or not cnp.PyArray_ISCARRAY_RO(places):
        return False
    if not (is_row_of(k, places, kc) and is_row_of(v, places, vc)):
        return False
    if not (is_apart(k, kc) and is_apart(k, vc) and is_apart(v, kc) and is_apart(v, vc)):
        return False
    at, num_slots = <const int64_t *> cnp.PyArray_DATA(places), kc.shape[0] * kc.shape[1]
    for i in range(places.shape[0]):
        if at[i] >= num_slots:
            return False
    return True


cdef bint is_row_of(cnp.ndarray values, cnp.ndarray slots, cnp.ndarray cache):
    """Dense values, one row for each slot, for a cache that may be written."""
    return (values.ndim == 3 and values.shape[0] == slots.shape[0] and values.shape[1] == cache.shape[2]
            and values.shape[2] == cache.shape[3] and cnp.PyArray_ISCARRAY_RO(values)
            and cnp.PyArray_ISBEHAVED(cache))


cdef bint is_apart(cnp.ndarray values, cnp.ndarray cache):
    """Whether the dense `values` lie outside the cache's memory, first to last element."""
    cdef const char *begin = <const char *> cnp.PyArray_DATA(cache)
    cdef const char *end = begin + cnp.PyArray_ITEMSIZE(cache)
    cdef const char *first = <const char *> cnp.PyArray_DATA(values)
    cdef int axis
    for axis in range(cache.ndim):
        if cache.shape[axis] == 0:
            return True
        if cache.strides[axis] < 0:
            return False
        end += (cache.shape[axis] - 1) * cache.strides[axis]
    return first >= end or first + cnp.PyArray_NBYTES(values) <= begin


def write(cnp.ndarray k not None, cnp.ndarray v not None, cnp.ndarray k_cache not None, cnp.ndarray v_cache not None,
          cnp.ndarray slots not None, cnp.ndarray k_scale, cnp.ndarray v_scale, str k_dtype, str v_dtype, str kv_dtype,
          bint computed, int threads) -> bool:
    """K and V into slots, int64 and contiguous; see `pagedkv.cpu.kv_writer`.

    All dtypes are BYTES, or none is. Whether a finite number was stored as infinity.
    """
    cdef write_call_t call
    cdef int overflowed = 0
    cdef bint bytes_ = kv_dtype == BYTES
    cdef int to_type = I8 if bytes_ else CACHES[kv_dtype]  # between two of int8 nothing is converted
    side_of(&call.sides[0], k, k_cache, k_scale, I8 if bytes_ else SOURCES[k_dtype], to_type)
    side_of(&call.sides[1], v, v_cache, v_scale, I8 if bytes_ else SOURCES[v_dtype], to_type)
    call.slots, call.num_tokens = <const int64_t *> cnp.PyArray_DATA(slots), slots.shape[0]
    call.block_size, call.num_heads, call.computed = k_cache.shape[1], k_cache.shape[2], computed
    call.overflowed = &overflowed
    with nogil:
        write_rows(&call, run_shared, threads)
    return overflowed != 0


cdef int side_of(write_side_t *side, cnp.ndarray values, cnp.ndarray cache, cnp.ndarray scale, int from_type,
                 int to_type) except -1:
    side.from_, side.to = <const char *> cnp.PyArray_DATA(values), <char *> cnp.PyArray_DATA(cache)
    side.from_token, side.from_head, side.from_item = values.strides[0], values.strides[1], values.strides[2]
    side.to_block, side.to_token = cache.strides[0], cache.strides[1]
    side.to_head, side.to_item = cache.strides[2], cache.strides[3]
    side.dim, side.from_type, side.to_type = cache.shape[3], from_type, to_type
    side.scale, side.scale_block, side.scale_token, side.scale_head = NULL, 0, 0, 0
    if scale is not None:
        side.scale = <char *> cnp.PyArray_DATA(scale)
        if scale.ndim == 3:
            side.scale_block, side.scale_token, side.scale_head = scale.strides[0], scale.strides[1], scale.strides[2]
        elif scale.shape[0] > 1:
            side.scale_head = scale.strides[0]
    return 0


def merge(cnp.ndarray states not None, cnp.ndarray lses not None, cnp.ndarray out not None, cnp.ndarray lse,
          str states_dtype, str out_dtype, int threads) -> None:
    """Attention over disjoint keys, joined into `out` and `lse`; see `pagedkv.cpu.merge`."""
    cdef merge_call_t call
    call.states, call.lses = <const char *> cnp.PyArray_DATA(states), <const char *> cnp.PyArray_DATA(lses)
    call.states_state, call.states_token = states.strides[0], states.strides[1]
    call.states_head, call.states_item = states.strides[2], states.strides[3]
    call.lses_state, call.lses_token, call.lses_head = lses.strides[0], lses.strides[1], lses.strides[2]
    call.out, call.out_token = <char *> cnp.PyArray_DATA(out), out.strides[0]
    call.out_head, call.out_item = out.strides[1], out.strides[2]
    call.lse, call.lse_token, call.lse_head = NULL, 0, 0
    if lse is not None:
        call.lse, call.lse_token, call.lse_head = <char *> cnp.PyArray_DATA(lse), lse.strides[0], lse.strides[1]
    call.num_states, call.num_tokens = states.shape[0], states.shape[1]
    call.num_heads, call.dim = states.shape[2], states.shape[3]
    call.states_type, call.out_type = SOURCES[states_dtype], SOURCES[out_dtype]
    with nogil:
        merge_rows(&call, run_shared, threads)
