"""Tiling of ``decode_mla``: latents (MLA), of which V is a part, on tensor cores.

For sm_80 and later, wherever two tiles of latents and the rows fit in shared memory.
"""

from __future__ import annotations

from pagedkv.kernels.config import AttentionConfig, Tiling
from pagedkv.kernels.dtypes import ITEMSIZES, QUANTISED
from pagedkv.kernels.warps import shared_limit, tile_bytes

TILE_TOKENS = 32
WARPS = 8
RESERVED_BYTES = 1 << 10  # of a multiprocessor, for every CTA; as much again aligns tiles and holds static variables
MIN_STAGES, MAX_STAGES = 2, 6  # tiles: one is read while the next is on its way
MANY_ROWS = 16  # more query heads than these go in tiles of 32 rows, where those fit
FEW_SHAPES = ((16, 2), (16, 1))  # rows of a CTA, and CTAs of a multiprocessor, the preferred first
MANY_SHAPES = ((32, 1), *FEW_SHAPES)


def unsupported(config: AttentionConfig, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if not config.v_in_k:
        return "v_in_k False: only V that is the first dims of K"
    device = f"compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return f"{device}: needs 8.0 or later"
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
    rows, ctas = shape(config, capability)
    if stages(config, capability, rows, ctas) < MIN_STAGES:
        least = MIN_STAGES * latents_bytes(config) + rows_bytes(config, rows) + RESERVED_BYTES
        return (
            f"head_dim {config.head_dim} of {config.kv_dtype}: {MIN_STAGES} tiles of {TILE_TOKENS} latents and {rows} "
            f"rows take {least} bytes of shared memory, and {device} has {shared_limit(capability)}"
        )
    return None


def latents_bytes(config: AttentionConfig) -> int:
    """Shared memory of a tile of latents."""
    return tile_bytes(config.head_dim * ITEMSIZES[config.kv_dtype], TILE_TOKENS)


def rows_bytes(config: AttentionConfig, rows: int) -> int:
    """Shared memory of the rows: their queries, shares, scores and states."""
    splits = WARPS // (TILE_TOKENS // 16)
    tiles = tile_bytes(2 * config.head_dim, rows) + tile_bytes(2 * TILE_TOKENS, rows)
    return tiles + 4 * rows * (splits * (TILE_TOKENS + 4) + 4)


def stages(config: AttentionConfig, capability: tuple[int, int], rows: int, ctas: int) -> int:
    """Tiles for which each of the CTAs of a multiprocessor has room."""
    cta_bytes = (shared_limit(capability) + RESERVED_BYTES) // ctas - 2 * RESERVED_BYTES
    return min((cta_bytes - rows_bytes(config, rows)) // latents_bytes(config), MAX_STAGES)


def shape(config: AttentionConfig, capability: tuple[int, int]) -> tuple[int, int]:
    """Rows of a CTA, and CTAs of a multiprocessor: the first that fit, else the least."""
    shapes = MANY_SHAPES if config.group_size > MANY_ROWS else FEW_SHAPES
    fitting = (one for one in shapes if stages(config, capability, *one) >= MIN_STAGES)
    return next(fitting, shapes[-1])


def tiling(config: AttentionConfig, capability: tuple[int, int]) -> Tiling:
    """32 rows for many heads, else 16; as many CTAs, then as many tiles, as fit on the device."""
    rows, ctas = shape(config, capability)
    tiles = stages(config, capability, rows, ctas)
    shared = tiles * latents_bytes(config) + rows_bytes(config, rows)
    macros = (("STAGES", tiles), ("MIN_CTAS", ctas), ("SHARED_BYTES", shared))
    return Tiling("decode_mla", rows, TILE_TOKENS, 32 * WARPS, shared, ctas, macros)
