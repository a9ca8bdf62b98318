"""Kernels on a CUDA device through CuPy.

Our own NVRTC compiles them, ``cupy.RawModule`` loads them, CuPy launches them.

A launch neither allocates device memory nor waits for the device, once :meth:`CupyBackend.prepare` (or an earlier
launch) has loaded the kernel. CuPy is imported when a backend is made.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pagedkv import extras
from pagedkv.errors import InvalidArgument, KernelsUnavailable
from pagedkv.kernels.backend import Dim3
from pagedkv.kernels.captures import is_barred, wait_for_device
from pagedkv.kernels.driver import driver_version, has_tensor_maps
from pagedkv.kernels.in_turn import InTurn
from pagedkv.kernels.jit import Binary, CompileCache, cache_for_driver
from pagedkv.kernels.params import Params, address
from pagedkv.kernels.precompile import architecture
from pagedkv.kernels.staging import Staging
from pagedkv.kernels.tensor_map import Swizzle, encode_tensor_map
from pagedkv.kernels.variant import Variant
from pagedkv.streams import RawStream, external_stream, stream_address

# cudaDeviceAttr, cudaError
_MULTIPROCESSORS, _L2_BYTES, _SHARED_OPTIN, _MAJOR, _MINOR = 16, 38, 97, 75, 76
_NO_DEVICE = 100
_SERIES = 5  # of timed runs
_ORDINARY_SHARED = 48 * 1024  # bytes a CTA may have without asking for more when the kernel is loaded
_ALL_SHARED = 100  # percent of the shared memory that a multiprocessor can have
_MAX_TENSOR_MAPS = 4096
_MAX_GRID_YZ = 65535


class CupyBackend:
    """One CUDA device.

    Parameters
    ----------
    device : its number.
    cache : compiles the kernels; default: this user's, with the newest NVRTC that the driver understands.

    Raises
    ------
    KernelsUnavailable
        CuPy, the driver, the device, NVRTC or the CUDA headers are missing; the message says how to get them.
    """

    name = "cupy"

    def __init__(self, device: int = 0, cache: CompileCache | None = None) -> None:
        self._cupy = cupy = import_cupy()
        count = device_count(cupy)
        if not 0 <= device < count:
            raise KernelsUnavailable(f"there is no CUDA device {device}: this machine has {count}, the first is 0")
        self.device = device
        attribute = cupy.cuda.runtime.deviceGetAttribute
        self.capability: tuple[int, int] = (attribute(_MAJOR, device), attribute(_MINOR, device))
        self.num_sms: int = attribute(_MULTIPROCESSORS, device)
        self.shared_limit: int = attribute(_SHARED_OPTIN, device)
        self.l2_bytes: int = attribute(_L2_BYTES, device)
        version = cupy.cuda.runtime.driverGetVersion()
        self.cache = cache or cache_for_driver(version)
        self.driver = f"{version // 1000}.{version % 1000 // 10}"
        self.compiler = ".".join(map(str, self.cache.nvrtc.version))
        found = cupy.cuda.runtime.getDeviceProperties(device)["name"]
        self.device_name: str = found.decode() if isinstance(found, bytes) else str(found)
        self.has_tensor_maps = has_tensor_maps()
        self._kernels: dict[Variant, tuple[Any, int]] = {}
        self._lock = threading.Lock()
        self._staging = Staging(cupy)
        self._current_device: Callable[[], int] = cupy.cuda.runtime.getDevice
        self._current_stream: Callable[[], Any] = cupy.cuda.get_current_stream
        self._tensor_maps: dict[tuple[Any, ...], NDArray[np.void]] = {}

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
        """Start a kernel; returns before it has run. Compiles and loads it on first use.

        Parameters
        ----------
        variant, grid, block : a grid with a side of 0 launches nothing.
        params : copied by the launch.
        shared_bytes : dynamic shared memory of a CTA.
        stream : a CuPy stream, an object with ``__cuda_stream__``, or a pointer as an int; None: the current stream.
        """
        if grid[1] > _MAX_GRID_YZ or grid[2] > _MAX_GRID_YZ:
            raise InvalidArgument(f"{variant.kernel}: a grid of {grid}, but y and z end at {_MAX_GRID_YZ}")
        if 0 in grid:
            return
        given = None if stream is None else as_stream(stream)
        kernel, room = self._kernels.get(variant) or self._load(variant)
        if shared_bytes > room:
            raise InvalidArgument(
                f"{variant.kernel} asks for {shared_bytes} bytes of shared memory per CTA beside "
                f"{self.shared_limit - room} of its own, and this device has {self.shared_limit}"
            )
        if self._current_device() == self.device:  # no context manager for nearly all launches
            kernel(grid, block, (params.record,), shared_mem=shared_bytes, stream=given)
            return
        with self._current():
            kernel(grid, block, (params.record,), shared_mem=shared_bytes, stream=given)

    def prepare(self, variants: Iterable[Variant], threads: int = 1) -> None:
        """Compile with that many threads, and load, so that later launches only launch."""
        wanted = list(dict.fromkeys(variants))
        self.cache.precompile(wanted, self._architecture, threads=threads)
        for variant in wanted:
            self._load(variant)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, *, stream: Any = None) -> Any:
        """A device array with undefined contents, in the order of a stream.

        CuPy hands memory out again at once when an array dies; kernels that still use it are safe only from later work
        on the stream it was allocated for.
        """
        given = as_stream(stream)
        with self._current(), self._allocating_for(given):
            return self._typed(self._cupy.empty(shape, _carrier(dtype)), dtype)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A device array of zeros; they are there when this returns, whatever stream reads them."""
        with self._current():
            array = self._typed(self._cupy.zeros(shape, _carrier(dtype)), dtype)
            wait_for_device(self._cupy.cuda.runtime)
            return array

    def asarray(self, array: Any) -> Any:
        """A device copy of a NumPy array, there when this returns; device arrays pass as they are."""
        if not isinstance(array, np.ndarray):
            return array
        with self._current():
            copy = self._cupy.asarray(np.ascontiguousarray(array).view(_carrier(array.dtype)))
            self._cupy.cuda.get_current_stream().synchronize()
            return self._typed(copy, array.dtype).reshape(array.shape)

    def upload(self, target: Any, source: NDArray[Any], stream: Any = None) -> None:
        """Copy a NumPy array into a contiguous device array of its size, ordered by the stream.

        The source may be changed once this returns; the host does not wait for the device.

        Raises
        ------
        InvalidArgument
            The sizes differ, or the stream is being captured.
        """
        if target.nbytes != source.nbytes:
            raise InvalidArgument(f"cannot upload {source.nbytes} bytes into an array of {target.nbytes}")
        given = as_stream(stream)
        with self._current():
            pointer = given.ptr if given is not None else self._cupy.cuda.get_current_stream().ptr
            self._staging.copy(target, source, pointer)

    def in_turn(self) -> InTurn:
        """As :meth:`pagedkv.kernels.backend.Backend.in_turn`."""
        return InTurn(self._cupy, self._stream_of, self._current)

    def synchronize(self) -> None:
        """As :meth:`pagedkv.kernels.backend.Backend.synchronize`."""
        with self._current():
            wait_for_device(self._cupy.cuda.runtime)

    def to_host(self, array: Any) -> NDArray[Any]:
        """A NumPy copy of a device array, once all work of every stream before it is done."""
        if isinstance(array, np.ndarray):
            return array
        with self._current():
            wait_for_device(self._cupy.cuda.runtime)
            contiguous = self._cupy.ascontiguousarray(self._typed(array, _carrier(array.dtype)))
            host: NDArray[Any] = contiguous.get()
            typed: NDArray[Any] = host.view(array.dtype)
            return typed.reshape(array.shape)

    def tensor_map(
        self, array: Any, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: Swizzle = 0
    ) -> NDArray[np.void]:
        """Cached :func:`pagedkv.kernels.tensor_map.encode_tensor_map`, by address, type and shape."""
        key = (address(array), array.dtype.name, tuple(dims), tuple(strides), tuple(box), swizzle)
        found = self._tensor_maps.get(key)
        if found is None:
            with self._current():
                self._cupy.cuda.runtime.setDevice(self.device)  # the driver wants a context; a new thread has none
                found = encode_tensor_map(array, dims, strides, box, swizzle)
            found.flags.writeable = False
            with self._lock:
                if len(self._tensor_maps) >= _MAX_TENSOR_MAPS:
                    self._tensor_maps.clear()
                self._tensor_maps[key] = found
        return found

    def is_capturing(self, stream: Any = None) -> bool:
        """As :meth:`pagedkv.kernels.backend.Backend.is_capturing`."""
        with self._current():
            return is_barred(self._cupy.cuda.runtime, self._stream_of(stream).ptr)

    def free_bytes(self) -> int:
        """Device memory that is free."""
        with self._current():
            return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def time_us(self, launch: Callable[[Any], None], runs: int, most_s: float) -> float:
        """Device microseconds of a run: the median of some series on a stream of its own.

        A second run tells how many more there is time for: up to `runs` a series, and fewer series where that is one.
        """
        with self._current():
            stream = self._cupy.cuda.Stream(non_blocking=True)
            self._run_us(launch, stream, 1)  # loaded and warm
            once = self._run_us(launch, stream, 1)
            fits = int(1e6 * most_s / max(once, 1.0))
            each = max(1, min(runs, fits // _SERIES))
            times = [self._run_us(launch, stream, each) for _ in range(min(_SERIES, fits))]
        return statistics.median(times or [once])

    def _run_us(self, launch: Callable[[Any], None], stream: Any, runs: int) -> float:
        """Device microseconds of a run, over a series of them."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(stream)
        for _ in range(runs):
            launch(stream)
        end.record(stream)
        end.synchronize()
        return 1e3 * float(self._cupy.cuda.get_elapsed_time(begin, end)) / runs

    def _stream_of(self, stream: Any) -> Any:
        """A caller's stream, or this device's current one, as an object with ``ptr``."""
        if stream is not None:
            return as_stream(stream)
        if self._current_device() == self.device:
            return self._current_stream()
        with self._current():
            return self._current_stream()

    def _architecture(self, variant: Variant) -> str:
        return architecture(variant, self.capability, self.cache.nvrtc)

    def _load(self, variant: Variant) -> tuple[Any, int]:
        """The kernel, and the bytes of dynamic shared memory that a CTA can have beside its own."""
        binary = self.cache.get(variant, self._architecture(variant))
        with self._lock, self._current():
            found = self._kernels.get(variant)
            if found is not None:
                return found
            with _file_of(binary) as path:
                kernel = self._cupy.RawModule(path=str(path)).get_function(variant.kernel)
            room = self.shared_limit - kernel.shared_size_bytes
            if room > _ORDINARY_SHARED:
                kernel.max_dynamic_shared_size_bytes = room
            # all alike: a multiprocessor drains before it divides its memory anew
            kernel.preferred_shared_memory_carveout = _ALL_SHARED
            self._kernels[variant] = kernel, room
            return kernel, room

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """This device as the thread's current one."""
        if self._current_device() == self.device:
            return contextlib.nullcontext()
        device: contextlib.AbstractContextManager[Any] = self._cupy.cuda.Device(self.device)
        return device

    def _allocating_for(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """CuPy's allocations are for this stream; None: for the current one, as they are."""
        if stream is None or stream.ptr == self._current_stream().ptr:
            return contextlib.nullcontext()
        if not hasattr(stream, "__enter__"):  # not CuPy's own
            stream = external_stream(self._cupy, stream.ptr)
        current: contextlib.AbstractContextManager[Any] = stream
        return current

    def _typed(self, array: Any, dtype: DTypeLike) -> Any:
        """The same memory as elements of a dtype of the same size, which CuPy need not know."""
        if array.dtype == dtype:
            return array
        return self._cupy.ndarray(array.shape, dtype=np.dtype(dtype), memptr=array.data, strides=array.strides)


def import_cupy() -> Any:
    """The ``cupy`` module.

    Raises
    ------
    KernelsUnavailable
        CuPy is missing or does not load.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise KernelsUnavailable(f"the CUDA kernels need CuPy ({_first_line(error)}): {_cure()}") from error


def device_count(cupy: Any) -> int:
    """How many CUDA devices there are; at least one.

    Raises
    ------
    KernelsUnavailable
        None, or no driver, or one older than this CuPy.
    """
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        driver = driver_version()
        if driver is None:
            raise KernelsUnavailable("no NVIDIA driver here: install one, or use device='cpu'") from error
        if getattr(error, "status", None) == _NO_DEVICE:
            raise KernelsUnavailable("no CUDA device here: use device='cpu'") from error
        raise KernelsUnavailable(
            f"CuPy cannot use the driver, which is for CUDA {driver[0]}.{driver[1]} ({_first_line(error)}): {_cure()}"
        ) from error
    if count < 1:
        raise KernelsUnavailable("no CUDA device here: use device='cpu'")
    return count


def as_stream(stream: Any) -> Any:
    """A stream as CuPy's launch takes it: None, or an object with ``ptr``.

    Raises
    ------
    InvalidArgument
        It is no stream.
    """
    if stream is None or isinstance(getattr(stream, "ptr", None), int):
        return stream
    return RawStream(stream_address(stream))


def _carrier(dtype: DTypeLike) -> np.dtype[Any]:
    """A CuPy dtype of the same size: CuPy's own, else unsigned integers."""
    wanted = np.dtype(dtype)
    return wanted if wanted.kind in "biufc" and wanted.isbuiltin == 1 else np.dtype(f"u{wanted.itemsize}")


@contextlib.contextmanager
def _file_of(binary: Binary) -> Iterator[Path]:
    """A file with the cubin, for CuPy to read once: the cache's own, else a temporary one."""
    if binary.path is not None and binary.path.exists():
        yield binary.path
        return
    import tempfile  # where a file is made

    with tempfile.TemporaryDirectory(prefix="pagedkv-") as folder:
        path = Path(folder, f"{binary.checksum}.cubin")
        path.write_bytes(binary.code)
        yield path


def _cure() -> str:
    driver = driver_version()
    if driver is None:
        return f"{extras.command('cuda12')}, or the packages of the extra [cuda13], whichever your driver has"
    return extras.command(f"cuda{min(max(driver[0], 12), 13)}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).strip() or type(error).__name__
