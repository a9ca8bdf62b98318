"""The constants compiled into an attention kernel, and how a kernel is launched for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagedkv.kernels.dtypes import CUDA_NAMES, ITEMSIZES
from pagedkv.kernels.variant import Variant, variant

ScaleMode = Literal["none", "tensor", "head", "token_head"]
Schedule = Literal["whole", "partitioned", "even", "listed"]

SCALE_MODES: dict[str, int] = {"none": 0, "tensor": 1, "head": 2, "token_head": 3}
SCHEDULES: dict[str, int] = {"whole": 0, "partitioned": 1, "even": 2, "listed": 3}


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The compile-time part of an attention call.

    Parameters
    ----------
    head_dim, head_dim_v : of K (and Q), and of V (and O).
    group_size : query heads per KV head.
    q_dtype, kv_dtype : of Q and O, and of K and V.
    block_size : tokens of a block; 0 for contiguous KV.
    causal, window, soft_cap, alibi, sinks, mask : which variants are compiled in.
    scale_mode : the granularity of quantised KV's scales.
    kv_alignment : bytes at a multiple of which every token's K and V begin; 16 in ordinary pools.
    debug : block ids are checked on the device.
    v_in_k : V is the first head_dim_v numbers of K (latents): a kernel may read K alone.
    positions : the batch says where each query stands; else a sequence's last query stands at its last key.
    """

    head_dim: int
    head_dim_v: int
    group_size: int
    q_dtype: str = "float16"
    kv_dtype: str = "float16"
    block_size: int = 16
    causal: bool = True
    window: bool = False
    soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False
    mask: bool = False
    scale_mode: ScaleMode = "none"
    kv_alignment: int = 16
    debug: bool = False
    v_in_k: bool = False
    positions: bool = False

    @property
    def vector(self) -> int:
        """Elements of K or V per load: 16 bytes where head dims and alignment allow it."""
        size = min(self.kv_alignment, 16) // ITEMSIZES[self.kv_dtype]
        while size > 1 and (self.head_dim % size or self.head_dim_v % size):
            size //= 2
        return max(size, 1)

    def macros(self) -> dict[str, int | str]:
        """The -D macros that all attention kernels share."""
        return {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "GROUP_SIZE": self.group_size,
            "Q_TYPE": CUDA_NAMES[self.q_dtype],
            "KV_TYPE": CUDA_NAMES[self.kv_dtype],
            "BLOCK_SIZE": self.block_size,
            "PAGED": int(self.block_size > 0),
            "CAUSAL": int(self.causal),
            "WINDOW": int(self.window),
            "SOFT_CAP": int(self.soft_cap),
            "ALIBI": int(self.alibi),
            "SINKS": int(self.sinks),
            "MASK": int(self.mask),
            "POSITIONS": int(self.positions),
            "SCALE_MODE": SCALE_MODES[self.scale_mode],
            "DEBUG": int(self.debug),
        }


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one kernel computes one config.

    Parameters
    ----------
    kernel : its name.
    row_tile : rows (query, head of the group) that a CTA computes at once.
    tile_tokens : keys of a tile, the unit in which work is divided.
    threads, shared_bytes : of a CTA.
    ctas_per_sm : CTAs that fit on a multiprocessor; sizes the constant grid.
    macros : further ones of this kernel, by name.
    arch_features : "a" for kernels that need an architecture's own instructions.
    box_tokens : of a kernel that reads K and V through tensor maps, tokens of one copy; 0: it does not.
    persistent : whether a CTA comes back for more items of the "listed" schedule.
    """

    kernel: str
    row_tile: int
    tile_tokens: int
    threads: int
    shared_bytes: int
    ctas_per_sm: int
    macros: tuple[tuple[str, int], ...] = ()
    arch_features: str = ""
    box_tokens: int = 0
    persistent: bool = False

    def variant(self, config: AttentionConfig, schedule: Schedule, kernel: str | None = None) -> Variant:
        """The kernel specialised for a config and a schedule.

        Also its helpers, such as ``decode_reduce``.
        """
        own = dict(self.macros) if kernel is None else {}
        return variant(
            kernel or self.kernel,
            arch_features=self.arch_features if kernel is None else "",
            SCHEDULE=SCHEDULES[schedule],
            ROW_TILE=self.row_tile,
            TILE_TOKENS=self.tile_tokens,
            **own,
            **config.macros(),
        )
