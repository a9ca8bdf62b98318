"""A CUDA device through CuPy: CUDA graphs, and events around their launches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bench.attention.device import Call, Recording
from bench.attention.nvidia import clocks_and_power
from pagedkv.kernels.cupy_backend import CupyBackend, import_cupy

_L2_BYTES, _MEMORY_CLOCK_KHZ, _BUS_BITS, _CLOCK_KHZ = 38, 36, 37, 13  # cudaDeviceAttr
_DEVICE_TO_DEVICE = 3  # cudaMemcpyKind


class CudaGraph:
    """A captured graph and the stream it is launched on."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph, self._stream = graph, stream

    def launch(self) -> None:
        """Start it on the stream."""
        self._graph.launch(self._stream)


class CudaDevice:
    """The first CUDA device.

    Everything runs on one non-blocking stream, which becomes CuPy's current one.
    """

    kind = "cuda"
    unit = "s"

    def __init__(self) -> None:
        self._cupy = import_cupy()
        self.backend = CupyBackend(0)
        self._runtime = self._cupy.cuda.runtime
        self.l2_bytes: int = self._attribute(_L2_BYTES)
        self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self.stream.use()

    def describe(self) -> dict[str, Any]:
        """Name, driver, compilers, clocks and power limit."""
        properties = self._runtime.getDeviceProperties(0)
        driver, runtime = self._runtime.driverGetVersion(), self._runtime.runtimeGetVersion()
        free, total = self._runtime.memGetInfo()
        return {
            "device": properties["name"].decode(),
            "driver": f"{driver // 1000}.{driver % 1000 // 10}",
            "cuda_runtime": f"{runtime // 1000}.{runtime % 1000 // 10}",
            "nvrtc": ".".join(map(str, self.backend.cache.nvrtc.version)),
            "cupy": self._cupy.__version__,
            "capability": ".".join(map(str, self.backend.capability)),
            "sms": self.backend.num_sms,
            "memory_gib": round(total / 2**30, 1),
            "free_gib": round(free / 2**30, 1),
            "l2_mib": round(self.l2_bytes / 2**20, 1),
            "memory_bus_bits": self._attribute(_BUS_BITS),
            "memory_clock_khz": self._attribute(_MEMORY_CLOCK_KHZ),
            "clock_khz": self._attribute(_CLOCK_KHZ),
            **clocks_and_power(),
        }

    def free_bytes(self) -> int:
        """Free device memory, in bytes."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        free: int = self._runtime.memGetInfo()[0]
        return free

    def array(self, host: NDArray[Any]) -> Any:
        """A copy on the device, there when this returns."""
        return self.backend.asarray(host)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array of undefined contents."""
        return self.backend.empty(shape, dtype)

    def copy(self, to: Any, source: Any) -> None:
        """Copy one contiguous array to another of its size, on the stream."""
        assert to.nbytes == source.nbytes
        self._runtime.memcpyAsync(to.data.ptr, source.data.ptr, to.nbytes, _DEVICE_TO_DEVICE, self.stream.ptr)

    def fill(self, array: Any, byte: int) -> None:
        """Set every byte of a contiguous array, on the stream."""
        self._runtime.memsetAsync(array.data.ptr, byte, array.nbytes, self.stream.ptr)

    def host(self, array: Any) -> NDArray[Any]:
        """A copy on the host, once the stream is done."""
        return np.asarray(self.backend.to_host(array))

    def synchronize(self) -> None:
        """Wait for the stream; an error of an earlier launch is raised here."""
        self.stream.synchronize()

    def record(self, calls: Sequence[Call]) -> Recording:
        """Capture the calls into a CUDA graph."""
        self.stream.synchronize()
        self.stream.begin_capture()
        try:
            for call in calls:
                call()
        except BaseException:
            with contextlib.suppress(self._runtime.CUDARuntimeError):  # the capture is invalid: only leave it
                self.stream.end_capture()
            raise
        return CudaGraph(self.stream.end_capture(), self.stream)

    def time(self, recordings: Sequence[Recording], rounds: int) -> list[list[float]]:
        """Seconds of every launch.

        All are queued at once, so that the device never waits for the host in between.
        """
        event = self._cupy.cuda.Event
        pairs = [[(event(), event()) for _ in range(rounds)] for _ in recordings]
        for turn in range(rounds):
            for recording, times in zip(recordings, pairs, strict=True):
                begin, end = times[turn]
                begin.record(self.stream)
                recording.launch()
                end.record(self.stream)
        self.stream.synchronize()
        elapsed = self._cupy.cuda.get_elapsed_time
        return [[elapsed(begin, end) / 1e3 for begin, end in times] for times in pairs]

    def _attribute(self, number: int) -> int:
        value: int = self._runtime.deviceGetAttribute(number, 0)
        return value
