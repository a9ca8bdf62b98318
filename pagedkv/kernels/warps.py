"""Shared memory of decode kernels: tiles of K and V, and the warps' final states."""

from __future__ import annotations


def tile_bytes(row_bytes: int, rows: int) -> int:
    """Bytes of a tile of K or V: ``TileLayout`` in tile.cuh."""
    chunks = row_bytes // 16
    return rows * 16 * (chunks if chunks % 8 == 0 or chunks & (chunks - 1) == 0 else chunks | 1)


def merge_bytes(warps: int, rows: int, head_dim_v: int) -> int:
    """Bytes of the warps' states and their sum: ``WarpParts`` in warp_merge.cuh."""
    return 4 * rows * (warps * (head_dim_v + 4 + 2) + head_dim_v + 2)
