"""Python binding of gather.c, with one GIL release per call.

The caller, `pagedkv.cpu.kv_gatherer`, has checked shapes and dtypes. A wrong one here would read or write outside the arrays.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from pagedkv.cpu._attend cimport run_shared

from pagedkv.errors import InvalidArgument

cnp.import_array()

cdef extern from "gather.h" nogil:
    ctypedef struct gather_side_t:
        const char *from_ "from"
        char *to
        int64_t from_block, from_layer, from_token, from_head
        int64_t to_layer, to_token, to_head, to_item
        int64_t dim
    ctypedef struct gather_call_t:
        gather_side_t sides[2]
        const int32_t *blocks
        int64_t start, stop, block_size, num_layers, num_heads, item_bytes
    ctypedef void gather_run_t(void (*work)(void *, long, int) noexcept nogil, void *argument, long items, int threads)
    void gather_tokens(const gather_call_t *call, gather_run_t *run, int threads)


def gather(cnp.ndarray k not None, cnp.ndarray v not None, cnp.ndarray blocks not None, Py_ssize_t start,
           Py_ssize_t stop, cnp.ndarray k_out not None, cnp.ndarray v_out not None, int threads) -> None:
    """Tokens `start` to `stop` - 1 of K and V; see `pagedkv.cpu.kv_gatherer`.

    Raises
    ------
    InvalidArgument
        A token has no block, or a block id is none of the arena's. Nothing was written.
    """
    cdef gather_call_t call
    cdef Py_ssize_t column
    cdef int32_t block
    call.blocks, call.start, call.stop = <const int32_t *> cnp.PyArray_DATA(blocks), start, stop
    call.block_size, call.num_layers = k.shape[2], k.shape[1]
    call.num_heads, call.item_bytes = k.shape[3], cnp.PyArray_ITEMSIZE(k)
    if not 0 <= start <= stop <= blocks.shape[0] * k.shape[2]:
        raise InvalidArgument(f"tokens {start} to {stop} were asked for, and {blocks.shape[0]} blocks hold "
                              f"{blocks.shape[0] * k.shape[2]}")
    if start == stop:
        return
    for column in range(start // k.shape[2], (stop - 1) // k.shape[2] + 1):
        block = call.blocks[column]
        if not 0 <= block < k.shape[0]:
            raise InvalidArgument(f"blocks[{column}] is {block}, and the arena has blocks 0..{k.shape[0] - 1}")
    side_of(&call.sides[0], k, k_out)
    side_of(&call.sides[1], v, v_out)
    with nogil:
        gather_tokens(&call, run_shared, threads)


cdef void side_of(gather_side_t *side, cnp.ndarray cache, cnp.ndarray out):
    side.from_, side.to = <const char *> cnp.PyArray_DATA(cache), <char *> cnp.PyArray_DATA(out)
    side.from_block, side.from_layer = cache.strides[0], cache.strides[1]
    side.from_token, side.from_head = cache.strides[2], cache.strides[3]
    side.dim = cache.shape[4]
    side.to_layer, side.to_token, side.to_head, side.to_item = out.strides[0], out.strides[1], out.strides[2], out.strides[3]
