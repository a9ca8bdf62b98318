"""Paged KV for the tests of the cache kernels, on the host and on the backend.

Two layers of a pool full of poison.

A test writes the same thing twice, with the kernel and with NumPy into a copy, and compares every byte of the pool:
what the kernel was not asked to touch must still be poison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import ScaleMode
from pagedkv.kernels.layer_kv import LayerKv

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
LARGEST = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
POISON = 0xFF  # a NaN in every floating-point type, in float32 scales as well


@dataclass
class Layer:
    """The second of two layers of a block-major pool.

    Attributes
    ----------
    bytes : uint8 [num_blocks, block_bytes], the pool: per layer K, V, and k_scale, v_scale if they are per token-head.
    k, v, k_scale, v_scale : views of it, or arrays of their own; whatever module their memory belongs to.
    """

    bytes: Any
    k: Any
    v: Any
    k_scale: Any = None
    v_scale: Any = None


@dataclass(frozen=True)
class Shape:
    """Numbers of a pool.

    ``skew`` bytes stand before each layer, so that nothing is aligned to more than that.
    """

    num_blocks: int = 5
    block_size: int = 4
    heads: int = 2
    dim: int = 32
    dim_v: int = 0  # 0: as dim; -1: no V
    dtype: str = "float16"
    layout: str = "NHD"
    scale_mode: ScaleMode = "none"
    skew: int = 0

    @property
    def width_v(self) -> int:
        return {0: self.dim, -1: 0}.get(self.dim_v, self.dim_v)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(offset, bytes) of K, V, k_scale and v_scale in a block; and the block's end."""
        rows = self.block_size * self.heads
        sizes = [rows * self.dim * DTYPES[self.dtype].itemsize, rows * self.width_v * DTYPES[self.dtype].itemsize]
        sizes += [4 * rows, 4 * rows] if self.scale_mode == "token_head" else [0, 0]
        layer = sum(sizes) + self.skew
        at = layer + self.skew
        found = []
        for size in sizes:
            found.append((at, size))
            at += size
        return [*found, (2 * layer, 0)]

    def blank(self) -> NDArray[np.uint8]:
        """A pool of poison on the host."""
        return np.full((self.num_blocks, self.parts[-1][0]), POISON, np.uint8)

    def views(self, pool: Any, scales: tuple[Any, Any] = (None, None)) -> Layer:
        """K, V and the scales of a pool, on the host or on a device."""
        k, v, k_scale, v_scale = (
            self._view(pool, offset, size, dim, dtype)
            for (offset, size), dim, dtype in zip(
                self.parts, (self.dim, self.width_v, 0, 0), (self.dtype, self.dtype, "float32", "float32"), strict=False
            )
        )
        if self.scale_mode != "token_head":
            k_scale, v_scale = scales
        if self.dim_v == -1:
            v = v_scale = None
        return Layer(pool, k, v, k_scale, v_scale)

    def _view(self, pool: Any, offset: int, size: int, dim: int, dtype: str) -> Any:
        held = DTYPES[dtype]
        if not isinstance(pool, np.ndarray) and not held.isbuiltin:  # a device array module need not know it
            held = np.dtype(f"u{held.itemsize}")
        columns = pool.view(held)[:, offset // held.itemsize : (offset + size) // held.itemsize]
        inner = (self.block_size, self.heads) if self.layout == "NHD" else (self.heads, self.block_size)
        view = _split_axis(columns, (*inner, dim) if size and dim else inner if size else (0,))
        return view if self.layout == "NHD" or not size else view.swapaxes(1, 2)


def _split_axis(rows: Any, inner: tuple[int, ...]) -> Any:
    """A view of [n, a * b * ..] as [n, a, b, ..]: reshape, and proof that nothing was copied."""
    view = rows.reshape(rows.shape[0], *inner)
    if view.size and rows.shape[0] > 1:
        assert view.strides[0] == rows.strides[0], "reshape has copied"
    return view


def layer_kv(backend: Backend, shape: Shape, layer: Layer) -> LayerKv:
    """The layer as kernels take it."""
    return LayerKv(
        backend,
        layer.k,
        layer.v,
        dtype=shape.dtype,
        scale_mode=shape.scale_mode,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )


def huge(backend: Backend, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array of gigabytes of which a test touches little.

    On the host, memory is taken only where the test touches it.
    """
    return np.zeros(shape, dtype) if backend.name == "ptxsim" else backend.empty(shape, dtype)


def encode(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Convert float32 to a dtype as the kernels do: to nearest even.

    fp8 and int8 saturate; int8 has 0 for NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype not in LARGEST:
            return values.astype(DTYPES[dtype])
        held = np.clip(values, -LARGEST[dtype], LARGEST[dtype])
        if dtype == "int8":
            return np.nan_to_num(np.rint(held)).astype(np.int8)
        return held.astype(DTYPES[dtype])


def row_scales(rows: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Return the scale of each row along the last axis; NaN wins.

    The scale maps the row's largest absolute value to the type's largest number.
    """
    return np.abs(rows).max(axis=-1) / np.float32(LARGEST[dtype])


def quantise(rows: NDArray[np.float32], scale: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Rows over their scales (which broadcast), encoded."""
    with np.errstate(invalid="ignore", divide="ignore"):
        quotient = np.where(scale[..., None] == 0, np.float32(0), rows / scale[..., None])
    return encode(quotient.astype(np.float32), dtype)


def assert_same_bytes(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Bit for bit, with the place of the first difference."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    a = np.ascontiguousarray(found).view(np.uint8)
    b = np.ascontiguousarray(expected).view(np.uint8)
    where = np.argwhere(a != b)
    first = tuple(where[0].tolist()) if len(where) else ()
    assert not len(where), f"byte {first} of {a.shape} is {a[first]:#x} for {b[first]:#x}, {len(where)} bytes differ"
