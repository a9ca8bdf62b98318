"""Picks the backend by where arrays live: CUDA kernels for CuPy, C for NumPy."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.kernels.backend import Backend, is_backend
from pagedkv.spec.place import cuda_number

# "cpu", "cuda", "cuda:1", or a backend of one's own.
Device: TypeAlias = str | Backend


def backend_of(device: Device) -> Backend | None:
    """The backend of a device; None for the CPU.

    Raises
    ------
    WrongType, InvalidArgument
        The name is not ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``.
    KernelsUnavailable
        A GPU was named, and CuPy, the driver, a device, NVRTC or the CUDA headers are missing.
    """
    if is_backend(device):
        return device
    number = cuda_number(device)
    return None if number is None else cuda_backend(number)


def check_may_wait(backend: Backend, stream: Any = None) -> None:
    """Raise InvalidArgument where a stream is being captured into a graph.

    The device cannot be waited for then: workspaces are made with a wait, and kernels are tried with many.
    """
    if backend.is_capturing(stream):
        raise InvalidArgument(
            "a graph is being captured, and nothing can be made ready for a new form of attention meanwhile: before "
            "the capture, make the PagedAttention, or call step.attend once with as many sequences and tokens"
        )


def home_of(**arrays: Any) -> Backend | None:
    """The backend of arrays that must all live in one place; None for the CPU.

    Arguments that are None are ignored.

    Raises
    ------
    WrongType
        Something is neither a NumPy nor a CuPy array, or they live in several places.
    """
    places = {name: _place(name, array) for name, array in arrays.items() if array is not None}
    if len(set(places.values())) > 1:
        shown = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise WrongType(f"all arrays must live in one place: {shown}")
    return backend_of(next(iter(places.values()), "cpu"))


@functools.cache
def cuda_backend(number: int) -> Backend:
    """The backend of a CUDA device, one per process.

    Raises
    ------
    KernelsUnavailable
        CuPy, the driver, the device, NVRTC or the CUDA headers are missing; the message says how to get them.
    """
    from pagedkv.kernels.cupy_backend import CupyBackend

    return CupyBackend(number)


def _place(name: str, array: Any) -> str:
    if isinstance(array, np.ndarray):
        return "cpu"
    if type(array).__module__.partition(".")[0] == "cupy" and hasattr(array, "device"):
        return f"cuda:{array.device.id}"
    raise WrongType(f"{name} must be a NumPy or a CuPy array, not {type(array).__name__}")
