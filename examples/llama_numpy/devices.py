"""Where the model computes: with NumPy on the CPU, or with CuPy on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.spec.place import cuda_number


def array_module(device: str) -> Any:
    """NumPy, or CuPy with this CUDA device as the current one of this thread.

    Raises
    ------
    KernelsUnavailable
        CuPy, the driver, the device or the CUDA headers are missing; the message says how to get them.
    """
    if (gpu := cuda_number(device)) is None:
        return np
    from pagedkv.attention.places import cuda_backend

    cuda_backend(gpu)  # has all that a KVCache(device="cuda") needs, or says what is missing
    import cupy

    cupy.cuda.Device(gpu).use()
    return cupy
