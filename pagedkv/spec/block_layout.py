"""Where the bytes of a block are: a layer's K, V and scales as views into an arena.

A block is its layers one after the other; a layer is its *planes* one after the other: K, V, and where each token and
head has a scale, K's scales and V's. Where V is a part of K, its plane is empty, and K's scales are V's too. A plane is
in C order and native byte order, [block_size, num_kv_heads, head_dim] (layout NHD) or [num_kv_heads, block_size,
head_dim] (HND); scales have no last axis. With scales every plane is filled up to a multiple of 16 bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagedkv.errors import LayoutMismatch
from pagedkv.spec.sizes import whole_number

if TYPE_CHECKING:
    from pagedkv.spec.kv_spec import KVSpec

ALIGNMENT = 16  # bytes


class Plane(NamedTuple):
    """One array of a layer.

    Attributes
    ----------
    first : byte of the layer at which it begins.
    shape : in the layout's order.
    dtype : NumPy's.
    """

    first: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def items(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def planes(spec: KVSpec) -> tuple[dict[str, Plane], int]:
    """The planes of a layer by name, and the bytes of a layer."""
    found: dict[str, Plane] = {}
    first, aligned = 0, ALIGNMENT if spec.has_scale_planes else 1

    def add(name: str, last: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        nonlocal first
        rows = (spec.block_size, spec.num_kv_heads)
        plane = Plane(first, (*(rows[::-1] if spec.layout == "HND" else rows), *last), dtype)
        found[name] = plane
        first += -(-plane.items * dtype.itemsize // aligned) * aligned

    add("k", (spec.head_dim,), spec.np_dtype)
    add("v", (spec.width_of_v,), spec.np_dtype)
    if spec.has_scale_planes:
        add("k_scale", (), np.dtype(np.float32))
        if spec.v_in_k:
            found["v_scale"] = found["k_scale"]
        else:
            add("v_scale", (), np.dtype(np.float32))
    return found, first


def plane_view(arena: Any, spec: KVSpec, name: str, row_bytes: int | None = None) -> Any:
    """One plane of all layers as a view into a tier's arena; nothing is copied.

    Parameters
    ----------
    arena : uint8 [num_blocks, block_bytes], NumPy's or a device's; rows may be apart, a row's bytes must be adjacent.
    name : ``"k"``, ``"v"``, ``"k_scale"`` or ``"v_scale"``.
    row_bytes : of the arena's rows, where unused bytes follow each block. CuPy changes the element size of contiguous
        arrays alone, so blocks that lie apart on a GPU come as whole rows.

    Returns
    -------
    [num_blocks, num_layers, block_size, num_kv_heads, head_dim], in that order for both layouts; scales are without
    the last axis.

    Raises
    ------
    LayoutMismatch
        The arena has not the dtype, shape, row layout or alignment that the spec asks for.
    """
    found, layer_bytes = planes(spec)
    plane = found[name]
    size = plane.dtype.itemsize
    row_bytes = spec.block_bytes if row_bytes is None else row_bytes
    if getattr(arena, "dtype", None) != np.uint8 or arena.ndim != 2 or arena.shape[1] != row_bytes:
        shown = f"{getattr(arena, 'dtype', type(arena).__name__)} {list(getattr(arena, 'shape', ()))}"
        raise LayoutMismatch(f"the arena must be uint8 [num_blocks, {row_bytes}], got {shown}")
    if arena.size and (arena.strides[1] != 1 or arena.strides[0] % size):
        raise LayoutMismatch(f"the arena's rows must be contiguous and aligned, got strides {arena.strides}")
    host = getattr(arena, "ctypes", None)  # device arrays have none, and their allocators align
    if host is not None and host.data % size:
        raise LayoutMismatch(f"the arena must start at a multiple of {size} bytes")
    blocks = arena.view(plane.dtype)[:, : spec.block_bytes // size]
    layers = blocks.reshape(arena.shape[0], spec.num_layers, layer_bytes // size)
    first = plane.first // size
    view = layers[:, :, first : first + plane.items].reshape(arena.shape[0], spec.num_layers, *plane.shape)
    return view.swapaxes(2, 3) if spec.layout == "HND" else view


def layer_view(arena: Any, layer: int, spec: KVSpec, row_bytes: int | None = None) -> tuple[Any, Any]:
    """K and V of one layer as views into a tier's arena; nothing is copied.

    Parameters
    ----------
    arena, row_bytes : as for :func:`plane_view`.
    layer : 0..num_layers - 1.

    Returns
    -------
    k, v : ``spec.np_dtype`` [num_blocks, block_size, num_kv_heads, head_dim], in that order for both layouts.

    Raises
    ------
    LayoutMismatch
        As :func:`plane_view`.
    WrongType, InvalidArgument
        ``layer`` is no layer of the spec.
    """
    layer = whole_number(layer, "layer", 0, spec.num_layers - 1)
    k, v = (plane_view(arena, spec, name, row_bytes) for name in ("k", "v"))
    return k[:, layer], v[:, layer]


def gathered_shapes(spec: KVSpec, start: int, stop: int, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of gathered K, and of V, in a layout."""
    heads, tokens = spec.num_kv_heads, stop - start
    rows = (heads, tokens) if layout == "HND" else (tokens, heads)
    return (spec.num_layers, *rows, spec.head_dim), (spec.num_layers, *rows, spec.width_of_v)


def check_outputs(out: Any, shapes: tuple[tuple[int, ...], ...], dtype: np.dtype[Any], kind: type = object) -> None:
    """Raise LayoutMismatch unless `out` is a pair of arrays of these shapes and this dtype."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise LayoutMismatch(f"out must be a pair of arrays (k, v), got {type(out).__name__}")
    for array, shape in zip(out, shapes, strict=True):
        if not isinstance(array, kind) or getattr(array, "shape", None) != shape or array.dtype != dtype:  # type: ignore[attr-defined]
            found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
            raise LayoutMismatch(f"out must be {dtype} {shape}, got {found}")


def in_token_order(array: Any, layout: str) -> Any:
    """View gathered K or V as [num_layers, num_tokens, num_kv_heads, head_dim]."""
    return array.swapaxes(1, 2) if layout == "HND" else array
