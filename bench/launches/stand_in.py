"""A stand-in for CuPy whose launches do nothing: only pagedkv's own host work remains.

Arrays build the tuples of their shape and strides at each look, as CuPy's do, and their memory is never touched. It
has as much as the calls of ``bench.launches`` need.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

ATTRIBUTES = {16: 132, 38: 50 << 20, 97: 227 << 10, 75: 9, 76: 0, 91: 1}  # of an H100, by number of cudaDeviceAttr


class Pointer:
    """Where an array begins, as ``cupy.cuda.MemoryPointer``."""

    __slots__ = ("device_id", "ptr")

    def __init__(self, ptr: int) -> None:
        self.ptr, self.device_id = ptr, 0


class Array:
    """A device array without memory."""

    __module__ = "cupy"
    __slots__ = ("_form", "data", "dtype")
    next_address = 1 << 40
    views: dict[Any, tuple[list[list[int]], int]] = {}  # by form and index: the view's form, and where it begins

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
        kind, shape = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
        if strides is None:
            strides = tuple(math.prod(shape[axis + 1 :]) * kind.itemsize for axis in range(len(shape)))
        self._form = [list(shape), list(strides)]
        if memptr is None:
            memptr = Pointer(Array.next_address)
            Array.next_address += (math.prod(shape) * kind.itemsize // 512 + 1) * 512
        self.data, self.dtype = memptr, kind

    shape = property(lambda self: tuple(self._form[0]))
    strides = property(lambda self: tuple(self._form[1]))
    ndim = property(lambda self: len(self._form[0]))
    size = property(lambda self: math.prod(self._form[0]))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    flags = SimpleNamespace(c_contiguous=True)
    __cuda_array_interface__: dict[str, Any] = {}

    def __len__(self) -> int:
        return int(self._form[0][0])

    def _seen(self, view: Any, base: Any) -> Array:
        offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        return Array(view.shape, view.dtype, Pointer(self.data.ptr + offset), view.strides)

    def _numpy(self) -> Any:
        """A NumPy array of the same form over reserved memory, to ask NumPy about views."""
        end = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) + self.dtype.itemsize
        return np.ndarray(self.shape, self.dtype, np.zeros(max(end, 1), np.uint8), 0, self.strides)

    def __getitem__(self, index: Any) -> Array:
        """A view by numbers and slices; each form and index is worked out once."""
        known = self.shape, self.strides, self.dtype, repr(index)
        if known not in Array.views:
            base = self._numpy()
            seen = self._seen(base[index], base)
            Array.views[known] = seen._form, seen.data.ptr - self.data.ptr
        made = Array.__new__(Array)
        made._form, offset = Array.views[known]
        made.data, made.dtype = Pointer(self.data.ptr + offset), self.dtype
        return made

    def reshape(self, *shape: Any) -> Array:
        """As NumPy's."""
        base = self._numpy()
        return self._seen(base.reshape(*shape), base)

    def view(self, dtype: Any) -> Array:
        """As NumPy's."""
        base = self._numpy()
        return self._seen(base.view(dtype), base)

    def swapaxes(self, first: int, second: int) -> Array:
        """As NumPy's."""
        base = self._numpy()
        return self._seen(base.swapaxes(first, second), base)


class Kernel:
    """A loaded kernel: the measured work ends here."""

    shared_size_bytes = 1024
    max_dynamic_shared_size_bytes = 48 << 10
    preferred_shared_memory_carveout = -1

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0, stream: Any = None) -> None:
        """Launch nothing."""


class Stream:
    """A stream, by its pointer."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def synchronize(self) -> None:
        """Nothing runs."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""


class Event:
    """An event that has happened."""

    ptr, done = 5, True

    def __init__(self, *, disable_timing: bool = True) -> None:
        pass

    def record(self, stream: Any) -> None:
        """Nothing to note."""

    def synchronize(self) -> None:
        """Nothing runs."""


class Device:
    """The one device, current from the start."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def install(capturing: list[bool]) -> Any:
    """Put the stand-in where ``import cupy`` finds it.

    `capturing[0]` says whether every stream is being captured.
    """
    module: Any = ModuleType("cupy")
    module.__version__, module.__file__ = "14.2.0", "cupy/__init__.py"
    module.ndarray = module.empty = module.zeros = Array
    module.RawModule = lambda path: SimpleNamespace(get_function=lambda name: Kernel())
    current = Stream(77)
    module.cuda = SimpleNamespace(
        Device=Device,
        Event=Event,
        ExternalStream=Stream,
        Stream=SimpleNamespace,
        alloc_pinned_memory=bytearray,
        get_current_stream=lambda: current,
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        runtime=SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            getDeviceCount=lambda: 1,
            getDevice=lambda: 0,
            setDevice=lambda device: None,
            deviceGetAttribute=lambda attribute, device: ATTRIBUTES[attribute],
            driverGetVersion=lambda: 12080,
            getDeviceProperties=lambda device: {"name": b"a stand-in"},
            deviceSynchronize=lambda: None,
            streamIsCapturing=lambda stream: capturing[0],
            memcpyAsync=lambda *arguments: None,
            memcpyHostToDevice=1,
            eventRecord=lambda event, stream: None,
        ),
    )
    sys.modules["cupy"] = module
    return module
