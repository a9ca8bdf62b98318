"""The CuPy backend against a stand-in for CuPy.

Real CuPy confirms as much of it as it can without a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedkv.errors import InvalidArgument, KernelsUnavailable
from pagedkv.kernels import cupy_backend, driver, jit
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.cupy_backend import CupyBackend, as_stream
from pagedkv.kernels.jit import CompileCache
from pagedkv.kernels.nvrtc import Compiled
from pagedkv.kernels.params import Params, fill
from pagedkv.kernels.variant import variant
from tests.kernels.fake_cupy import FakeCupy

PLAN = variant("plan")
WGMMA = variant("plan", arch_features="a", FAST=True)


class FakeNvrtc:
    """Cubins that say what they are."""

    version, library_bytes, include = (12, 9), 1, Path("/nowhere")

    def __init__(self) -> None:
        self.archs: list[str] = []

    def architectures(self) -> tuple[int, ...]:
        return (80, 90)

    def compile(self, source: str, name: str, options: Sequence[str], kind: str = "cubin") -> Compiled:
        self.archs.append(options[0])
        return Compiled(f"{name} {options}".encode(), "")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(cupy_backend, "driver_version", lambda: (12, 8))
    return fake


@pytest.fixture
def backend(cupy: FakeCupy, tmp_path: Path) -> CupyBackend:
    return CupyBackend(cache=CompileCache(FakeNvrtc(), tmp_path / "cache"))  # type: ignore[arg-type]


def params() -> Params:
    lens = np.array([3], np.int32)
    fields = {"group_size": 1, "row_tile": 1, "tile_tokens": 64, "num_seqs": 1, "window": 0}
    return fill("PlanParams", seq_lens=lens, q_indptr=None, position_spans=None, unit_indptr=lens, **fields)


def test_it_is_a_backend_and_knows_its_device(backend: CupyBackend) -> None:
    as_backend: Backend = backend
    assert (as_backend.name, as_backend.capability, as_backend.num_sms) == ("cupy", (9, 0), 132)
    assert as_backend.shared_limit == 227 << 10
    assert (backend.l2_bytes, backend.free_bytes()) == (50 << 20, 70 << 30)


def test_a_launch_passes_the_struct_by_value_on_the_given_stream(backend: CupyBackend, cupy: FakeCupy) -> None:
    given = params()
    backend.launch(PLAN, (2, 3, 4), (128, 1, 1), given, shared_bytes=4096, stream=SimpleNamespace(ptr=99))
    assert cupy.launches == [("plan", (2, 3, 4), (128, 1, 1), given.record.tobytes(), 4096, 99, 0)]


@pytest.mark.parametrize(
    ("stream", "pointer"),
    [
        (None, None),
        (0, 0),
        (0x5555, 0x5555),
        (np.int64(7), 7),
        (SimpleNamespace(ptr=3), 3),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 0x77)), 0x77),
        (SimpleNamespace(__cuda_stream__=(0, 0x78)), 0x78),
    ],
)
def test_a_stream_may_be_cupys_a_pointer_or_anybodys(
    backend: CupyBackend, cupy: FakeCupy, stream: Any, pointer: int | None
) -> None:
    backend.launch(PLAN, (1, 1, 1), (32, 1, 1), params(), stream=stream)
    assert cupy.launches[0][5] == pointer


@pytest.mark.parametrize("stream", [-1, True, 1.5, "default", object()])
def test_what_is_no_stream_is_refused_before_anything_is_launched(
    backend: CupyBackend, cupy: FakeCupy, stream: Any
) -> None:
    with pytest.raises(InvalidArgument, match="stream must be"):
        backend.launch(PLAN, (1, 1, 1), (32, 1, 1), params(), stream=stream)
    assert not cupy.launches
    assert not cupy.modules


def test_a_kernel_is_compiled_for_its_device_and_loaded_once(backend: CupyBackend, cupy: FakeCupy) -> None:
    backend.prepare([PLAN, WGMMA, PLAN], threads=2)
    assert sorted(backend.cache.nvrtc.archs) == ["-arch=sm_90", "-arch=sm_90a"]  # type: ignore[attr-defined]
    assert len(cupy.modules) == 2
    for one in (PLAN, WGMMA):
        backend.launch(one, (1, 1, 1), (32, 1, 1), params())
    assert len(cupy.modules) == 2
    path, content = cupy.modules[0]
    assert Path(path).read_bytes() == content == backend.cache.get(PLAN, "sm_90").code


def test_a_launch_neither_allocates_nor_waits_once_its_kernel_is_loaded(backend: CupyBackend, cupy: FakeCupy) -> None:
    backend.prepare([PLAN])
    before = (cupy.allocations, cupy.waits, len(cupy.modules))
    for _ in range(3):
        backend.launch(PLAN, (1, 1, 1), (32, 1, 1), params(), shared_bytes=100_000, stream=5)
    assert (cupy.allocations, cupy.waits, len(cupy.modules)) == before


def test_a_kernel_may_use_all_shared_memory_from_the_moment_it_is_loaded(backend: CupyBackend, cupy: FakeCupy) -> None:
    backend.prepare([PLAN])
    assert [kernel.max_dynamic_shared_size_bytes for kernel in cupy.kernels] == [(227 << 10) - 1024]
    assert [kernel.preferred_shared_memory_carveout for kernel in cupy.kernels] == [100]
    backend.launch(PLAN, (1, 1, 1), (32, 1, 1), params(), shared_bytes=(227 << 10) - 1024)


def test_more_shared_memory_than_there_is_is_refused_with_both_numbers(backend: CupyBackend, cupy: FakeCupy) -> None:
    with pytest.raises(InvalidArgument, match=r"plan asks for 231425 bytes .* beside 1024 of its own, .* has 232448"):
        backend.launch(PLAN, (1, 1, 1), (32, 1, 1), params(), shared_bytes=(226 << 10) + 1)
    assert not cupy.launches


def test_an_empty_grid_launches_nothing(backend: CupyBackend, cupy: FakeCupy) -> None:
    backend.launch(PLAN, (0, 1, 1), (32, 1, 1), params())
    assert not cupy.launches


def test_everything_happens_on_the_backends_device(cupy: FakeCupy, tmp_path: Path) -> None:
    cupy.devices = 3
    backend = CupyBackend(2, CompileCache(FakeNvrtc(), tmp_path))  # type: ignore[arg-type]
    backend.launch(PLAN, (1, 1, 1), (32, 1, 1), params())
    assert cupy.launches[0][6] == 2
    assert cupy.current == 0
    cupy.current = 2
    backend.launch(PLAN, (1, 1, 1), (32, 1, 1), params())
    assert cupy.launches[1][6] == 2


def test_without_a_disk_cache_a_kernel_is_loaded_from_a_file_that_goes_away(cupy: FakeCupy) -> None:
    backend = CupyBackend(cache=CompileCache(FakeNvrtc(), None))  # type: ignore[arg-type]
    backend.launch(PLAN, (1, 1, 1), (32, 1, 1), params())
    path, content = cupy.modules[0]
    assert content == backend.cache.get(PLAN, "sm_90").code
    assert not Path(path).exists()


def test_a_file_removed_from_the_cache_does_not_matter(backend: CupyBackend, cupy: FakeCupy) -> None:
    path = backend.cache.get(PLAN, "sm_90").path
    assert path is not None
    path.unlink()
    backend.launch(PLAN, (1, 1, 1), (32, 1, 1), params())
    assert cupy.modules[0][1] == backend.cache.get(PLAN, "sm_90").code


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_arrays_go_to_the_device_and_back_bit_by_bit_in_their_dtype(backend: CupyBackend, dtype: Any) -> None:
    host = np.arange(24).astype(dtype).reshape(2, 3, 4)
    there = backend.asarray(host)
    assert (there.shape, there.dtype, there.strides) == (host.shape, host.dtype, host.strides)
    back = backend.to_host(there)
    assert back.dtype == host.dtype
    assert back.tobytes() == host.tobytes()
    assert backend.asarray(there) is there
    backwards = backend.to_host(backend.asarray(host[:, ::-1]))
    assert backwards.tobytes() == np.ascontiguousarray(host[:, ::-1]).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_new_arrays_have_the_dtype_asked_for(backend: CupyBackend, dtype: Any) -> None:
    assert backend.empty((2, 3), dtype).dtype == dtype
    zeros = backend.zeros((2, 3), dtype)
    assert zeros.dtype == dtype
    assert not backend.to_host(zeros).astype(np.float32).any()


def test_zeros_and_copies_are_there_before_any_stream_reads_them(backend: CupyBackend, cupy: FakeCupy) -> None:
    backend.zeros((3,), np.int32)
    assert cupy.waits == 1
    backend.asarray(np.zeros(3))
    assert cupy.waits == 2


def test_a_grid_that_no_device_takes_is_refused_by_name(backend: CupyBackend, cupy: FakeCupy) -> None:
    for grid in ((1, 65536, 1), (1, 1, 65536)):
        with pytest.raises(InvalidArgument, match=r"plan: a grid of .*65535"):
            backend.launch(PLAN, grid, (32, 1, 1), params())
    assert not cupy.launches


def test_an_empty_array_is_allocated_for_the_stream_that_uses_it(backend: CupyBackend, cupy: FakeCupy) -> None:
    backend.empty((3,), np.int32)
    backend.empty((3,), np.int32, stream=0)
    backend.empty((3,), ml_dtypes.bfloat16, stream=SimpleNamespace(ptr=9))
    backend.empty((3,), np.int32, stream=77)
    assert cupy.allocated_for == [77, 0, 9, 77]


def test_results_are_read_after_all_streams_are_done(backend: CupyBackend, cupy: FakeCupy) -> None:
    target = backend.zeros((4,), np.int32)
    backend.upload(target, np.arange(4, dtype=np.int32), stream=8)
    assert backend.to_host(target).tolist() == [0, 1, 2, 3]


def test_an_upload_takes_the_values_of_now_and_does_not_wait(backend: CupyBackend, cupy: FakeCupy) -> None:
    target = backend.zeros((1000,), np.int32)
    source = np.arange(1000, dtype=np.int32)
    waits = cupy.waits
    backend.upload(target, source, stream=8)
    source[:] = -1
    assert cupy.waits == waits
    cupy.synchronise()
    assert backend.to_host(target).tolist() == list(range(1000))


def test_pinned_memory_is_used_again_only_when_its_copy_is_done(backend: CupyBackend, cupy: FakeCupy) -> None:
    targets = [backend.zeros((8,), np.int32) for _ in range(3)]
    for number, target in enumerate(targets):
        backend.upload(target, np.full(8, number, np.int32))
    cupy.synchronise()
    assert [backend.to_host(target)[0] for target in targets] == [0, 1, 2]
    before = cupy.allocations
    for number, target in enumerate(targets):
        backend.upload(target, np.full(8, 10 + number, np.int32))
        cupy.synchronise()
    assert cupy.allocations == before
    assert [backend.to_host(target)[0] for target in targets] == [10, 11, 12]


def test_an_upload_of_nothing_does_nothing_and_one_of_another_size_is_refused(
    backend: CupyBackend, cupy: FakeCupy
) -> None:
    backend.upload(backend.empty((0,), np.int32), np.zeros(0, np.int32))
    assert not cupy.pending
    with pytest.raises(InvalidArgument, match="8 bytes into an array of 16"):
        backend.upload(backend.zeros((4,), np.int32), np.zeros(2, np.int32))


@pytest.mark.parametrize(
    ("each_ms", "most_s", "launches"),
    [(0.01, 1.0, 2 + 5 * 20), (10.0, 1.0, 2 + 5 * 20), (40.0, 1.0, 2 + 5 * 5), (300.0, 1.0, 2 + 3), (700.0, 0.5, 2)],
    ids=["quick", "just in time", "shorter series", "fewer series", "no time"],
)
def test_a_kernel_is_timed_within_the_seconds_given_but_for_two_runs(
    each_ms: float, most_s: float, launches: int, backend: CupyBackend, cupy: FakeCupy
) -> None:
    streams = []

    def launch(stream: Any) -> None:
        streams.append(stream.ptr)
        cupy.now_ms += each_ms

    assert backend.time_us(launch, 20, most_s) == pytest.approx(1e3 * each_ms)
    assert streams == [88] * launches
    assert cupy.now_ms <= 1e3 * most_s + 2 * each_ms + 1e-6


@pytest.mark.parametrize("stream", [77, 0], ids=["captured", "the null stream beside a capture"])
def test_an_upload_into_a_graph_being_captured_is_refused(stream: int, backend: CupyBackend, cupy: FakeCupy) -> None:
    target = backend.zeros((4,), np.int32)
    cupy.captured = {77}
    with pytest.raises(InvalidArgument, match="captured"):
        backend.upload(target, np.zeros(4, np.int32), stream)
    assert not cupy.pending
    backend.upload(target, np.zeros(4, np.int32), 8)
    assert cupy.pending


def test_a_stream_that_is_captured_and_the_null_stream_beside_it_can_wait_for_nothing(
    backend: CupyBackend, cupy: FakeCupy
) -> None:
    assert not any(map(backend.is_capturing, (None, 0, 8)))
    cupy.captured = {8}
    assert [backend.is_capturing(stream) for stream in (8, 0, 1, 77, None)] == [True, True, True, False, False]
    cupy.cuda.runtime.streamIsCapturing = lambda stream: cupy.cuda.runtime.getDeviceCount()
    cupy.failure = 700
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="700"):
        backend.is_capturing(0)


def test_a_wait_within_another_streams_capture_is_refused_by_name(backend: CupyBackend, cupy: FakeCupy) -> None:
    cupy.captured = {8}
    for wait in (backend.synchronize, lambda: backend.zeros((4,), np.int32)):
        with pytest.raises(InvalidArgument, match="before the capture"):
            wait()

    def fail() -> None:
        raise cupy.cuda.runtime.CUDARuntimeError(700)

    cupy.cuda.runtime.deviceSynchronize = fail
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="700"):
        backend.synchronize()


def test_a_tensor_map_is_encoded_once_per_array_and_shape(
    backend: CupyBackend, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[tuple[Any, ...]] = []

    def encode(*arguments: Any) -> Any:
        assert cupy.contexts == {0}  # without one the driver refuses, as in a thread that has called nothing yet
        encoded.append(arguments)
        return np.zeros(1, "V128")

    monkeypatch.setattr(cupy_backend, "encode_tensor_map", encode)
    array = backend.zeros((4, 64), np.float16)
    first = backend.tensor_map(array, (64, 4), (128,), (64, 1), 128)
    assert backend.tensor_map(array, [64, 4], [128], [64, 1], 128) is first
    assert not first.flags.writeable
    assert backend.tensor_map(array, (64, 4), (128,), (64, 2), 128) is not first
    assert len(encoded) == 2


def test_without_cupy_the_error_has_the_command_for_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cupy_backend, "driver_version", lambda: (12, 4))
    with pytest.raises(KernelsUnavailable, match=r"need CuPy .*: pip install .*'cupy-cuda12x>.* \[cuda12\]\)$"):
        CupyBackend()
    monkeypatch.setattr(cupy_backend, "driver_version", lambda: None)
    with pytest.raises(ImportError, match=r"\[cuda12\]\), or .*\[cuda13\], whichever your driver has"):
        CupyBackend()


@pytest.mark.parametrize(
    ("status", "version", "message"),
    [
        (35, None, "no NVIDIA driver here"),
        (100, (12, 8), "no CUDA device here"),
        (35, (11, 4), r"cannot use the driver, which is for CUDA 11\.4 .*pip install .* extra \[cuda12\]"),
    ],
)
def test_without_driver_or_device_the_error_says_which(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, status: int, version: tuple[int, int] | None, message: str
) -> None:
    cupy.failure = status
    monkeypatch.setattr(cupy_backend, "driver_version", lambda: version)
    with pytest.raises(KernelsUnavailable, match=message):
        CupyBackend()


@pytest.mark.parametrize("number", [1, -1])
def test_a_device_that_is_not_there_is_an_error_that_says_how_many_there_are(cupy: FakeCupy, number: int) -> None:
    with pytest.raises(KernelsUnavailable, match=rf"no CUDA device {number}: this machine has 1"):
        CupyBackend(number)


def test_without_nvrtc_the_error_has_the_command(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(driver: object) -> None:
        raise KernelsUnavailable("no NVRTC: pip install it")

    monkeypatch.setattr(jit, "nvrtc_for", none)
    jit.cache_for_driver.cache_clear()
    with pytest.raises(KernelsUnavailable, match="no NVRTC: pip install it"):
        CupyBackend()


# ---- real CuPy, where it is installed and there is no GPU


@pytest.fixture
def real_cupy() -> Any:
    if importlib.util.find_spec("cupy") is None or driver.driver_version() is not None:
        pytest.skip("for machines with CuPy and without a driver")
    import cupy

    return cupy


def test_real_cupy_without_a_driver_is_an_error_that_says_so(real_cupy: Any) -> None:
    with pytest.raises(KernelsUnavailable, match="no NVIDIA driver here"):
        CupyBackend()


def test_real_cupy_takes_the_struct_and_the_stream_of_a_launch(real_cupy: Any) -> None:
    function = real_cupy.cuda.function.Function.__new__(real_cupy.cuda.function.Function)
    failure = real_cupy.cuda.runtime.CUDARuntimeError  # of the driver that is missing: the arguments were taken
    for argument in (params().record, np.zeros(1, "V128")):
        with pytest.raises(failure):
            function((1, 1, 1), (32, 1, 1), (argument,), shared_mem=100, stream=as_stream(5))
    with pytest.raises(TypeError, match="size one"):
        function((1, 1, 1), (32, 1, 1), (np.zeros(2, "V128"),), stream=as_stream(5))


def test_real_cupy_makes_a_stream_of_a_foreign_one_without_a_warning(real_cupy: Any) -> None:
    stream = real_cupy.cuda.Stream.from_external(as_stream(5))
    assert stream.ptr == 5
    assert hasattr(stream, "__enter__")
    assert hasattr(stream, "record")


def test_real_cupy_has_every_name_the_backend_uses(real_cupy: Any) -> None:
    for name in (
        *("deviceGetAttribute", "getDevice", "getDeviceCount", "getDeviceProperties", "driverGetVersion", "memGetInfo"),
        *("deviceSynchronize", "memcpyAsync", "memcpyHostToDevice", "eventRecord", "streamIsCapturing"),
    ):
        assert hasattr(real_cupy.cuda.runtime, name), name
    assert real_cupy.cuda.runtime.memcpyHostToDevice == 1
    for name in ("shared_size_bytes", "max_dynamic_shared_size_bytes", "preferred_shared_memory_carveout"):
        assert hasattr(real_cupy.RawKernel, name)
    assert hasattr(real_cupy.cuda.Event, "done")
    assert callable(real_cupy.cuda.alloc_pinned_memory)
    assert callable(real_cupy.cuda.get_current_stream)


def test_real_cupy_makes_arrays_of_dtypes_it_does_not_compute_with(real_cupy: Any) -> None:
    memory = real_cupy.cuda.MemoryPointer(real_cupy.cuda.UnownedMemory(1 << 20, 1 << 20, None, 0), 0)
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        size = np.dtype(dtype).itemsize
        array = real_cupy.ndarray((4, 2, 8), dtype=np.dtype(dtype), memptr=memory, strides=(64 * size, 32 * size, size))
        assert array.dtype == dtype
        view = array[1:, 1]
        assert (view.dtype, view.data.ptr - array.data.ptr) == (dtype, 96 * size)
        assert view.strides == (64 * size, size)
