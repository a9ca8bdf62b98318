"""Tiling of ``decode_mma``: tensor cores, sm_80 and later; the main decode kernel."""

from __future__ import annotations

from pagedkv.kernels.config import AttentionConfig, Tiling
from pagedkv.kernels.dtypes import ITEMSIZES, QUANTISED
from pagedkv.kernels.warps import merge_bytes, tile_bytes

MAX_HEAD_DIM = 256
GROUP_KEYS = 16  # keys a warp computes at once
CTA_BYTES = 73 << 10  # shared memory of a CTA: three fit on an H100, two on an A100, one on what has 100 KiB


def unsupported(config: AttentionConfig, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}: needs 8.0 or later"
    if config.q_dtype not in ("float16", "bfloat16"):
        return f"q_dtype {config.q_dtype!r}: float16 and bfloat16 only"
    if config.kv_dtype != config.q_dtype and config.kv_dtype not in QUANTISED:
        return f"kv_dtype {config.kv_dtype!r} with q_dtype {config.q_dtype!r}: the same, or one of {sorted(QUANTISED)}"
    for name, dim in (("head_dim", config.head_dim), ("head_dim_v", config.head_dim_v)):
        if dim % 16 or not 16 <= dim <= MAX_HEAD_DIM:
            return f"{name} {dim}: multiples of 16 up to {MAX_HEAD_DIM} only"
    if config.kv_alignment < 16:
        return f"kv_alignment {config.kv_alignment}: every token's K and V must begin at a multiple of 16 bytes"
    return None


def tiling(config: AttentionConfig, max_q_len: int = 1) -> Tiling:
    """Sixteen query rows where eight are too few.

    As many ring stages as shared memory holds.

    Parameters
    ----------
    max_q_len : queries of one sequence at most; with a small group several of them fit into one row tile.
    """
    size = ITEMSIZES[config.kv_dtype]
    rows = 8 if config.group_size * max_q_len <= 8 else 16
    group_bytes = tile_bytes(config.head_dim * size, GROUP_KEYS) + tile_bytes(config.head_dim_v * size, GROUP_KEYS)
    group_bytes += 8 * GROUP_KEYS if config.scale_mode == "token_head" else 0
    warps = 4 if 4 * 2 * group_bytes <= CTA_BYTES else 2
    stages = max(2, min(CTA_BYTES // (warps * group_bytes), 6))
    shared = max(warps * stages * group_bytes, merge_bytes(warps, rows, config.head_dim_v))
    ctas = 3 if warps == 2 or few_registers(config, rows) else 2
    macros = (("STAGES", stages), ("MIN_CTAS", ctas), ("SHARED_BYTES", shared), ("EVICT_FIRST", 1))
    return Tiling("decode_mma", rows, warps * GROUP_KEYS, 32 * warps, shared, ctas, macros)


def few_registers(config: AttentionConfig, rows: int) -> bool:
    """Whether a thread with so many rows stays within 168 registers, so that 12 warps fit."""
    return rows * (config.head_dim + 2 * config.head_dim_v) <= 8 * 3 * 128
