"""Names of devices: ``"cpu"``, ``"cuda:0"``, ``"pinned"``; and CUDA streams by pointer."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from pagedkv.errors import ExchangeRefused, WrongType
from pagedkv.streams import external_stream, stream_address

CPU, CUDA, PINNED = 1, 2, 3  # DLPack: kDLCPU, kDLCUDA, kDLCUDAHost
LEGACY_STREAM = 1  # as DLPack and the CUDA array interface write CUDA's default stream, which is 0 elsewhere


@functools.lru_cache(maxsize=64)
def device_code(name: str) -> tuple[int, int]:
    """DLPack's (type, id) of a device's name.

    Raises
    ------
    WrongType
        Not ``"cpu"``, ``"cuda"``, ``"cuda:<number>"`` or ``"pinned"`` (page-locked host memory).
    """
    if name == "cpu":
        return CPU, 0
    if name == "pinned":
        return PINNED, 0
    if isinstance(name, str):
        kind, _, number = name.partition(":")
        if kind == "cuda" and (number == "" or number.isdecimal()):
            return CUDA, int(number or 0)
    raise WrongType(f"device must be 'cpu', 'cuda', 'cuda:<number>' or 'pinned', got {name!r:.40}")


@functools.lru_cache(maxsize=64)
def device_name(kind: int, number: int) -> str:
    """Name of DLPack's (type, id).

    Raises
    ------
    ExchangeRefused
        A device that nothing here reaches.
    """
    names = {CPU: "cpu", PINNED: "pinned", CUDA: f"cuda:{number}"}
    if kind not in names:
        raise ExchangeRefused(f"the array lies on a device of DLPack type {kind}; CPU, CUDA and pinned memory are read")
    return names[kind]


def stream_pointer(stream: Any) -> int:
    """A stream in DLPack's notation.

    1 is the default stream, 2 the per-thread one, else an address.

    Parameters
    ----------
    stream : a pointer, an object with ``ptr`` or ``__cuda_stream__``; None: CuPy's current stream.

    Raises
    ------
    InvalidArgument
        It is no stream.
    """
    if stream is None:
        stream = importlib.import_module("cupy").cuda.get_current_stream()
    return stream_address(stream) or LEGACY_STREAM


def run_after(later: int, earlier: int, device: int) -> None:
    """Make `later` wait, on the device, for the work launched on `earlier`."""
    if later == earlier:
        return
    cupy = importlib.import_module("cupy")
    with cupy.cuda.Device(device):
        event = cupy.cuda.Event(disable_timing=True)
        event.record(external_stream(cupy, earlier))
        external_stream(cupy, later).wait_event(event)
