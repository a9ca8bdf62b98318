"""The tier below the device: CPU memory, page-locked when there is a GPU."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.spec.place import cuda_number
from pagedkv.threads.crew import Crew
from pagedkv.tiers.base import check_size
from pagedkv.tiers.device import import_cupy
from pagedkv.tiers.memory import ArenaTier, anonymous_arena, piece_of

TOUCH_THREADS = 8
PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister...: page-locked for every context, and in reach of kernels


class LockedMapping(mmap.mmap):
    """Anonymous memory whose page locks go before it does, in the process that took them."""

    def lock(self, runtime: Any, chunk: NDArray[np.uint8]) -> None:
        """Lock a part of it; `runtime` is ``cupy.cuda.runtime``."""
        runtime.hostRegister(chunk.ctypes.data, chunk.nbytes, PORTABLE_AND_MAPPED)
        self.__dict__.setdefault("locks", []).append((os.getpid(), runtime, chunk.ctypes.data))

    def __del__(self) -> None:
        for pid, runtime, address in self.__dict__.pop("locks", ()):
            if pid == os.getpid():  # a forked child has no locks to give back
                with contextlib.suppress(Exception):  # the driver may be gone when the interpreter ends
                    runtime.hostUnregister(address)


class HostTier(ArenaTier):
    """Blocks in CPU memory.

    Parameters
    ----------
    num_blocks, block_bytes : int
        Most blocks there can ever be, and bytes of one.
    device : str
        ``"cuda"`` or ``"cuda:1"``: the device for which the memory is page-locked (all of it, at once); ``"cpu"`` for
        plain memory, taken when it is first written.

    Raises
    ------
    WrongType, InvalidArgument
        A size is not a positive int, or `device` is no place.
    TierError
        The memory cannot be had.
    ImportError
        A GPU was asked for and CuPy is missing; the message names the extra.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, device: str = "cpu") -> None:
        check_size(num_blocks, block_bytes)
        gpu = cuda_number(device)
        if gpu is None:
            arena = anonymous_arena(num_blocks, block_bytes, "host")
        else:
            arena = page_locked_arena(num_blocks, block_bytes, gpu)
        super().__init__("host", arena, gpu)


def page_locked_arena(num_blocks: int, block_bytes: int, gpu: int) -> NDArray[np.uint8]:
    """uint8 [num_blocks, block_bytes] of zeros that the GPU reaches without a detour.

    One large page-locked allocation stalls a machine for minutes, because one thread touches every page. Here threads
    touch ordinary memory in chunks, and each chunk is then locked where it is. The locks go when the array's last
    view does.

    Raises
    ------
    TierError
        The driver does not lock that much memory.
    ImportError
        CuPy is missing.
    """
    cupy = import_cupy()
    arena = anonymous_arena(num_blocks, block_bytes, "host", LockedMapping)
    flat, mapping, size = arena.reshape(-1), _mapping(arena), piece_of(block_bytes)
    # A forked child cannot use the device; with its copy of the page tables gone, no write of ours moves a locked page.
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_DONTFORK)

    def touch(start: int) -> None:
        flat[start : start + size].fill(0)

    starts = range(0, flat.size, size)
    with Crew(touch, starts, min(TOUCH_THREADS, os.cpu_count() or 1)) as touched:
        for start, _ in zip(starts, touched, strict=True):  # a chunk is locked while later ones are touched
            chunk = flat[start : start + size]
            try:
                with cupy.cuda.Device(gpu):
                    mapping.lock(cupy.cuda.runtime, chunk)
            except cupy.cuda.runtime.CUDARuntimeError as problem:
                raise TierError(
                    f"cannot page-lock {flat.size} bytes ({num_blocks} blocks of {block_bytes}) for GPU {gpu}, only "
                    f"the first {start}: {problem}; give the host tier a smaller budget, or raise the limit of locked "
                    f"memory (ulimit -l)"
                ) from problem
    return arena


def _mapping(arena: NDArray[np.uint8]) -> LockedMapping:
    """The mapping at the bottom of an arena's bases."""
    base: Any = arena
    while isinstance(base, np.ndarray):
        base = base.base
    return cast(LockedMapping, base.obj if isinstance(base, memoryview) else base)
