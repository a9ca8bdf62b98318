"""As much of CuPy as the backend calls, on host memory.

It notes kernel launches, and runs copies when the stream is synchronised.

What real CuPy does with the same calls is checked in test_cupy_backend.py where CuPy is installed, and on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

ATTRIBUTES = {16: 132, 38: 50 << 20, 97: 227 << 10, 75: 9, 76: 0}  # multiprocessors, L2, shared memory, capability
FREE, TOTAL = 70 << 30, 80 << 30  # bytes of memory


class RuntimeFailure(Exception):
    """As cudaError: a message and a number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}: no luck")
        self.status = status


def asked_of_captures(captured: set[int], stream: int, implicit: Exception) -> bool:
    """As cudaStreamIsCapturing, which fails for the null stream beside a captured one."""
    if captured and stream in (0, 1):
        raise implicit
    return stream in captured


class FakeCupy:
    """The module, and what was done with it.

    Attributes
    ----------
    launches : (kernel, grid, block, content of the argument, shared bytes, stream pointer or None).
    modules : paths that were loaded, with their content then.
    allocations : device and pinned, counted.
    waits : how often the host waited for the device.
    now_ms : the device's clock, which tests move.
    captured : pointers of blocking streams that are being captured; the device cannot be waited for then.
    """

    __version__ = "14.2.0"
    __file__ = "/site-packages/cupy/__init__.py"

    def __init__(self, devices: int = 1) -> None:
        self.devices, self.current = devices, 0
        self.captured: set[int] = set()
        self.failure: int | None = None
        self.allocating_for, self.allocated_for = [77], []  # streams
        self.contexts: set[int] = set()  # devices that this thread has a context on
        self.launches: list[tuple[Any, ...]] = []
        self.modules: list[tuple[str, bytes]] = []
        self.allocations = self.waits = 0
        self.now_ms = 0.0
        self.pending: list[Any] = []
        self.kernels: list[Any] = []
        module = self

        class Array:
            """A device array: its memory is not reachable but through the module."""

            def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
                if memptr is None:
                    module.allocations += 1
                    module.allocated_for.append(module.allocating_for[-1])
                    host = np.empty(shape, dtype)
                    memptr = SimpleNamespace(ptr=host.ctypes.data, owner=host)
                self.data, self.shape, self.dtype = memptr, tuple(np.empty(shape, "V1").shape), np.dtype(dtype)
                self.strides = strides or np.empty(shape, dtype).strides

            nbytes = property(lambda self: int(np.prod(self.shape)) * self.dtype.itemsize)

            def host(self) -> np.ndarray[Any, Any]:
                end = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
                raw = (ctypes.c_uint8 * (end + self.dtype.itemsize)).from_address(self.data.ptr)
                return np.ndarray(self.shape, self.dtype, raw, 0, self.strides)

            def reshape(self, shape: Any) -> Array:
                return Array(shape, self.dtype, self.data)

            def get(self) -> np.ndarray[Any, Any]:
                return self.host().copy()

        class Kernel:
            def __init__(self, path: str, name: str) -> None:
                self.path, self.name, self.shared_size_bytes = path, name, 1024
                self.max_dynamic_shared_size_bytes = 48 << 10
                self.preferred_shared_memory_carveout = -1
                module.kernels.append(self)

            def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0, stream: Any = None) -> None:
                (record,) = args
                assert isinstance(record, np.ndarray)
                assert record.size == 1
                assert shared_mem <= self.max_dynamic_shared_size_bytes
                pointer = None if stream is None else stream.ptr
                module.launches.append((self.name, grid, block, record.tobytes(), shared_mem, pointer, module.current))

        class RawModule:
            def __init__(self, *, path: str) -> None:
                with open(path, "rb") as file:
                    module.modules.append((path, file.read()))
                self.path = path

            def get_function(self, name: str) -> Kernel:
                return Kernel(self.path, name)

        class Device:
            def __init__(self, number: int) -> None:
                self.number = number

            def __enter__(self) -> None:
                self.before, module.current = module.current, self.number

            def __exit__(self, *exception: object) -> None:
                module.current = self.before

        class ExternalStream:
            def __init__(self, ptr: int) -> None:
                self.ptr = ptr

            def __enter__(self) -> None:
                module.allocating_for.append(self.ptr)

            def __exit__(self, *exception: object) -> None:
                module.allocating_for.pop()

        class Event:
            ptr = 5

            def __init__(self, *, disable_timing: bool = False) -> None:
                self.timed = not disable_timing

            done = property(lambda self: not module.pending)

            def record(self, stream: Any) -> None:
                self.at_ms = module.now_ms

            def synchronize(self) -> None:
                assert self.timed

        class Stream(ExternalStream):
            def __init__(self, *, non_blocking: bool) -> None:
                assert non_blocking
                super().__init__(88)

        self.ndarray, self.RawModule = Array, RawModule
        self.empty, self.zeros = Array, self._zeros
        self.cuda = SimpleNamespace(
            Device=Device,
            Event=Event,
            ExternalStream=ExternalStream,
            Stream=Stream,
            get_elapsed_time=lambda begin, end: end.at_ms - begin.at_ms,
            alloc_pinned_memory=self._pinned,
            get_current_stream=lambda: SimpleNamespace(ptr=77, synchronize=self.synchronise),
            runtime=SimpleNamespace(
                CUDARuntimeError=RuntimeFailure,
                getDeviceCount=self._count,
                getDevice=lambda: self.current,
                setDevice=self._set_device,
                deviceGetAttribute=lambda attribute, device: ATTRIBUTES[attribute],
                driverGetVersion=lambda: 12080,
                memGetInfo=lambda: (FREE, TOTAL),
                getDeviceProperties=self._properties,
                deviceSynchronize=self.synchronise,
                streamIsCapturing=self._is_capturing,
                memcpyAsync=self._memcpy,
                memcpyHostToDevice=1,
                eventRecord=lambda event, stream: None,
            ),
        )

    def synchronise(self) -> None:
        """The host waits: everything under way happens now."""
        if self.captured:
            raise RuntimeFailure(900)
        self.waits += 1
        for target, source, size in self.pending:
            ctypes.memmove(target, source, size)
        self.pending.clear()

    def asarray(self, array: np.ndarray[Any, Any]) -> Any:
        made = self.ndarray(array.shape, array.dtype)
        made.host()[...] = array
        return made

    def ascontiguousarray(self, array: Any) -> Any:
        return self.asarray(array.host())

    def _zeros(self, shape: Any, dtype: Any) -> Any:
        made = self.ndarray(shape, dtype)
        with contextlib.suppress(ValueError):
            made.host()[...] = 0
        return made

    def _pinned(self, size: int) -> bytearray:
        self.allocations += 1
        return bytearray(size)

    def _memcpy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind == 1
        self.pending.append((target, source, size))

    def _set_device(self, device: int) -> None:
        self.current = device
        self.contexts.add(device)

    def _is_capturing(self, stream: int) -> bool:
        return asked_of_captures(self.captured, stream, RuntimeFailure(906))

    def _count(self) -> int:
        if self.failure is not None:
            raise RuntimeFailure(self.failure)
        return self.devices

    def _properties(self, device: int) -> dict[str, Any]:
        return {
            "name": b"NVIDIA H100", "major": 9, "minor": 0, "multiProcessorCount": 132, "totalGlobalMem": TOTAL,
        }  # fmt: skip
