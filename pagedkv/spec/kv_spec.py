"""KVSpec: the shape of one block of KV, and what follows from it.

One block holds ``block_size`` tokens of K and V for all layers, contiguously, in C order and native byte
order: ``[num_layers, 2, block_size, num_kv_heads, head_dim]`` (layout NHD) or
``[num_layers, 2, num_kv_heads, block_size, head_dim]`` (HND).
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType
from pagedkv.spec.dtypes import ITEMSIZES, dtype_name, numpy_dtype
from pagedkv.spec.namespace import DIGEST_BYTES, MAX_FIELD_BYTES, encode_fields
from pagedkv.spec.sizes import format_size, whole_number

MAX_BLOCK_SIZE = 256  # tokens
MAX_BLOCK_BYTES = 2**31 - 1  # offsets within one block fit in int32; offsets between blocks are 64-bit
MAX_DIMENSION = 2**16
LAYOUTS = ("NHD", "HND")
LAYOUT_VERSION = 1  # part of the fingerprint: raise it when the meaning of a block's bytes changes


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape, dtype and layout of the KV of one model.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : the model's numbers; KV heads are those of this process.
    dtype : ``"float32"``, ``"float16"`` or ``"bfloat16"``, or the NumPy dtype of one of them.
    block_size : tokens in a block, 1..256.
    layout : order within a block: ``"NHD"`` (token, head, dim) or ``"HND"`` (head, token, dim).
    model : name and revision of the weights. Part of the fingerprint: files written for others are refused.

    Raises
    ------
    WrongType, InvalidArgument
        A number is not whole or out of range, the dtype or layout is not known, or a block would pass 2 GiB.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"
    block_size: int = 16
    _: KW_ONLY
    layout: str = "NHD"
    model: str = ""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            self._store(name, whole_number(getattr(self, name), name, 1, MAX_DIMENSION))
        self._store("dtype", dtype_name(self.dtype))
        self._store("block_size", whole_number(self.block_size, "block_size", 1, MAX_BLOCK_SIZE))
        if type(self.layout) is not str:
            raise WrongType(f"layout must be a string, not {type(self.layout).__name__}")
        if self.layout not in LAYOUTS:
            raise InvalidArgument(f"layout must be 'NHD' or 'HND', got {self.layout[:40]!r}")
        if type(self.model) is not str:
            raise WrongType(f"model must be a string, not {type(self.model).__name__}")
        if len(encode_fields([(0, self.model)])) > MAX_FIELD_BYTES:
            raise InvalidArgument(f"model is too long: at most about {MAX_FIELD_BYTES} bytes")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise InvalidArgument(
                f"a block would be {format_size(self.block_bytes)}; at most 2 GiB: take a smaller block_size"
            )

    def _store(self, name: str, value: int | str) -> None:
        object.__setattr__(self, name, value)  # the normalised form, once, before anybody sees the object

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return ITEMSIZES[self.dtype]

    @property
    def np_dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the KV; bfloat16 without ``ml_dtypes`` is its bits, uint16."""
        return numpy_dtype(self.dtype)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block; axis 1 is K, then V."""
        if self.layout == "NHD":
            return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_size

    def fingerprint(self) -> bytes:
        """32 bytes that differ between any two specs whose blocks cannot stand for each other.

        Over every field, the layout's version and the machine's byte order; the same in every process.
        """
        values = (
            LAYOUT_VERSION,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.block_size,
            self.layout,
            self.model,
            sys.byteorder,
        )
        encoded = encode_fields(enumerate(values, start=1))
        return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES, person=b"pagedkv:spec:1").digest()


def layer_view(arena: NDArray[Any], layer: int, spec: KVSpec) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of one layer as views into a tier's arena; nothing is copied.

    Parameters
    ----------
    arena : uint8 [num_blocks, block_bytes]; rows may be apart, the bytes of a row must be adjacent.
    layer : 0..num_layers - 1.

    Returns
    -------
    k, v : ``spec.np_dtype`` [num_blocks, block_size, num_kv_heads, head_dim], in that order for both layouts.

    Raises
    ------
    LayoutMismatch
        The arena has not the dtype, shape, row layout or alignment that the spec asks for.
    WrongType, InvalidArgument
        ``layer`` is no layer of the spec.
    """
    layer = whole_number(layer, "layer", 0, spec.num_layers - 1)
    if getattr(arena, "dtype", None) != np.uint8 or arena.ndim != 2 or arena.shape[1] != spec.block_bytes:
        found = f"{getattr(arena, 'dtype', type(arena).__name__)} {list(getattr(arena, 'shape', ()))}"
        raise LayoutMismatch(f"the arena must be uint8 [num_blocks, {spec.block_bytes}], got {found}")
    if arena.size and (arena.strides[1] != 1 or arena.strides[0] % spec.itemsize):
        raise LayoutMismatch(f"the arena's rows must be contiguous and aligned, got strides {arena.strides}")
    host = getattr(arena, "ctypes", None)  # device arrays have none, and their allocators align
    if host is not None and host.data % spec.itemsize:
        raise LayoutMismatch(f"the arena must start at a multiple of {spec.itemsize} bytes")
    blocks = arena.view(spec.np_dtype).reshape(arena.shape[0], *spec.block_shape)
    k, v = blocks[:, layer, 0], blocks[:, layer, 1]
    if spec.layout == "HND":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return k, v


def gathered_shape(spec: KVSpec, start: int, stop: int, layout: str) -> tuple[int, ...]:
    """Shape of gathered K, and of V, in a layout."""
    heads_first = layout == "HND"
    rows = (spec.num_kv_heads, stop - start) if heads_first else (stop - start, spec.num_kv_heads)
    return (spec.num_layers, *rows, spec.head_dim)


def in_token_order(array: Any, layout: str) -> Any:
    """View gathered K or V as [num_layers, num_tokens, num_kv_heads, head_dim]."""
    return array.swapaxes(1, 2) if layout == "HND" else array
