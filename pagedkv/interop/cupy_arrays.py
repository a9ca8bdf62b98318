"""Views on a GPU as CuPy arrays; the only place here that makes one."""

from __future__ import annotations

import importlib
from typing import Any

from pagedkv.interop.devices import device_code, stream_pointer
from pagedkv.interop.dtypes import numpy_dtype
from pagedkv.interop.view import View
from pagedkv.streams import external_stream


def as_cupy(view: View) -> Any:
    """The same device memory as a CuPy array, which keeps the view."""
    cupy = importlib.import_module("cupy")
    number = device_code(view.device)[1]
    spans = [(n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)]
    below = -sum(span for span in spans if span < 0) if view.size else 0
    num_bytes = below + sum(span for span in spans if span > 0) + view.itemsize if view.size else 0
    memory = cupy.cuda.UnownedMemory(view.ptr - below, num_bytes, view, number)
    pointer = cupy.cuda.MemoryPointer(memory, below)
    return cupy.ndarray(view.shape, numpy_dtype(view.dtype), pointer, view.strides)


def copy_of(view: View) -> View:
    """A compact copy on the same GPU, made on the view's stream."""
    cupy = importlib.import_module("cupy")
    with cupy.cuda.Device(device_code(view.device)[1]), external_stream(cupy, stream_pointer(view.stream)):
        array = as_cupy(view).copy(order="C")
    return View(
        array.data.ptr, array.shape, array.strides, view.dtype, view.device, read_only=False,
        stream=view.stream, owner=array,
    )  # fmt: skip


def device_of(array: Any, ptr: int) -> int:
    """Number of the CUDA device that an array lies on."""
    number = getattr(getattr(array, "device", None), "id", None)
    if isinstance(number, int):
        return number
    runtime = importlib.import_module("cupy").cuda.runtime
    return int(runtime.pointerGetAttributes(ptr).device)
