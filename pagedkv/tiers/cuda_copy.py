"""Copies of blocks to, from or on a GPU.

The copy engine takes a run of neighbours a call. Where a copy has many small runs, a kernel takes those together.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers.device import BlockKernel, DeviceLane, DeviceTier, import_cupy
from pagedkv.tiers.memory import piece_of

MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the two addresses
SMALL_RUN = 128 << 10  # bytes: a bus of 55 GB/s moves them in 2 to 3 us, which the host takes to call for them
FEW_RUNS = 16  # calls of 3 to 4 us of the host, together as long as the launch and its list take it

_local = threading.local()


def cuda_copy(
    src: Any,
    src_blocks: NDArray[np.int32],
    dst: Any,
    dst_blocks: NDArray[np.int32],
    gpu: int,
    device: DeviceTier | DeviceLane | None = None,
    kernel: BlockKernel | None = None,
    piece_bytes: int | None = None,
) -> None:
    """Copy blocks to, from or on a GPU, on this thread's own stream, and wait for them.

    Parameters
    ----------
    src, dst : uint8 [*, block_bytes], CuPy or NumPy (page-locked, or the copy is staged by the driver). The bytes of a
        block are adjacent; blocks may be apart.
    src_blocks, dst_blocks : int32 [n]. Neighbours in both are a run, where both have no bytes between blocks.
    gpu : CUDA device whose stream is used.
    device : the tier whose kernels are waited for before anything is copied.
    kernel : takes the runs below `SMALL_RUN` bytes if they are more than `FEW_RUNS`. None: the copy engine takes all,
        as it must for host memory that the GPU does not reach.
    piece_bytes : of host memory that are page-locked together, into which no copy may reach from the piece before.
        Default: as for an arena of these blocks.
    """
    cupy = import_cupy()
    block_bytes, src_stride, dst_stride = int(src.shape[1]), int(src.strides[0]), int(dst.strides[0])
    host = src_blocks if isinstance(src, np.ndarray) else dst_blocks if isinstance(dst, np.ndarray) else None
    pieces = None if host is None else host // ((piece_bytes or piece_of(block_bytes)) // block_bytes)
    if not src_stride == dst_stride == block_bytes:
        pieces = np.arange(src_blocks.size, dtype=np.int32)  # each block alone
    starts, counts = runs(src_blocks, dst_blocks, pieces)
    small = counts * block_bytes < SMALL_RUN
    if kernel is None or np.count_nonzero(small) <= FEW_RUNS:
        small[:] = False
    with cupy.cuda.Device(gpu):
        stream = _stream(cupy, gpu)
        if device is not None:
            device.wait_for_users(stream)
        try:
            if kernel is not None and small.any():
                listed = np.repeat(small, counts)
                kernel(src, src_blocks[listed], dst, dst_blocks[listed], stream)
            for start, count in zip(starts[~small].tolist(), counts[~small].tolist(), strict=True):
                cupy.cuda.runtime.memcpyAsync(
                    _address(dst) + int(dst_blocks[start]) * dst_stride,
                    _address(src) + int(src_blocks[start]) * src_stride,
                    count * block_bytes,
                    MEMCPY_DEFAULT,
                    stream.ptr,
                )
        finally:  # after an error too: its blocks are used again
            stream.synchronize()


def runs(
    src_blocks: NDArray[np.int32], dst_blocks: NDArray[np.int32], pieces: NDArray[np.int32] | None = None
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Cut two lists of block ids into runs that are consecutive in both.

    Returns where each begins, and its length. ``pieces`` says for each block in which piece of memory it lies: a run
    stays in one.
    """
    begins = np.ones(src_blocks.size, np.bool_)
    begins[1:] = (np.diff(src_blocks) != 1) | (np.diff(dst_blocks) != 1)
    if pieces is not None:
        begins[1:] |= np.diff(pieces) != 0
    starts = np.flatnonzero(begins)
    return starts, np.diff(starts, append=src_blocks.size)


def _address(arena: Any) -> int:
    return int(arena.ctypes.data) if isinstance(arena, np.ndarray) else int(arena.data.ptr)


def _stream(cupy: Any, gpu: int) -> Any:
    """This thread's copy stream on `gpu`: does not wait for, or hold up, the default stream."""
    streams: dict[int, Any] = _local.__dict__.setdefault("streams", {})
    if gpu not in streams:
        streams[gpu] = cupy.cuda.Stream(non_blocking=True)
    return streams[gpu]
