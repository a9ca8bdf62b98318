"""What kernel wrappers ask of an array: place, shape, dtype, strides and alignment.

Every check raises before anything is launched, and names the argument, its value, and the required one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.params import address

WIDEST_ACCESS = 16  # bytes


def check_array(
    backend: Backend,
    name: str,
    array: Any,
    shape: tuple[int | None, ...],
    axes: str,
    *,
    dtype: str | tuple[str, ...] | None = None,
    written: bool = False,
    host: bool = False,
) -> None:
    """Raise unless an array fits.

    Parameters
    ----------
    backend : whose memory it must lie in.
    name, axes : how messages call the array and its shape, ``"num_tokens, num_kv_heads, head_dim"``.
    shape : required lengths; None for any.
    dtype : names of which one is required; None leaves it to the caller.
    written : the kernel writes it.
    host : pinned host memory will do as well.

    Raises
    ------
    WrongType
        No array of the backend, or another dtype.
    LayoutMismatch
        Another shape; elements that are not aligned to their size; read-only where it is written.
    """
    if not hasattr(array, "strides") or not hasattr(array, "dtype"):
        raise WrongType(f"{name} must be an array [{axes}] of the {backend.name} backend, not {type(array).__name__}")
    if not host:
        check_place(backend, name, array)
    found, wanted = tuple(array.shape), tuple("any" if length is None else length for length in shape)
    if len(found) != len(shape) or any(n not in (None, m) for n, m in zip(shape, found, strict=True)):
        raise LayoutMismatch(f"{name} has shape {found}, not [{axes}] = ({', '.join(map(str, wanted))})")
    if dtype is not None and array.dtype.name not in ((dtype,) if isinstance(dtype, str) else dtype):
        raise WrongType(
            f"{name} has dtype {array.dtype}, not {dtype if isinstance(dtype, str) else ' or '.join(dtype)}"
        )
    itemsize = array.dtype.itemsize
    if array.size and (address(array) % itemsize or any(stride % itemsize for stride in array.strides)):
        raise LayoutMismatch(f"{name} is not aligned: its address and strides must be multiples of {itemsize} bytes")
    if written and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise LayoutMismatch(f"{name} is read-only, and the kernel writes it")


def check_place(backend: Backend, name: str, array: Any) -> None:
    """Raise WrongType for an array in host memory or on another GPU than the kernels run on."""
    if backend.name != "cupy":
        return
    if not hasattr(array, "__cuda_array_interface__"):
        raise WrongType(f"{name} is in host memory ({type(array).__name__}): the kernel needs a device array")
    own, found = getattr(backend, "device", None), getattr(array.data, "device_id", None)
    if None not in (own, found) and own != found:
        raise WrongType(f"{name} lies on GPU {found}, and the kernels run on GPU {own}: copy it there first")


def check_dense_rows(name: str, array: Any) -> None:
    """Raise LayoutMismatch unless the elements of the last axis are neighbours."""
    if array.size and array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize:
        raise LayoutMismatch(
            f"{name} has elements {array.strides[-1]} bytes apart along its last axis: they must be neighbours"
        )


def check_range(name: str, array: Any, last: int, *, negative: bool = False) -> None:
    """Raise InvalidArgument for a value outside ``0..last`` in an index array on the host.

    ``negative``: values below 0 are fine, they mean that something is skipped.
    """
    if isinstance(array, np.ndarray) and array.size:
        smallest, largest = int(array.min()), int(array.max())
        if largest > last or (smallest < 0 and not negative):
            skipped = ", or negative to skip" if negative else ""
            raise InvalidArgument(f"{name} has {largest if largest > last else smallest}: it takes 0..{last}{skipped}")


def element_strides(array: Any) -> list[int]:
    """Strides in elements; 0 for axes of length one, where the stride does not matter."""
    itemsize = array.dtype.itemsize
    return [stride // itemsize if n > 1 else 0 for n, stride in zip(array.shape, array.strides, strict=True)]


def alignment(*arrays: Any) -> int:
    """Alignment in bytes of all rows along the last axes: a power of two, at most 16."""
    bits = WIDEST_ACCESS
    for array in arrays:
        bits |= address(array)
        for n, stride in zip(array.shape[:-1], array.strides[:-1], strict=True):
            bits |= stride if n > 1 else 0
    return bits & -bits


def row_lanes(dim: int, vec: int) -> int:
    """Lanes that hold a row of ``dim`` elements.

    One per vector, rounded up to a power of two, at most a warp.
    """
    return int(min(32, 1 << (dim // vec - 1).bit_length()))


ROW_THREADS = 128  # of a CTA of the row kernels (rows.cuh)


def row_grid(num_tokens: int, heads: int, lanes: int) -> tuple[int, int, int]:
    """Grid of a row kernel: as many CTAs as hold a row per token, times heads."""
    return (-(-num_tokens * lanes // ROW_THREADS), heads, 1)
