"""Moves of many small blocks between a GPU and page-locked host memory, in one launch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.kernels.backend import Backend
from pagedkv.kernels.block_ops import copy_blocks

MOST_CTAS = 16  # 256 KiB under way, twice the 2 us of a bus of 64 GB/s; attention has the other multiprocessors
SMALLEST = 256  # pairs of a thread's first list


class BlockMoves:
    """A :class:`pagedkv.tiers.device.BlockKernel`.

    Each thread keeps one list on the device, which grows by doubling.

    Parameters
    ----------
    backend : of the GPU.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._local = threading.local()

    def __call__(
        self, src: Any, src_blocks: NDArray[np.int32], dst: Any, dst_blocks: NDArray[np.int32], stream: Any
    ) -> None:
        """Launch copies of blocks ``src_blocks[i] -> dst_blocks[i]`` on a stream.

        The caller waits for the stream before the thread's next call.
        """
        pairs = np.stack((src_blocks, dst_blocks), axis=1)
        listed = self._list(len(pairs), stream)
        self._backend.upload(listed, pairs, stream)
        copy_blocks(self._backend, src, listed, to_arena=dst, max_ctas=MOST_CTAS, stream=stream)

    def _list(self, count: int, stream: Any) -> Any:
        """This thread's int32 [count, 2] on the device; no launch still reads it."""
        found = getattr(self._local, "pairs", None)
        if found is None or len(found) < count:
            room = max(SMALLEST, 1 << (count - 1).bit_length())
            found = self._local.pairs = self._backend.empty((room, 2), np.int32, stream=stream)
        return found[:count]
