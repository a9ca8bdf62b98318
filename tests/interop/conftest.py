"""Foreign arrays for the interop tests.

They come from the installed frameworks, and from fake producers and consumers with one behaviour each.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

WHY = "{} is not installed; the test extra names it (Python 3.11 and later)"


class Owner(np.ndarray):
    """An array that can be watched: a view's memory is let go of when this ends."""


def watched(*shape: int, dtype: Any = np.float32) -> tuple[np.ndarray[Any, Any], weakref.ref[Any]]:
    """An array of different numbers, and a reference that dies with it."""
    array = np.arange(np.prod(shape), dtype=dtype).reshape(shape).view(Owner)
    return array, weakref.ref(array)


def collected(reference: weakref.ref[Any]) -> bool:
    """Whether the object is gone."""
    gc.collect()
    return reference() is None


class Dlpack:
    """Producer with DLPack alone; `options` notes what each call asked for.

    Parameters
    ----------
    array : whose ``__dlpack__`` answers.
    old : it is from before DLPack 1.0 and knows ``stream`` only.
    """

    def __init__(self, array: Any, *, old: bool = False) -> None:
        self.array, self.options = array, []
        if old:
            self.__class__ = OldDlpack

    def __dlpack__(self, **options: Any) -> Any:
        self.options.append(options)
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class OldDlpack(Dlpack):
    def __dlpack__(self, stream: Any = None) -> Any:
        self.options.append({"stream": stream})
        return self.array.__dlpack__()


class Tensor(ctypes.Structure):
    """DLTensor, read independently of the module under test."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor),
    ]  # fmt: skip


_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype, _api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
NAMES = {kind: (name, b"used_" + name) for kind, name in ((Legacy, b"dltensor"), (Versioned, b"dltensor_versioned"))}


def open_capsule(capsule: Any) -> Any:
    """The structure inside, which is still the capsule's."""
    kind = Versioned if _api.PyCapsule_GetName(capsule) == b"dltensor_versioned" else Legacy
    address = _api.PyCapsule_GetPointer(capsule, NAMES[kind][0])
    return kind.from_address(address)


def consume(capsule: Any) -> Any:
    """The structure inside, which is the caller's to delete from now on."""
    managed = open_capsule(capsule)
    _api.PyCapsule_SetName(capsule, NAMES[type(managed)][1])
    return managed


def delete(managed: Any, interface: Any = DELETER) -> None:
    """Call the deleter, as a consumer does at its end.

    CFUNCTYPE releases the GIL, so the deleter runs as in a C++ thread that does not hold it.
    """
    interface(managed.deleter)(ctypes.addressof(managed))


def capsule_of(managed: Any) -> Any:
    """A capsule over a structure of the test's own, which the test keeps."""
    return _api.PyCapsule_New(ctypes.addressof(managed), NAMES[type(managed)][0], None)


class FakeCuda:
    """As much of CuPy as is called where arrays change hands; its device memory is host memory.

    Attributes
    ----------
    log : what happened, in order: ("record", stream), ("wait", stream).
    current : pointer of the current stream.
    """

    def __init__(self) -> None:
        fake, self.log, self.current = self, [], 77

        class Device:
            def __init__(self, number: int) -> None:
                self.number = number

            def __enter__(self) -> None:
                fake.log.append(("device", self.number))

            def __exit__(self, *_: object) -> None: ...

        class ExternalStream(Device):
            def __init__(self, ptr: int) -> None:
                self.ptr = ptr

            def __enter__(self) -> None:
                fake.log.append(("on", self.ptr))

            def wait_event(self, event: Any) -> None:
                fake.log.append(("wait", self.ptr))

        class Event:
            def __init__(self, *, disable_timing: bool) -> None:
                assert disable_timing

            def record(self, stream: Any) -> None:
                fake.log.append(("record", stream.ptr))

        class UnownedMemory:
            def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
                self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id

        class MemoryPointer:
            def __init__(self, mem: Any, offset: int) -> None:
                self.mem, self.ptr = mem, mem.ptr + offset

        class ndarray:
            def __init__(self, shape: Any, dtype: Any, memptr: Any, strides: Any = None, order: str = "C") -> None:
                self.data, self.shape, self.dtype, self.strides = memptr, tuple(shape), np.dtype(dtype), tuple(strides)
                self.device = SimpleNamespace(id=memptr.mem.device_id)

            def host(self) -> np.ndarray[Any, Any]:
                low = sum(min(0, (n - 1) * step) for n, step in zip(self.shape, self.strides, strict=True))
                assert self.data.ptr + low >= self.data.mem.ptr, "reads before its memory"
                raw = (ctypes.c_uint8 * self.data.mem.size).from_address(self.data.mem.ptr)
                return np.ndarray(self.shape, self.dtype, raw, self.data.ptr - self.data.mem.ptr, self.strides)

            def copy(self, order: str = "C") -> Any:
                host = np.array(self.host(), order=order)
                memory = UnownedMemory(host.ctypes.data, host.nbytes, host, self.device.id)
                return ndarray(self.shape, self.dtype, MemoryPointer(memory, 0), host.strides)

        ndarray.__module__ = "cupy"
        self.ndarray = ndarray
        self.cuda = SimpleNamespace(
            Device=Device, ExternalStream=ExternalStream, Event=Event, UnownedMemory=UnownedMemory,
            MemoryPointer=MemoryPointer, get_current_stream=lambda: SimpleNamespace(ptr=fake.current),
            runtime=SimpleNamespace(pointerGetAttributes=lambda ptr: SimpleNamespace(device=3)),
        )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> None:
    """Keep what the frameworks have imported out of these tests' garbage collections.

    A test makes up to fifty of them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Stands for CuPy."""
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture(scope="session")
def jax() -> Any:
    """JAX, with its backend ready."""
    pytest.importorskip("jax", reason=WHY.format("JAX"))
    register, os.register_at_fork = os.register_at_fork, lambda **_: None
    try:  # JAX would warn of every later fork of this process, and other tests fork
        module = importlib.import_module("jax")
        module.devices()
    finally:
        os.register_at_fork = register
    return module


@pytest.fixture(scope="session")
def ort() -> Any:
    """ONNX Runtime; `onnx`, which makes its models, comes with it."""
    pytest.importorskip("onnx", reason=WHY.format("onnx"))
    return pytest.importorskip("onnxruntime", reason=WHY.format("ONNX Runtime"))


@pytest.fixture(scope="session")
def mx() -> Any:
    """MLX."""
    return pytest.importorskip("mlx.core", reason=WHY.format("MLX"))


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch, which PyPI has for Linux only with 3 GB of CUDA: no extra names it."""
    return pytest.importorskip("torch", reason="PyTorch is not installed: its wheels on PyPI bring 3 GB of CUDA along")
