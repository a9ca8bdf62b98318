"""Tiling of ``decode_mla``: latents (MLA), of which V is a part, on tensor cores.

For sm_80, 9.x and 10.x.
"""

from __future__ import annotations

from pagedkv.kernels.config import AttentionConfig, Tiling
from pagedkv.kernels.dtypes import ITEMSIZES, QUANTISED
from pagedkv.kernels.warps import tile_bytes

TILE_TOKENS = 32
WARPS = 8
SM_BYTES = 228 << 10  # shared memory of a multiprocessor of sm_90
RESERVED_BYTES = 1 << 10  # of it, for every CTA; as much again aligns the tiles and holds static variables
MAX_STAGES = 6
MANY_ROWS = 16  # more query heads than these go in tiles of 32 rows


def unsupported(config: AttentionConfig, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if not config.v_in_k:
        return "v_in_k False: only V that is the first dims of K"
    many = config.group_size > MANY_ROWS
    if capability != (8, 0) and capability[0] not in (9, 10):
        return f"compute capability {capability[0]}.{capability[1]}: 8.0, 9.x and 10.x only, for their shared memory"
    if many and capability == (8, 0):
        return f"compute capability 8.0: at most {MANY_ROWS} query heads per KV head"
    if config.q_dtype not in ("float16", "bfloat16"):
        return f"q_dtype {config.q_dtype!r}: float16 and bfloat16 only"
    if config.kv_dtype != config.q_dtype and config.kv_dtype not in QUANTISED:
        return f"kv_dtype {config.kv_dtype!r} with q_dtype {config.q_dtype!r}: the same, or one of {sorted(QUANTISED)}"
    if config.head_dim % 64 or config.head_dim > 576:
        return f"head_dim {config.head_dim}: multiples of 64 up to 576 only"
    if config.head_dim_v not in (256, 512):
        return f"head_dim_v {config.head_dim_v}: 256 or 512 only"
    if config.block_size == 0:
        return "block_size 0: no contiguous KV"
    if config.scale_mode == "token_head":
        return "scale_mode 'token_head': 'none', 'tensor' or 'head' only"
    if config.kv_alignment < 16:
        return f"kv_alignment {config.kv_alignment}: every token must begin at a multiple of 16 bytes"
    return None


def tiling(config: AttentionConfig, max_q_len: int = 1) -> Tiling:
    """Sixteen rows and two CTAs per multiprocessor, or 32 rows and one.

    As many tiles as then fit.
    """
    rows, ctas = (32, 1) if config.group_size > MANY_ROWS else (16, 2)
    tile = tile_bytes(config.head_dim * ITEMSIZES[config.kv_dtype], TILE_TOKENS)
    splits = WARPS // (TILE_TOKENS // 16)
    rest = tile_bytes(2 * config.head_dim, rows) + tile_bytes(2 * TILE_TOKENS, rows)
    rest += 4 * rows * (splits * (TILE_TOKENS + 4) + 4)
    stages = min((SM_BYTES // ctas - 2 * RESERVED_BYTES - rest) // tile, MAX_STAGES)
    shared = stages * tile + rest
    macros = (("STAGES", stages), ("MIN_CTAS", ctas), ("SHARED_BYTES", shared))
    return Tiling("decode_mla", rows, TILE_TOKENS, 32 * WARPS, shared, ctas, macros)
