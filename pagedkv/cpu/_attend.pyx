"""Python bindings of the C attention kernels: memory-safety checks and one GIL release.

The caller, `pagedkv.cpu.attention`, checks shapes, dtypes and strides. This module checks ids and lengths in every
call, because a wrong one would read outside the arrays.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagedkv.errors import InvalidArgument, LayoutMismatch

cnp.import_array()

cdef extern from "attend_call.h" nogil:
    ctypedef enum dtype_t:
        F32
    ctypedef struct isa_t:
        const char *name
        int width
    ctypedef struct call_t:
        const void *q
        void *o
        float *lse
        const char *k
        const char *v
        const float *k_scale
        const float *v_scale
        const int32_t *tables
        const int32_t *kv_indptr
        const int32_t *seq_lens
        const int32_t *q_indptr
        const int32_t *q_positions
        const float *slopes
        const float *sinks
        const uint8_t *mask
        const int64_t *mask_indptr
        int64_t q_token, q_head, o_token, o_head
        int64_t k_block, k_token, k_head, v_block, v_token, v_head
        int64_t scale_block, scale_token, scale_head
        int64_t table_stride
        int num_seqs, num_kv_heads, group_size, head_dim, head_dim_v, block_size
        int window
        int causal
        int scale_per_token
        float scale, soft_cap
        dtype_t q_dtype, kv_dtype
    int c_attend "attend"(const call_t *call, const isa_t *isa, int threads)
    const isa_t *isa_of(const char *name)
    ctypedef struct span_t:
        int begin, end
    int MOST_HEAD_DIM, MOST_BLOCK_SIZE, MOST_KEYS
    span_t span_of(const call_t *c, int seq, int first, int count)
    int queries_of(const call_t *c, int seq)

cdef extern from "threads.h" nogil:
    void run_items(work_t work, void *argument, long items, int threads)

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "float8_e4m3": 4, "float8_e5m2": 5}


cdef void run_shared(work_t work, void *argument, long items, int threads) noexcept nogil:
    run_items(work, argument, items, threads)


def isas() -> list[str]:
    """Instruction sets that this CPU has kernels for, the best first."""
    return [name for name in ("avx512", "avx2", "portable") if isa_of(name.encode()) != NULL]


def plainly_fits(object q, object k, object v, object seq_lens, object block_tables, object q_indptr,
                 object out, object lse) -> bool:
    """Fast check of a paged call's arrays: True means that they are certainly valid.

    It costs a hundredth of the full check, which names the mistake.

    False where something is wrong, and where it is merely unusual: the long way then decides.
    """
    cdef cnp.ndarray a
    if not (cnp.PyArray_CheckExact(q) and cnp.PyArray_CheckExact(k) and cnp.PyArray_CheckExact(v)
            and cnp.PyArray_CheckExact(seq_lens) and cnp.PyArray_CheckExact(block_tables)
            and (q_indptr is None or cnp.PyArray_CheckExact(q_indptr))
            and (out is None or cnp.PyArray_CheckExact(out)) and (lse is None or cnp.PyArray_CheckExact(lse))):
        return False
    cdef cnp.ndarray q_ = q, k_ = k, v_ = v, lens = seq_lens
    if q_.ndim != 3 or k_.ndim != 4 or v_.ndim != 4 or lens.ndim != 1 or q_.shape[0] == 0 or k_.shape[0] == 0:
        return False
    if k_.shape[2] == 0 or q_.shape[1] == 0 or q_.shape[1] % k_.shape[2] or k_.shape[3] != q_.shape[2]:
        return False
    if k_.descr.type_num != v_.descr.type_num or k_.shape[0] != v_.shape[0] or k_.shape[1] != v_.shape[1] \
            or k_.shape[2] != v_.shape[2]:
        return False
    if not (has_rows(q_) and has_rows(k_) and has_rows(v_) and is_dense(lens, cnp.NPY_INT32)):
        return False
    a = block_tables
    if not is_dense(a, cnp.NPY_INT32) or a.ndim != 2 or a.shape[0] != lens.shape[0]:
        return False
    if q_indptr is not None:
        a = q_indptr
        if not is_dense(a, cnp.NPY_INT32) or a.ndim != 1 or a.shape[0] != lens.shape[0] + 1:
            return False
    if out is not None:
        a = out
        if a.ndim != 3 or a.shape[0] != q_.shape[0] or a.shape[1] != q_.shape[1] or a.shape[2] != v_.shape[3] \
                or a.descr.type_num != q_.descr.type_num or not has_rows(a) or not cnp.PyArray_ISWRITEABLE(a):
            return False
    if lse is not None:
        a = lse
        if not is_dense(a, cnp.NPY_FLOAT32) or a.ndim != 2 or a.shape[0] != q_.shape[0] or a.shape[1] != q_.shape[1] \
                or not cnp.PyArray_ISWRITEABLE(a):
            return False
    return True


cdef bint has_rows(cnp.ndarray a):
    """The last axis lies together, and every element begins at a multiple of its size."""
    cdef int axis
    cdef Py_ssize_t item = cnp.PyArray_ITEMSIZE(a)
    if a.strides[a.ndim - 1] != item or not cnp.PyArray_ISALIGNED(a) or not cnp.PyArray_ISNOTSWAPPED(a):
        return False
    for axis in range(a.ndim):
        if a.strides[axis] % item:
            return False
    return True


cdef bint is_dense(cnp.ndarray a, int kind):
    return (a.descr.type_num == kind and cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_ISALIGNED(a)
            and cnp.PyArray_ISNOTSWAPPED(a))


def attend(cnp.ndarray q not None, cnp.ndarray k not None, cnp.ndarray v not None, cnp.ndarray out not None,
           cnp.ndarray seq_lens not None, cnp.ndarray block_tables, cnp.ndarray q_indptr, cnp.ndarray kv_indptr,
           cnp.ndarray lse, cnp.ndarray slopes, cnp.ndarray sinks, cnp.ndarray mask, cnp.ndarray mask_indptr,
           cnp.ndarray q_positions, cnp.ndarray k_scale, cnp.ndarray v_scale, str q_dtype, str kv_dtype, int block_size,
           float scale, float soft_cap, int window, bint causal, int threads, str isa) -> None:
    """Attention of one layer into `out` and `lse`; see `pagedkv.cpu.attend`.

    Raises
    ------
    InvalidArgument
        An id or a length points outside the arrays, or there is no such instruction set. Nothing was written.
    MemoryError
        There is no room for partial results; `out` means nothing then.
    """
    cdef call_t c
    cdef const isa_t *chosen = isa_of(isa.encode())
    cdef int paged = block_tables is not None, done
    if chosen == NULL:
        raise InvalidArgument(f"there are no kernels {isa!r} here: {', '.join(isas())}")
    for name, found, most in (("head_dim", q.shape[2], MOST_HEAD_DIM), ("head_dim of v", v.shape[paged + 2], MOST_HEAD_DIM),
                              ("block_size", k.shape[1] if paged else 1, MOST_BLOCK_SIZE),
                              ("number of query heads", q.shape[1], MOST_KEYS), ("number of tokens", q.shape[0], MOST_KEYS),
                              ("number of places of k", k.shape[0], 2 ** 31 - 1 if paged else MOST_KEYS)):
        if not 0 < found <= most and not (found == 0 and name.startswith("number of") and name != "number of query heads"):
            raise LayoutMismatch(f"the {name} must be in 1..{most}, got {found}")
    c.q, c.o, c.k, c.v = data(q), data(out), <const char *> data(k), <const char *> data(v)
    c.lse, c.slopes, c.sinks = <float *> data(lse), <const float *> data(slopes), <const float *> data(sinks)
    c.k_scale, c.v_scale = <const float *> data(k_scale), <const float *> data(v_scale)
    c.tables, c.kv_indptr = <const int32_t *> data(block_tables), <const int32_t *> data(kv_indptr)
    c.seq_lens, c.q_indptr = <const int32_t *> data(seq_lens), <const int32_t *> data(q_indptr)
    c.q_positions = <const int32_t *> data(q_positions)
    c.mask, c.mask_indptr = <const uint8_t *> data(mask), <const int64_t *> data(mask_indptr)
    c.q_token, c.q_head = step(q, 0), step(q, 1)
    c.o_token, c.o_head = step(out, 0), step(out, 1)
    c.k_block, c.v_block = 0, 0
    if paged:
        c.k_block, c.v_block = step(k, 0), step(v, 0)
    c.k_token, c.k_head = step(k, paged), step(k, paged + 1)
    c.v_token, c.v_head = step(v, paged), step(v, paged + 1)
    c.scale_per_token = k_scale is not None and k_scale.ndim > 1
    c.scale_block, c.scale_token, c.scale_head = 0, 0, 0
    if c.scale_per_token:
        c.scale_block = step(k_scale, 0) if paged else 0
        c.scale_token, c.scale_head = step(k_scale, paged), step(k_scale, paged + 1)
    elif k_scale is not None and k_scale.shape[0] > 1:
        c.scale_head = step(k_scale, 0)
    c.table_stride = step(block_tables, 0) if paged else 0
    c.num_seqs = <int> seq_lens.shape[0]
    c.num_kv_heads = <int> k.shape[paged + 1]
    c.group_size = <int> (q.shape[1] // k.shape[paged + 1])
    c.head_dim, c.head_dim_v, c.block_size = <int> q.shape[2], <int> v.shape[paged + 2], block_size
    c.window, c.causal, c.scale, c.soft_cap = window, causal, scale, soft_cap
    c.q_dtype, c.kv_dtype = <dtype_t> <int> DTYPES[q_dtype], <dtype_t> <int> DTYPES[kv_dtype]
    if c.num_seqs == 0 or q.shape[0] == 0:
        return
    check_lengths(&c, q.shape[0], k.shape[0], block_tables.shape[1] if paged else 0,
                  mask.shape[0] if mask is not None else 0)
    with nogil:
        done = c_attend(&c, chosen, threads)
    if done < 0:
        raise MemoryError("partial results of attention")


cdef inline void *data(cnp.ndarray array) noexcept:
    return NULL if array is None else cnp.PyArray_DATA(array)


cdef inline int64_t step(cnp.ndarray array, int axis) noexcept:
    """Elements from one index of an axis to the next."""
    return cnp.PyArray_STRIDE(array, axis) // cnp.PyArray_ITEMSIZE(array)


cdef int check_lengths(const call_t *c, Py_ssize_t num_tokens, Py_ssize_t num_places, Py_ssize_t columns,
                       Py_ssize_t mask_bytes) except -1:
    """`num_places` are blocks of the pool, or tokens of contiguous KV."""
    cdef int seq, q_len, seq_len, column, block
    cdef span_t seen
    cdef int64_t room = columns * c.block_size
    if c.q_indptr == NULL and num_tokens != c.num_seqs:
        raise InvalidArgument(f"{num_tokens} queries for {c.num_seqs} sequences: several need q_indptr")
    if c.q_indptr != NULL and (c.q_indptr[0] != 0 or c.q_indptr[c.num_seqs] != num_tokens):
        raise InvalidArgument(f"q_indptr must rise from 0 to {num_tokens}, it goes from {c.q_indptr[0]} to "
                              f"{c.q_indptr[c.num_seqs]}")
    for seq in range(c.num_seqs):
        if c.q_indptr != NULL and c.q_indptr[seq + 1] < c.q_indptr[seq]:
            raise InvalidArgument(f"q_indptr must rise, but goes from {c.q_indptr[seq]} to {c.q_indptr[seq + 1]} at {seq}")
        q_len, seq_len = queries_of(c, seq), c.seq_lens[seq]
        if seq_len > MOST_KEYS:
            raise InvalidArgument(f"seq_lens[{seq}] is {seq_len}: at most {MOST_KEYS}")
        if seq_len < 0 or (c.tables != NULL and seq_len > room):
            raise InvalidArgument(f"seq_lens[{seq}] is {seq_len}, its row of block_tables holds 0..{room} keys")
        if c.mask != NULL:
            if c.mask_indptr[seq] < 0 or c.mask_indptr[seq + 1] > mask_bytes or \
                    c.mask_indptr[seq + 1] < c.mask_indptr[seq] or \
                    8 * (c.mask_indptr[seq + 1] - c.mask_indptr[seq]) < <int64_t> q_len * seq_len:
                raise InvalidArgument(f"the mask of sequence {seq} needs {<int64_t> q_len * seq_len} bits, it has bytes "
                                      f"{c.mask_indptr[seq]}..{c.mask_indptr[seq + 1]} of {mask_bytes}")
        if q_len == 0:
            continue
        if c.tables == NULL:
            if c.kv_indptr[seq] < 0 or <int64_t> c.kv_indptr[seq] + seq_len > num_places:
                raise InvalidArgument(f"sequence {seq} has {seq_len} keys from {c.kv_indptr[seq]} on, but there are "
                                      f"{num_places} tokens of K and V")
            continue
        seen = span_of(c, seq, 0, q_len)
        if seen.begin == seen.end:
            continue
        for column in range(seen.begin // c.block_size, (seen.end + c.block_size - 1) // c.block_size):
            block = c.tables[seq * c.table_stride + column]
            if block < 0 or block >= num_places:
                raise InvalidArgument(f"block_tables[{seq}, {column}] is {block}, but queries of sequence {seq} see keys "
                                      f"{seen.begin}..{seen.end - 1} and the pool has blocks 0..{num_places - 1}")
    return 0
