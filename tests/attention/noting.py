"""A backend that notes each launch: the bytes of its struct, its grid and its stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pagedkv.kernels.backend import Dim3
from pagedkv.kernels.params import Params
from pagedkv.kernels.recorder import Recorder
from pagedkv.kernels.tensor_map import TENSOR_MAP_BYTES, Swizzle
from pagedkv.kernels.variant import Variant


@dataclass(frozen=True)
class Launch:
    """One launch."""

    kernel: str
    grid: Dim3
    params: NDArray[Any]
    stream: Any


class Noting(Recorder):
    """A recorder of an H100 that keeps every launch.

    Attributes
    ----------
    launches : in their order.
    during : called within each launch, before it is noted.
    """

    def __init__(self) -> None:
        super().__init__((9, 0))
        self.launches: list[Launch] = []
        self.during: Callable[[], None] = lambda: None

    def launch(
        self,
        variant: Variant,
        grid: Dim3,
        block: Dim3,
        params: Params,
        *,
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        self.during()
        self.launches.append(
            Launch(variant.kernel, grid, np.frombuffer(params.record.tobytes(), params.record.dtype), stream)
        )

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, *, stream: Any = None) -> Any:
        return aligned(shape, dtype)

    zeros = empty

    def tensor_map(
        self, array: Any, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: Swizzle = 0
    ) -> NDArray[np.void]:
        words = [array.ctypes.data, *dims, *strides, *box, swizzle, 1]
        return np.resize(np.array(words, np.uint64), TENSOR_MAP_BYTES // 8).view(f"V{TENSOR_MAP_BYTES}")


def aligned(shape: tuple[int, ...], dtype: DTypeLike, offset: int = 0) -> Any:
    """Zeros that begin so many bytes behind a multiple of 256."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(size + 512, np.uint8)
    start = -room.ctypes.data % 256 + offset
    return room[start : start + size].view(dtype).reshape(shape)
