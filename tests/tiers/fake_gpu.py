"""A GPU that is host memory: as much of CuPy as the tiers call, and the interpreter.

Copies and kernels run at once and are counted. The driver's rules on page-locked memory hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest

from pagedkv.kernels.backend import Dim3
from pagedkv.kernels.params import Params
from pagedkv.kernels.variant import Variant
from pagedkv.tiers import cuda_copy
from pagedkv.tiers.device import HOST_POINTERS
from pagedkv.tiers.mover import transfer
from tests.kernels.fake_cupy import asked_of_captures
from tests.ptxsim.backend import PtxsimBackend


class FakeArray:
    """A CuPy array: no NumPy array, so nothing but a copy or a kernel reads it.

    The bytes lie in a NumPy array, ``bytes``.
    """

    def __init__(self, of: np.ndarray[Any, Any]) -> None:
        self.bytes = of
        self.data = types.SimpleNamespace(ptr=of.ctypes.data, device_id=0)

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, index: object) -> Any:
        return wrapped(self.bytes[index])  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.bytes, name)
        return (lambda *args, **options: wrapped(found(*args, **options))) if callable(found) else wrapped(found)


def wrapped(thing: Any) -> Any:
    """An array as the GPU's; other things as they are."""
    return FakeArray(thing) if isinstance(thing, np.ndarray) else thing


class FakeGpu(PtxsimBackend):
    """Runs kernels over fake arrays.

    Attributes
    ----------
    launches : the kernels' names, with the stream's pointer where one was named.
    allocations : calls of ``empty``, the shapes.
    uploads : shapes, too.
    """

    def __init__(self) -> None:
        super().__init__(races=False)
        self.launches: list[tuple[str, int | None]] = []
        self.allocations: list[tuple[int, ...]] = []
        self.uploads: list[tuple[int, ...]] = []

    def launch(
        self, variant: Variant, grid: Dim3, block: Dim3, params: Params, *, shared_bytes: int = 0, stream: Any = None
    ) -> None:
        self.launches.append((variant.kernel, getattr(stream, "ptr", None)))
        arrays = tuple(array.bytes if isinstance(array, FakeArray) else array for array in params.arrays)
        given = dataclasses.replace(params, arrays=arrays)
        super().launch(variant, grid, block, given, shared_bytes=shared_bytes)

    def empty(self, shape: tuple[int, ...], dtype: Any, *, stream: Any = None) -> Any:
        self.allocations.append(shape)
        return super().empty(shape, dtype)

    def upload(self, target: Any, source: Any, stream: Any = None) -> None:
        self.uploads.append(source.shape)
        super().upload(target, source, stream)


def fake_cupy_fixture() -> Any:
    """Make a module's fixture: the module ``cupy`` for the tiers; copies are counted."""

    @pytest.fixture
    def fake_cupy(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
        fake = fake_module()
        monkeypatch.setitem(sys.modules, "cupy", fake)
        for module in (cuda_copy, transfer):  # no stream or buffer of another test's module
            monkeypatch.setattr(module, "_local", threading.local())
        return fake

    return fake_cupy


def fake_module() -> types.SimpleNamespace:
    """As much of CuPy as the tiers call; copies run at once and are counted."""
    fake = types.SimpleNamespace(copies=0, synchronised=0, devices=[], locked={}, waits=[], limit=1 << 30)
    fake.capturing = fake.zeros_waits = fake.event_waits = 0
    fake.host_pointers = 1

    class Stream:
        ptr = 77

        def __init__(self, *, non_blocking: bool) -> None:
            assert non_blocking

        def synchronize(self) -> None:
            fake.synchronised += 1

        def wait_event(self, event: Event) -> None:
            fake.waits.append(event.recorded)

    class Current:
        ptr = 5

        def synchronize(self) -> None:
            fake.zeros_waits += 1

        def wait_event(self, event: Event) -> None:
            fake.waits.append((5, event.recorded))

    class External:
        def __init__(self, ptr: int) -> None:
            self.ptr = ptr

        def wait_event(self, event: Event) -> None:
            fake.waits.append((self.ptr, event.recorded))

    class Event:
        def __init__(self, *, disable_timing: bool) -> None:
            assert disable_timing

        def record(self, stream: types.SimpleNamespace) -> None:
            self.recorded = stream.ptr

        def synchronize(self) -> None:
            fake.event_waits += 1

    class Error(Exception):
        pass

    def is_capturing(stream: int) -> bool:
        return asked_of_captures({fake.capturing} - {0}, stream, Error("cudaErrorStreamCaptureImplicit"))

    def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (4, 77)
        for start, locked in fake.locked.items():  # the driver refuses a range that leaves a locked piece
            for at in (dst, src):
                assert at + size <= start or start + locked <= at or start <= at <= at + size <= start + locked
        ctypes.memmove(dst, src, size)
        fake.copies += 1

    def zeros(shape: tuple[int, int], dtype: object) -> FakeArray:
        if shape[0] * shape[1] > fake.limit:
            raise Error("out of memory")
        return FakeArray(np.zeros(shape, np.uint8))

    def register(address: int, size: int, flags: int) -> None:
        if size + sum(fake.locked.values()) > fake.limit:
            raise Error("cannot lock")
        assert flags == 3, "portable and mapped"
        fake.locked[address] = size

    def device(gpu: int) -> contextlib.AbstractContextManager[None]:
        fake.devices.append(gpu)
        return contextlib.nullcontext()

    fake.zeros = zeros
    fake.cuda = types.SimpleNamespace(
        Device=device, Stream=Stream, Event=Event,
        ExternalStream=External, get_current_stream=Current,
        memory=types.SimpleNamespace(OutOfMemoryError=Error),
        runtime=types.SimpleNamespace(
            streamIsCapturing=is_capturing, CUDARuntimeError=Error,
            getDevice=lambda: 3,
            deviceGetAttribute=lambda attribute, gpu: fake.host_pointers if attribute == HOST_POINTERS else None,
            memcpyAsync=memcpy_async, hostRegister=register, hostUnregister=fake.locked.pop,
        ),
    )  # fmt: skip
    return fake
