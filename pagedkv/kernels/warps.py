"""Shared memory: of a device, and of a decode kernel's tiles and the warps' final states."""

from __future__ import annotations

SHARED_LIMITS = {(7, 5): 64, (8, 6): 99, (8, 9): 99, (8, 0): 163, (8, 7): 163, (12, 0): 99, (12, 1): 99}  # KiB
SHARED_LIMIT = 227  # KiB: of all others, from 9.0 on


def shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that one CTA may ask for; a multiprocessor has 1 KiB more."""
    return SHARED_LIMITS.get(capability, SHARED_LIMIT) << 10


def tile_bytes(row_bytes: int, rows: int) -> int:
    """Bytes of a tile of K or V: ``TileLayout`` in tile.cuh."""
    chunks = row_bytes // 16
    return rows * 16 * (chunks if chunks % 8 == 0 or chunks & (chunks - 1) == 0 else chunks | 1)


def merge_bytes(warps: int, rows: int, head_dim_v: int) -> int:
    """Bytes of the warps' states and their sum: ``WarpParts`` in warp_merge.cuh."""
    return 4 * rows * (warps * (head_dim_v + 4 + 2) + head_dim_v + 2)
