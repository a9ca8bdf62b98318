"""Tiling of ``decode_simt``: the kernel that takes everything."""

from __future__ import annotations

from pagedkv.kernels.config import AttentionConfig, Tiling
from pagedkv.kernels.warps import merge_bytes

WARPS = 4
MAX_FLOATS = 160  # of Q and O that a lane may hold in registers, over all rows


def unsupported(config: AttentionConfig, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if not (1 <= config.head_dim <= 576 and 1 <= config.head_dim_v <= 512):
        return f"head_dim {config.head_dim} with head_dim_v {config.head_dim_v}: at most 576 and 512"
    return None


def tiling(config: AttentionConfig) -> Tiling:
    """Rows per CTA so that a lane's share of Q and O stays in registers."""
    vectors_k, vectors_v = config.head_dim // config.vector, config.head_dim_v // config.vector
    lanes = 1
    while lanes < 16 and vectors_k % (2 * lanes) == 0 and vectors_v % (2 * lanes) == 0:
        lanes *= 2
    floats = (config.head_dim + config.head_dim_v) // lanes
    rows = 1
    while rows < 8 and rows < config.group_size and 2 * rows * floats <= MAX_FLOATS:
        rows *= 2
    shared = merge_bytes(WARPS, rows, config.head_dim_v)
    return Tiling("decode_simt", rows, 64, 32 * WARPS, shared, 2, (("VEC", config.vector),))
