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


def tensor_map_encoder(library: Any) -> Any:
    """``cuTensorMapEncodeTiled`` of the driver's library.

    Raises
    ------
    KernelsUnavailable
        The driver is older than CUDA 12.0.
    """
    try:
        return library.cuTensorMapEncodeTiled
    except AttributeError as error:
        version = driver_version()
        shown = "of an unknown version" if version is None else f"for CUDA {version[0]}.{version[1]}"
        raise KernelsUnavailable(
            f"the NVIDIA driver here is {shown}, and kernels with TMA need one for CUDA 12.0 or later: install it, or "
            f"take a kernel without TMA ('auto', 'decode_mma', 'prefill_mma', 'decode_simt')"
        ) from error


def has_tensor_maps() -> bool:
    """Whether the driver makes tensor maps."""
    try:
        tensor_map_encoder(load_driver())
    except KernelsUnavailable:
        return False
    return True


def error_name(status: int) -> str:
    """Name of a CUresult, such as CUDA_ERROR_INVALID_VALUE."""
    text = ctypes.c_char_p()
    if load_driver().cuGetErrorName(ctypes.c_int(status), ctypes.byref(text)) or text.value is None:
        return f"CUresult {status}"
    return text.value.decode()
