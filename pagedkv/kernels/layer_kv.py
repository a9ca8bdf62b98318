"""One layer's K and V in blocks, checked once, for the kernels that write and gather."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument, LayoutMismatch, UnsupportedVariant
from pagedkv.kernels.arrays import alignment, check_array, check_dense_rows, element_strides
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import SCALE_MODES, ScaleMode
from pagedkv.kernels.dtypes import QUANTISED, kernel_dtype
from pagedkv.kernels.recipe import interned, signature

MAX_HEAD_DIM = 1024
MAX_GRID_Y = 65535
MAX_BLOCK_SIZE = 256

# Pointers of the struct KvParams within another, and what LayerKv.arrays gives for them.
KV_ARRAYS = ("kv.k", "kv.v", "kv.k_scale", "kv.v_scale", "kv.block_tables", "kv.kv_indptr")


@dataclass(frozen=True, slots=True, eq=False)
class LayerKv:
    """K and V of one layer over all blocks, with any strides.

    A view of a block-major pool, NHD or HND, or a pool of its own.

    Parameters
    ----------
    backend : whose memory the arrays lie in.
    k : [num_blocks, block_size, num_kv_heads, head_dim].
    v : [num_blocks, block_size, num_kv_heads, head_dim_v]; None where K alone is kept (MLA).
    dtype : name of the element type, where an array only says how many bits: fp8 in uint8.
    scale_mode : the granularity of the scales: value = stored * scale. Quantised dtypes only.
    k_scale, v_scale : float32, of the same strides. ``"tensor"``: [1]; ``"head"``: [num_kv_heads]; ``"token_head"``:
        [num_blocks, block_size, num_kv_heads], any strides, so that they may lie inside the blocks.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        The arrays do not fit together or no kernel takes them.
    """

    backend: Backend
    k: Any
    v: Any = None
    _: KW_ONLY
    dtype: str = ""
    scale_mode: ScaleMode = "none"
    k_scale: Any = None
    v_scale: Any = None
    alignment: int = field(init=False, repr=False)
    fields: dict[str, Any] = field(init=False, repr=False)
    signature: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_arrays()
        self._check_scales()
        arrays = (self.k,) if self.v is None else (self.k, self.v)
        object.__setattr__(self, "alignment", alignment(*arrays))
        object.__setattr__(self, "fields", self._fields())
        signatures = tuple(map(signature, (self.k, self.v, self.k_scale, self.v_scale)))
        object.__setattr__(self, "signature", interned((*signatures, self.dtype, self.scale_mode)))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """num_blocks, block_size, num_kv_heads, head_dim."""
        num_blocks, block_size, num_kv_heads, head_dim = self.k.shape
        return num_blocks, block_size, num_kv_heads, head_dim

    @property
    def head_dim_v(self) -> int:
        """Of V; without V that of K, so that kernels compile."""
        return int(self.k.shape[3] if self.v is None else self.v.shape[3])

    @property
    def num_slots(self) -> int:
        """Tokens that all blocks hold."""
        return int(self.k.shape[0] * self.k.shape[1])

    def arrays(self, block_tables: Any = None) -> tuple[Any, ...]:
        """The arrays of KV_ARRAYS."""
        return self.k, self.v, self.k_scale, self.v_scale, block_tables, None

    def check_writeable(self) -> None:
        """Raise LayoutMismatch if a kernel may not write the cache."""
        computed = self.scale_mode == "token_head"
        for name in ("k", "v", *(("k_scale", "v_scale") if computed else ())):
            array = getattr(self, name)
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise LayoutMismatch(f"the cache's {name} is read-only, and the kernel writes it")

    def _check_arrays(self) -> None:
        axes = "num_blocks, block_size, num_kv_heads, head_dim"
        check_array(self.backend, "k", self.k, (None,) * 4, axes)
        check_dense_rows("k", self.k)
        given = self.dtype or None
        object.__setattr__(self, "dtype", kernel_dtype("k", self.k, given))
        if self.v is not None:
            check_array(self.backend, "v", self.v, (*self.k.shape[:3], None), axes)
            check_dense_rows("v", self.v)
            if kernel_dtype("v", self.v, given) != self.dtype:
                raise LayoutMismatch(f"k is {self.dtype} and v is {self.v.dtype}: they must have one dtype")
        _, block_size, heads, head_dim = self.shape
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise UnsupportedVariant(f"block_size is {block_size}: the kernels take 1..{MAX_BLOCK_SIZE}")
        if not 1 <= heads <= MAX_GRID_Y // 2:
            raise UnsupportedVariant(f"num_kv_heads is {heads}: the kernels take 1..{MAX_GRID_Y // 2}")
        if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= self.head_dim_v <= MAX_HEAD_DIM):
            raise UnsupportedVariant(
                f"head dims are {head_dim} and {self.head_dim_v}: the kernels take 1..{MAX_HEAD_DIM}"
            )

    def _check_scales(self) -> None:
        if self.scale_mode not in SCALE_MODES:
            raise InvalidArgument(f"scale_mode must be one of {', '.join(SCALE_MODES)}, got {self.scale_mode!r}")
        scaled = self.scale_mode != "none"
        if scaled and self.dtype not in QUANTISED:
            raise UnsupportedVariant(
                f"scale_mode is {self.scale_mode!r} for {self.dtype}: only {', '.join(sorted(QUANTISED))} have scales"
            )
        num_blocks, block_size, heads, _ = self.shape
        shape = {"none": (), "tensor": (1,), "head": (heads,), "token_head": (num_blocks, block_size, heads)}
        for name, scale, wanted in (
            ("k_scale", self.k_scale, scaled),
            ("v_scale", self.v_scale, scaled and self.v is not None),
        ):
            if (scale is not None) != wanted:
                found = "missing" if scale is None else "given"
                raise InvalidArgument(f"{name} is {found} with scale_mode {self.scale_mode!r}")
            if scale is not None:
                axes = "num_blocks, block_size, num_kv_heads"[: None if self.scale_mode == "token_head" else 0]
                check_array(self.backend, name, scale, shape[self.scale_mode], axes or self.scale_mode, dtype="float32")
        if scaled and self.v is not None and element_strides(self.k_scale) != element_strides(self.v_scale):
            raise LayoutMismatch(
                f"k_scale and v_scale differ in strides: {self.k_scale.strides}, {self.v_scale.strides}"
            )

    def _fields(self) -> dict[str, Any]:
        """Fields of the struct KvParams but for the arrays."""
        k_block, k_token, k_head, _ = element_strides(self.k)
        v_block, v_token, v_head, _ = (0,) * 4 if self.v is None else element_strides(self.v)
        scales = [] if self.k_scale is None else element_strides(self.k_scale)
        block, token, head = scales if len(scales) == 3 else (0, 0, scales[0] if self.scale_mode == "head" else 0)
        return {
            "k_block_stride": k_block,
            "k_token_stride": k_token,
            "k_head_stride": k_head,
            "v_block_stride": v_block,
            "v_token_stride": v_token,
            "v_head_stride": v_head,
            "scale_block_stride": block,
            "scale_token_stride": token,
            "scale_head_stride": head,
            "table_stride": 0,
            "block_size": self.k.shape[1],
            "num_blocks": self.k.shape[0],
        }
