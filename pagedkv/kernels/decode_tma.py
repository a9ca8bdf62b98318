"""Tiling of ``decode_tma``: as ``decode_mma``, with tiles fetched by TMA.

For sm_90 and sm_100.
"""

from __future__ import annotations

import math

from pagedkv.kernels import decode_mma
from pagedkv.kernels.config import AttentionConfig, Tiling
from pagedkv.kernels.dtypes import ITEMSIZES
from pagedkv.kernels.kv_maps import PANEL_BYTES
from pagedkv.kernels.warps import merge_bytes

TILE_TOKENS = 64
SM_BYTES = 228 << 10  # shared memory of a multiprocessor of sm_90
RESERVED_BYTES = 1 << 10  # of it, for every CTA; as much again aligns the buffers
BARRIER_BYTES = 16  # of a buffer
MAX_STAGES = 12
TWO_TILES = 4  # buffers: one tile is read while the next is on its way


def unsupported(config: AttentionConfig, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if capability[0] not in (9, 10):
        return f"compute capability {capability[0]}.{capability[1]}: 9.x and 10.x only"
    reason = decode_mma.unsupported(config, capability)
    if reason is not None:
        return reason
    if config.block_size < 8 or config.block_size % 8:
        return f"block_size {config.block_size}: multiples of 8 only, and no contiguous KV"
    if config.scale_mode == "token_head":
        return "scale_mode 'token_head': 'none', 'tensor' or 'head' only"
    size = ITEMSIZES[config.kv_dtype]
    for name, dim in (("head_dim", config.head_dim), ("head_dim_v", config.head_dim_v)):
        if dim * size % PANEL_BYTES:
            return f"{name} {dim} of {config.kv_dtype}: multiples of {PANEL_BYTES // size} only"
        if TILE_TOKENS // box_tokens(config) * (dim * size // PANEL_BYTES) > 32:
            return (
                f"{name} {dim} of {config.kv_dtype} with block_size {config.block_size}: more than 32 copies for a tile"
            )
    return None


def box_tokens(config: AttentionConfig) -> int:
    """Tokens of one copy: they lie in one block, whichever tile they belong to."""
    return math.gcd(config.block_size, TILE_TOKENS)


def tiling(config: AttentionConfig, max_q_len: int = 1) -> Tiling:
    """Two CTAs per multiprocessor where each still has room for two tiles, else one.

    As many buffers of 64 keys of K or V as then fit.
    """
    rows = 8 if config.group_size * max_q_len <= 8 else 16
    warps = TILE_TOKENS // decode_mma.GROUP_KEYS
    buffer_bytes = TILE_TOKENS * max(config.head_dim, config.head_dim_v) * ITEMSIZES[config.kv_dtype] + BARRIER_BYTES
    merge = merge_bytes(warps, rows, config.head_dim_v)
    fitting = {ctas: (SM_BYTES // ctas - 2 * RESERVED_BYTES - merge) // buffer_bytes for ctas in (1, 2)}
    ctas = 2 if fitting[2] >= TWO_TILES and rows * (config.head_dim + 2 * config.head_dim_v) <= 16 * 3 * 128 else 1
    stages = min(fitting[ctas], MAX_STAGES)
    shared = stages * buffer_bytes + merge
    macros = (
        ("STAGES", stages),
        ("BOX_TOKENS", box_tokens(config)),
        ("COMPUTE_THREADS", 32 * warps),
        ("MIN_CTAS", ctas),
        ("SHARED_BYTES", shared),
    )
    return Tiling(
        "decode_tma",
        rows,
        TILE_TOKENS,
        32 * (warps + 1),
        shared,
        ctas,
        macros,
        box_tokens=box_tokens(config),
    )
