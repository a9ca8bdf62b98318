"""The CUDA driver through ctypes: what CuPy does not offer. Nothing here creates a context."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from pagedkv.errors import KernelsUnavailable

LIBRARY = "libcuda.so.1"


@functools.lru_cache(maxsize=1)
def load_driver() -> Any:
    """The driver's library.

    Raises
    ------
    KernelsUnavailable
        There is no NVIDIA driver.
    """
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise KernelsUnavailable(f"no NVIDIA driver here ({error}): install one, or run on the CPU") from error


def driver_version() -> tuple[int, int] | None:
    """CUDA version the driver is for, such as (12, 8); None without a driver."""
    try:
        library = load_driver()
    except KernelsUnavailable:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def error_name(status: int) -> str:
    """Name of a CUresult, such as CUDA_ERROR_INVALID_VALUE."""
    text = ctypes.c_char_p()
    if load_driver().cuGetErrorName(ctypes.c_int(status), ctypes.byref(text)) or text.value is None:
        return f"CUresult {status}"
    return text.value.decode()
