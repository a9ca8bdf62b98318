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
    """Rows per CTA and the width of a load: a lane's share of Q and O stays in registers."""
    vector = config.vector
    while vector > 1 and _floats(config, vector) > MAX_FLOATS:
        vector //= 2  # shorter loads are spread over more lanes
    floats, rows = _floats(config, vector), 1
    while rows < 8 and rows < config.group_size and 2 * rows * floats <= MAX_FLOATS:
        rows *= 2
    shared = merge_bytes(WARPS, rows, config.head_dim_v)
    return Tiling("decode_simt", rows, 64, 32 * WARPS, shared, 2, (("VEC", vector),))


def _floats(config: AttentionConfig, vector: int) -> int:
    """Numbers of Q and O of one row that a lane holds; up to 16 lanes share a row."""
    vectors_k, vectors_v, lanes = config.head_dim // vector, config.head_dim_v // vector, 1
    while lanes < 16 and vectors_k % (2 * lanes) == 0 and vectors_v % (2 * lanes) == 0:
        lanes *= 2
    return (config.head_dim + config.head_dim_v) // lanes
