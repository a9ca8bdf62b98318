"""The tier below the device: CPU memory, page-locked when there is a GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.tiers.base import check_size
from pagedkv.tiers.device import import_cupy
from pagedkv.tiers.memory import ArenaTier, anonymous_arena


class HostTier(ArenaTier):
    """Blocks in CPU memory.

    Parameters
    ----------
    num_blocks, block_bytes : int
        Most blocks there can ever be, and bytes of one.
    gpu : int, optional
        CUDA device for which the memory is page-locked (all of it, at once); None (the default) for plain
        memory, taken when it is first written.

    Raises
    ------
    WrongType, InvalidArgument
        A size is not a positive int.
    TierError
        The memory cannot be had.
    ImportError
        A GPU was asked for and CuPy is missing; the message names the extra.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, gpu: int | None = None) -> None:
        check_size(num_blocks, block_bytes)
        if gpu is None:
            arena = anonymous_arena(num_blocks, block_bytes, "host")
        else:
            arena = page_locked_arena(num_blocks, block_bytes, gpu)
        super().__init__("host", arena, gpu)


def page_locked_arena(num_blocks: int, block_bytes: int, gpu: int) -> NDArray[np.uint8]:
    """uint8 [num_blocks, block_bytes] of zeros that the GPU reaches without a detour.

    Raises
    ------
    TierError
        The driver does not lock that much memory.
    ImportError
        CuPy is missing.
    """
    cupy = import_cupy()
    wanted = num_blocks * block_bytes
    try:
        with cupy.cuda.Device(gpu):
            memory = cupy.cuda.alloc_pinned_memory(wanted)
    except cupy.cuda.runtime.CUDARuntimeError as problem:
        raise TierError(
            f"cannot page-lock {wanted} bytes ({num_blocks} blocks of {block_bytes}) for GPU {gpu}: "
            f"{problem}; give the host tier a smaller budget"
        ) from problem
    arena: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8, count=wanted).reshape(num_blocks, block_bytes)
    arena.fill(0)  # page-locked memory may come back from a pool with old bytes in it
    return arena
