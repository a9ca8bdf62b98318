"""Payload of a block in the real engine: bytes that follow from its whole prefix.

So every read can be checked.

A block's chain is a 64-bit mix of its parent's chain and its id. Word j of its content is the j-th word of a
fixed random pattern times the block's chain (made odd): two blocks differ in almost every byte. Every byte
served is compared, so one flipped bit anywhere is seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.lab.replay.trace import Int32, Trace

UInt64 = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
PATTERN_SEED = 20240229


class Payload:
    """Content of every block of a trace, made when asked for.

    Parameters
    ----------
    trace : whose blocks.
    block_bytes : bytes of one block, a multiple of 8.
    """

    def __init__(self, trace: Trace, block_bytes: int) -> None:
        words = block_bytes // 8
        self._chains = chains(trace)
        self._pattern = np.random.Generator(np.random.PCG64(PATTERN_SEED)).integers(1, 1 << 63, words, dtype=np.uint64)
        self._expected = np.empty(words, np.uint64)

    def fill(self, block: int, out: Bytes) -> None:
        """Write the content of trace block ``block`` to ``out`` (uint8 [block_bytes], contiguous)."""
        np.multiply(self._pattern, self._chains[block], out=out.view(np.uint64))

    def wrong_bytes(self, block: int, got: Bytes) -> int:
        """How many bytes of ``got`` differ from trace block ``block``.

        ``got`` is uint8 [block_bytes], contiguous.
        """
        np.multiply(self._pattern, self._chains[block], out=self._expected)
        if np.array_equal(self._expected, got.view(np.uint64)):
            return 0
        return int(np.count_nonzero(self._expected.view(np.uint8) != got))

    def fill_path(self, path: Int32, arena: Bytes, blocks: Int32) -> None:
        """Write trace blocks ``path`` to rows ``blocks`` of ``arena``.

        ``arena`` is uint8 [num_blocks, block_bytes].
        """
        for block, row in zip(path.tolist(), blocks.tolist(), strict=True):
            self.fill(block, arena[row])

    def wrong_in_path(self, path: Int32, arena: Bytes, blocks: Int32) -> int:
        """Wrong bytes in rows ``blocks`` of ``arena``, which should hold trace blocks ``path``."""
        return sum(
            self.wrong_bytes(block, arena[row]) for block, row in zip(path.tolist(), blocks.tolist(), strict=True)
        )


def chains(trace: Trace) -> UInt64:
    """An odd 64-bit number per block that follows from its prefix: uint64 [num_unique].

    Computed level by level.
    """
    result = _mix(np.arange(trace.num_unique, dtype=np.uint64) + np.uint64(1))
    by_depth = np.argsort(trace.depths, kind="stable")
    levels = np.searchsorted(trace.depths[by_depth], np.arange(1, int(trace.depths.max()) + 2))
    for start, end in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        level = by_depth[start:end]
        result[level] = _mix(result[level] ^ result[trace.parents[level]])
    return result | np.uint64(1)


def _mix(x: UInt64) -> UInt64:
    """splitmix64's finaliser (Steele, Lea and Flood 2014, variant 13).

    A bijection that spreads every bit.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
