"""Checks of arrays before a kernel sees them.

Each error names the argument, its value, and the supported values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType
from pagedkv.kernels.batch import Batch
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.params import address

MAX_INT32 = 2**31 - 1


def check_shape(name: str, array: Any, shape: tuple[int | str, ...]) -> None:
    """Raise LayoutMismatch unless the shape fits.

    A string in ``shape`` names an axis of any length.
    """
    if not all(hasattr(array, attribute) for attribute in ("shape", "strides", "dtype")):
        raise WrongType(f"{name} must be an array, not {type(array).__name__}")
    found = array.shape
    if len(found) != len(shape) or any(isinstance(n, int) and n != m for n, m in zip(shape, found, strict=True)):
        raise LayoutMismatch(f"{name} must be [{', '.join(map(str, shape))}], got {list(found)}")


def check_dtype(name: str, array: Any, dtype: type[np.generic]) -> None:
    """Raise WrongType unless the array has exactly this dtype."""
    if array.dtype != np.dtype(dtype):
        raise WrongType(f"{name} must be {np.dtype(dtype).name}, got {array.dtype}")


def check_contiguous(name: str, array: Any) -> None:
    """Raise LayoutMismatch unless the elements lie in C order without gaps, and aligned."""
    if not array.flags.c_contiguous:
        raise LayoutMismatch(f"{name} must be contiguous, got strides {array.strides}")
    if address(array) % array.dtype.itemsize:
        raise LayoutMismatch(
            f"{name} must begin at a multiple of {array.dtype.itemsize} bytes, got address {address(array):#x}: copy it"
        )


def check_writable(name: str, array: Any) -> None:
    """Raise LayoutMismatch for an array of NumPy that is read-only."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise LayoutMismatch(f"{name} is read-only, and the result is written there")


def check_rows(name: str, array: Any, alignment: int) -> None:
    """Raise LayoutMismatch unless the last axis is contiguous and its rows are aligned.

    Every row must begin at a multiple of ``alignment`` bytes. An array without elements has no rows.
    """
    if not array.size:
        return
    item = array.dtype.itemsize
    if array.shape[-1] > 1 and array.strides[-1] != item:
        raise LayoutMismatch(f"the last axis of {name} must be contiguous, got strides {array.strides}")
    steps = [stride for stride, n in zip(array.strides[:-1], array.shape[:-1], strict=True) if n > 1]
    off = [stride for stride in steps if stride % alignment]
    if off or address(array) % alignment:
        raise LayoutMismatch(
            f"every row of {name} must begin at a multiple of {alignment} bytes: it begins at address "
            f"{address(array):#x} with strides {array.strides}; a smaller kv_alignment takes it, more slowly"
        )


def check_int32(name: str, array: Any, shape: tuple[int | str, ...]) -> None:
    """A contiguous int32 array of a shape."""
    check_shape(name, array, shape)
    check_dtype(name, array, np.int32)
    check_contiguous(name, array)


def check_tables(
    block_tables: np.ndarray[Any, Any],
    seq_lens: np.ndarray[Any, Any],
    begins: np.ndarray[Any, Any],
    ends: np.ndarray[Any, Any],
    num_blocks: int,
    block_size: int,
) -> None:
    """Check host-side block tables: every block with a key that is read must exist in the pool.

    Of a sequence the keys ``begins[seq]..ends[seq] - 1`` are read; where there are none, both are 0.

    Raises
    ------
    InvalidArgument
        A length is negative or longer than its row, or a needed id is outside 0..num_blocks - 1.
    """
    room = block_tables.shape[1] * block_size
    if seq_lens.size and (seq_lens.min() < 0 or seq_lens.max() > room):
        raise InvalidArgument(
            f"seq_lens must be in 0..{room} (the tokens of a row of block_tables), got {seq_lens.tolist()[:8]}"
        )
    columns = np.arange(block_tables.shape[1])
    needed = (columns >= begins[:, None] // block_size) & (columns < -(-ends[:, None] // block_size))
    bad = needed & ((block_tables < 0) | (block_tables >= num_blocks))
    if bad.any():
        seq, column = (int(i) for i in np.argwhere(bad)[0])
        raise InvalidArgument(
            f"block_tables[{seq}, {column}] is {block_tables[seq, column]}, but queries of sequence {seq} see keys "
            f"{begins[seq]}..{ends[seq] - 1} and the pool has blocks 0..{num_blocks - 1}"
        )


def check_indptr(name: str, indptr: np.ndarray[Any, Any]) -> None:
    """Host-side offsets: they rise from 0."""
    if indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
        raise InvalidArgument(f"{name} must rise from 0, got {indptr.tolist()[:8]}")


def check_values(
    batch: Batch, config: AttentionConfig, max_q_len: int, window: int, num_blocks: int | None
) -> None:
    """Check the values of a batch whose arrays are on the host.

    Raises
    ------
    InvalidArgument
    """
    if batch.kv_indptr is not None:
        check_indptr("kv_indptr", batch.kv_indptr)
        if (np.diff(batch.kv_indptr) < batch.seq_lens).any():
            raise InvalidArgument("kv_indptr gives a sequence fewer tokens than its seq_lens")
    q_lens: Any = np.ones_like(batch.seq_lens)
    if batch.q_indptr is not None:
        check_indptr("q_indptr", batch.q_indptr)
        q_lens = np.diff(batch.q_indptr)
        longest = int(q_lens.max(initial=0))
        if longest > max_q_len:
            raise InvalidArgument(f"a sequence has {longest} queries, but this was made for max_q_len = {max_q_len}")
    if batch.block_tables is not None:
        begins, ends = _reach(batch, q_lens, config.causal, window)
        blocks = MAX_INT32 if num_blocks is None else num_blocks
        check_tables(batch.block_tables, batch.seq_lens, begins, ends, blocks, config.block_size)


def _reach(batch: Batch, q_lens: np.ndarray[Any, Any], causal: bool, window: int) -> Any:
    """The first key that each sequence's queries see and one past the last; 0 and 0 for none.

    The foremost query sees the first and the last query the last; kernels read all between them.
    """
    lens = batch.seq_lens.astype(np.int64)
    if batch.position_spans is None:
        least, greatest = lens - q_lens, lens - 1
    else:
        least, greatest = batch.position_spans.astype(np.int64).T
    ends = np.clip(greatest + 1, 0, lens) if causal else lens
    begins = np.maximum(least + 1 - window, 0) if window else np.zeros_like(lens)
    return np.where((q_lens > 0) & (begins < ends), (begins, ends), 0)
