"""Anonymous memory for CPU arenas: page-aligned, huge pages advised, touched on use."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ClosedError, InvalidArgument, TierError

HUGE_PAGE = 2 << 20
LOCK_CHUNK = 256 << 20  # bytes of host memory that one call page-locks, more or less


def anonymous_arena(
    num_blocks: int, block_bytes: int, tier: str, mapping: type[mmap.mmap] = mmap.mmap
) -> NDArray[np.uint8]:
    """Reserve an arena that costs physical memory only where it has been written.

    So growth up to `num_blocks` is free: the addresses never change. The memory goes back to the system when
    the last view of the array is gone.

    Parameters
    ----------
    num_blocks, block_bytes, tier : size, and whom an error names.
    mapping : what maps it; lives as long as the last view.

    Returns
    -------
    uint8 [num_blocks, block_bytes], zeros; starts at a 2 MiB boundary if it is that large, else at a page.

    Raises
    ------
    TierError
        The system does not give that much address space or commit that much memory.
    """
    wanted = num_blocks * block_bytes
    align = HUGE_PAGE if wanted >= HUGE_PAGE else mmap.PAGESIZE
    try:
        memory = mapping(-1, wanted + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as problem:
        raise TierError(
            f"cannot reserve {wanted} bytes ({num_blocks} blocks of {block_bytes}) for tier {tier!r}: "
            f"{problem}; give the tier a smaller budget"
        ) from problem
    if hasattr(mmap, "MADV_HUGEPAGE") and align == HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -whole.ctypes.data % align
    return whole[start : start + wanted].reshape(num_blocks, block_bytes)


def piece_of(block_bytes: int) -> int:
    """Bytes that one call page-locks, of an arena of such blocks.

    They are whole blocks: a copy must not reach from one locked piece into the next.
    """
    unit = math.lcm(block_bytes, mmap.PAGESIZE)
    return max(LOCK_CHUNK // unit, 1) * unit


class ArenaTier:
    """A tier made of one arena.

    `DeviceTier` and `HostTier` differ in where the arena comes from.

    Parameters
    ----------
    name : the tier's name.
    arena : uint8 [num_blocks, block_bytes], NumPy or CuPy.
    gpu : the CUDA device that reaches the arena by asynchronous copy, or None.
    piece_bytes : of the arena's memory that are page-locked together, from its begin on. Default: as for its blocks.
    """

    def __init__(self, name: str, arena: Any, gpu: int | None, piece_bytes: int | None = None) -> None:
        self.name = name
        self.num_blocks, self.block_bytes = int(arena.shape[0]), int(arena.shape[1])
        self.gpu, self.piece_bytes = gpu, piece_bytes or piece_of(self.block_bytes)
        self._arena: Any = arena

    @property
    def arena(self) -> Any:
        """uint8 [num_blocks, block_bytes].

        Valid as long as a view of it lives, also after `close`.
        """
        if self._arena is None:
            raise ClosedError(f"tier {self.name!r} is closed")
        return self._arena

    def view(self, block: int) -> Any:
        """uint8 [block_bytes]: one block, without a copy.

        Raises
        ------
        InvalidArgument
            There is no such block.
        ClosedError
        """
        if not 0 <= block < self.num_blocks:
            raise InvalidArgument(f"block {block} is not in [0, {self.num_blocks}) on tier {self.name!r}")
        return self.arena[block]

    def close(self) -> None:
        """Let go of the arena; its memory is freed with the last view."""
        self._arena = None
