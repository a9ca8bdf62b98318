"""Host memory that every framework takes as it is: compact, at a multiple of 64 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument
from pagedkv.interop.dtypes import itemsize, numpy_dtype

ALIGNMENT = 64  # bytes: the strictest that a framework asks for (JAX)


def compact_strides(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Strides in bytes of a C-contiguous array with elements of `size` bytes."""
    strides = []
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return tuple(reversed(strides))


def aligned_empty(shape: tuple[int, ...], name: str, alignment: int = ALIGNMENT) -> NDArray[Any]:
    """A C-contiguous uninitialised array that begins at a multiple of `alignment` bytes.

    Raises
    ------
    InvalidArgument
        `alignment` is no power of two, or less than an element.
    """
    size = itemsize(name)
    if alignment < size or alignment & (alignment - 1):
        raise InvalidArgument(f"alignment = {alignment}: a power of two of at least {size} bytes is needed")
    wanted = size
    for n in shape:
        wanted *= n
    memory = np.empty(wanted + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + wanted].view(numpy_dtype(name)).reshape(shape)
