import numpy as np
from numpy.typing import NDArray

MIN_SUMMED: int
SUM_LEVEL: int

def copy_blocks(
    src: NDArray[np.uint8],
    src_blocks: NDArray[np.int32],
    dst: NDArray[np.uint8],
    dst_blocks: NDArray[np.int32],
) -> None: ...
def file_read(
    fds: NDArray[np.int32],
    offsets: NDArray[np.int64],
    headers: NDArray[np.uint8],
    rows: NDArray[np.uint8],
    indices: NDArray[np.int32],
    outcomes: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    sums: NDArray[np.uint64],
    *,
    whole: bool = False,
) -> None: ...
def mapping_read(
    addresses: NDArray[np.int64],
    headers: NDArray[np.uint8],
    rows: NDArray[np.uint8],
    indices: NDArray[np.int32],
    outcomes: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    sums: NDArray[np.uint64],
) -> None: ...
def file_write(
    fds: NDArray[np.int32],
    offsets: NDArray[np.int64],
    rows: NDArray[np.uint8],
    indices: NDArray[np.int32],
    outcomes: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    sums: NDArray[np.uint64],
) -> None: ...
def headers_read(
    fds: NDArray[np.int32],
    offsets: NDArray[np.int64],
    headers: NDArray[np.uint8],
    outcomes: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    sums: NDArray[np.uint64],
) -> None: ...
def drop_cached(fds: NDArray[np.int32], offsets: NDArray[np.int64], num_bytes: int) -> None: ...
def start_writeback(fds: NDArray[np.int32], offsets: NDArray[np.int64], num_bytes: int) -> None: ...
def sum_bytes(data: NDArray[np.uint8], seed: int, level: int) -> int: ...
