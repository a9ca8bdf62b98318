"""Tiling of ``prefill_mma``: many queries per sequence, on tensor cores."""

from __future__ import annotations

from pagedkv.kernels.config import AttentionConfig, Tiling
from pagedkv.kernels.dtypes import ITEMSIZES, QUANTISED

MAX_HEAD_DIM = 256
MANY = 1 << 20  # queries


def unsupported(config: AttentionConfig, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot compute this; None if it can."""
    if capability < (8, 0):
        return f"it needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    if config.q_dtype not in ("float16", "bfloat16"):
        return f"q_dtype {config.q_dtype}: float16 or bfloat16"
    if config.kv_dtype == "float32":
        return "kv_dtype float32: float16, bfloat16, fp8 or int8"
    for name, dim in (("head_dim", config.head_dim), ("head_dim_v", config.head_dim_v)):
        if dim % 16 or not 16 <= dim <= MAX_HEAD_DIM:
            return f"{name} {dim}: a multiple of 16 up to {MAX_HEAD_DIM}"
    if config.kv_alignment < 16:
        return f"kv_alignment {config.kv_alignment}: 16"
    return None


def tiling(config: AttentionConfig, max_q_len: int = MANY, row_tile: int | None = None) -> Tiling:
    """How a config is computed.

    Parameters
    ----------
    max_q_len : queries of one sequence at most.
    row_tile : rows (query, head of the group) of a CTA: 16, 32, 64 or 128; default by ``max_q_len``.

    Notes
    -----
    Of 128 rows, each of four warps has 32: half the traffic from shared memory that 16 rows per warp would cause, which
    is what limits mma.sync. Head dims above 128 leave no registers for that. Two CTAs per multiprocessor hide each
    other's softmax; shared memory, 2 KiB of it static, stays below the 99 KiB that every device since 8.0 offers a CTA.
    """
    widest = max(config.head_dim, config.head_dim_v)
    wide = widest > 128
    row_tile = row_tile or (64 if wide or max_q_len * config.group_size <= 64 else 128)
    warp_rows = 32 if row_tile == 128 and not wide else 16
    tile_tokens = 32 if wide or row_tile == 16 else 64
    shaped = config.soft_cap or config.alibi or config.mask
    crowded = config.scale_mode == "token_head"  # a converted tile lies beside the rings
    if warp_rows == 32 and widest > 96 and (shaped or crowded):  # shaped scores must stay in registers with the output
        tile_tokens = 48
    q_registers = int(config.head_dim <= 64 or (warp_rows == 16 and config.head_dim <= 128))
    stages = 2
    warps = row_tile // warp_rows
    shared = shared_bytes(config, row_tile, tile_tokens, stages) + 16 * warps + 64  # the parked rows
    macros = (
        ("WARP_ROWS", warp_rows),
        ("STAGES", stages),
        ("Q_REGISTERS", q_registers),
        ("MIN_CTAS", 2),
        ("SHARED_BYTES", shared),
    )
    return Tiling("prefill_mma", row_tile, tile_tokens, 32 * warps, shared, 2, macros)


def shared_bytes(config: AttentionConfig, row_tile: int, tile_tokens: int, stages: int) -> int:
    """Shared memory of a CTA.

    Queries (later the output), rings of tiles and of block ids, and a converted tile or the queries' divisors.
    """
    rows = row_tile * 2 * max(config.head_dim, config.head_dim_v)
    elements = tile_tokens * (config.head_dim + config.head_dim_v)
    scales = 8 * tile_tokens if config.scale_mode == "token_head" else 0
    in_registers = config.kv_dtype in QUANTISED and config.scale_mode != "token_head"
    powers = 4 * row_tile if in_registers and config.q_dtype == "bfloat16" else 0
    always = in_registers and config.kv_dtype != "float8_e4m3"  # which needs a device of 8.9
    converted = 2 * elements if config.kv_dtype != config.q_dtype and not always else 0
    ids = 4 * tile_tokens if config.block_size else 0  # one per key at most
    return rows + stages * (elements * ITEMSIZES[config.kv_dtype] + scales + ids) + max(converted, powers)
