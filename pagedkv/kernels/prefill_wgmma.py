"""Tiling of ``prefill_wgmma``: prefill with wgmma and TMA tiles; sm_90a."""

from __future__ import annotations

import math

from pagedkv.kernels.config import AttentionConfig, Tiling
from pagedkv.kernels.prefill_mma import MANY

ROW_TILE = 128  # of two warpgroups that compute
TILE_TOKENS = 128
STAGES = 4  # buffers of the ring, each K or V of a tile
FEED_BYTES = 256  # segments on their way from the producing warp
COMPUTE_THREADS = 256
THREADS = COMPUTE_THREADS + 128  # and a warpgroup that fetches


def unsupported(config: AttentionConfig, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}: 9.0 only"
    if config.q_dtype not in ("float16", "bfloat16"):
        return f"q_dtype {config.q_dtype}: float16 or bfloat16"
    if config.kv_dtype != config.q_dtype:
        return f"kv_dtype {config.kv_dtype}: that of q only"
    if config.scale_mode != "none":
        return f"scale_mode {config.scale_mode!r}: 'none' only"
    if config.head_dim not in (64, 128):
        return f"head_dim {config.head_dim}: 64 or 128"
    if config.head_dim_v != config.head_dim:
        return f"head_dim_v {config.head_dim_v}: that of K only"
    for name in ("window", "soft_cap", "alibi", "sinks", "mask", "positions"):
        if getattr(config, name):
            return f"no {name}"
    if config.block_size < 8 or config.block_size % 8:
        return f"block_size {config.block_size}: multiples of 8 only, and no contiguous KV"
    if config.kv_alignment < 16:
        return f"kv_alignment {config.kv_alignment}: 16"
    return None


def tiling(config: AttentionConfig, max_q_len: int = MANY) -> Tiling:
    """One CTA per multiprocessor: queries of two row tiles, K and V of two tiles of 128 keys."""
    row_bytes = 2 * config.head_dim
    box_tokens = math.gcd(config.block_size, TILE_TOKENS)
    shared = 2 * ROW_TILE * row_bytes + STAGES * (TILE_TOKENS * row_bytes + 16) + FEED_BYTES
    macros = (
        ("STAGES", STAGES),
        ("BOX_TOKENS", box_tokens),
        ("COMPUTE_THREADS", COMPUTE_THREADS),
        ("SHARED_BYTES", shared),
    )
    return Tiling(
        "prefill_wgmma", ROW_TILE, TILE_TOKENS, THREADS, shared, 1, macros, arch_features="a", box_tokens=box_tokens,
        persistent=True,
    )  # fmt: skip
