"""Ours, for others: views of arrays, read-only unless asked otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagedkv.errors import LayoutMismatch, WrongType
from pagedkv.interop.devices import device_code
from pagedkv.interop.dtypes import dtype_name, in_numpy, itemsize
from pagedkv.interop.imports import as_view
from pagedkv.interop.memory import ALIGNMENT, aligned_empty
from pagedkv.interop.view import View


def export(
    array: Any, *, dtype: Any = None, read_only: bool = True, device: str | None = None, stream: Any = None
) -> View:
    """A view of an array that other frameworks can read, without a copy.

    JAX and ONNX Runtime assume that an imported array does not change. Export memory that you still write only
    with ``read_only=False``, and to code that expects changes.

    Parameters
    ----------
    array : NumPy or CuPy array, or whatever :func:`as_view` takes.
    dtype : of the elements, for an array that has only their bits: ``"bfloat16"`` for uint16,
        ``"float8_e4m3fn"`` and the like for uint8.
    read_only : what consumers are told.
    device : ``"pinned"`` for a NumPy array in page-locked memory. It is exported as CPU memory, which all consumers
        read, and as pinned memory (kDLCUDAHost) to those who ask for it with ``dl_device=(3, 0)``.
    stream : the CUDA stream that the array is ready on. Default: CuPy's current one when it is handed over.

    Raises
    ------
    LayoutMismatch
        `array` is read-only and `read_only` is False.
    WrongType
        Not an array, or its elements are not of the size of `dtype`.
    """
    view = as_view(array)
    if view.read_only and not read_only:
        raise LayoutMismatch("the array is read-only: it can only be exported with read_only=True, or as a copy")
    name = view.dtype if dtype is None else dtype_name(dtype)
    if name != view.dtype and (itemsize(name) != view.itemsize or (in_numpy(name) and in_numpy(view.dtype))):
        raise WrongType(f"the array has {view.dtype}: not the bits of {name}")
    place = view.device if device is None else device
    if device is not None and {device_code(place)[0], device_code(view.device)[0]} - {1, 3}:
        raise WrongType(f"the array lies on {view.device}: device= can only tell pinned host memory from other")
    stream = view.stream if stream is None else stream
    return replace(view, dtype=name, device=place, read_only=read_only, harmless=False, stream=stream)


def empty(shape: tuple[int, ...], dtype: Any, *, alignment: int = ALIGNMENT) -> View:
    """A new array in host memory with undefined contents, compact, that may be written.

    NumPy's own arrays begin at multiples of 16 bytes, which JAX would copy.

    Parameters
    ----------
    shape : by axis.
    dtype : a name, ``"bfloat16"`` and the fp8 types among them, or a NumPy dtype.
    alignment : bytes, a power of two.

    Raises
    ------
    WrongType, InvalidArgument
    """
    name = dtype_name(dtype)
    return export(aligned_empty(tuple(shape), name, alignment), dtype=name, read_only=False)
