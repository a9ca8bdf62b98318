"""Tiling of ``decode_mla_wgmma``: latents (MLA) under many query heads; wgmma, sm_90a."""

from __future__ import annotations

import math

from pagedkv.kernels import decode_mla
from pagedkv.kernels.config import AttentionConfig, Tiling

ROW_TILE = 64
TILE_TOKENS = 64
STAGES = 2  # tiles: one is read while the next is on its way
COMPUTE_THREADS = 256  # two warpgroups; a third fetches
FEW_ROWS = 32  # so many query heads decode_mla takes at once


def unsupported(config: AttentionConfig, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}: 9.0 only"
    reason = decode_mla.unsupported(config, capability)
    if reason is not None:
        return reason
    if config.group_size <= FEW_ROWS:
        return f"{config.group_size} query heads per KV head: more than {FEW_ROWS} only"
    if config.kv_dtype != config.q_dtype:
        return f"kv_dtype {config.kv_dtype!r}: that of q only"
    if config.block_size % 8:
        return f"block_size {config.block_size}: multiples of 8 only"
    return None


def tiling(config: AttentionConfig, max_q_len: int = 1) -> Tiling:
    """One CTA per multiprocessor: the queries of 64 rows, and two tiles of 64 keys."""
    row_bytes = 2 * config.head_dim
    box_tokens = math.gcd(config.block_size, TILE_TOKENS)
    shares = 2 * TILE_TOKENS * ROW_TILE
    shared = ROW_TILE * row_bytes + STAGES * (TILE_TOKENS * row_bytes + 16) + shares + 4 * 4 * ROW_TILE
    macros = (
        ("STAGES", STAGES),
        ("BOX_TOKENS", box_tokens),
        ("COMPUTE_THREADS", COMPUTE_THREADS),
        ("SHARED_BYTES", shared),
    )
    return Tiling(
        "decode_mla_wgmma", ROW_TILE, TILE_TOKENS, COMPUTE_THREADS + 128, shared, 1, macros, arch_features="a",
        box_tokens=box_tokens,
    )  # fmt: skip
