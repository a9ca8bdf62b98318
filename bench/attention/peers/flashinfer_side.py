"""What FlashInfer's wrappers share.

Whether it is there, its workspace, block tables as its CSR arrays.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.attention.device import Device
from bench.attention.peers import torch_side
from bench.attention.peers.torch_side import TorchSide

WORKSPACE_BYTES = 256 << 20
_NO_JIT = "FLASHINFER_DISABLE_JIT"  # its compiles take minutes: only kernels that are built already are measured


def absence(device: Device) -> str:
    """Why FlashInfer cannot run; empty if it can."""
    return torch_side.absence(device, "flashinfer", "flashinfer-python")


def module() -> Any:
    """``flashinfer``, which compiles nothing unless ``BENCH_PEER_JIT`` is set."""
    if not os.environ.get("BENCH_PEER_JIT"):
        os.environ.setdefault(_NO_JIT, "1")
    return importlib.import_module("flashinfer")


def workspace(side: TorchSide) -> Any:
    """Zeros that its split-KV writes to."""
    return side.zeros(WORKSPACE_BYTES)


def csr(side: TorchSide, tables: NDArray[np.int32], lens: NDArray[np.int32], block_size: int) -> tuple[Any, Any, Any]:
    """``indptr``, ``indices`` and ``last_page_len``, int32 on the device, of block tables."""
    counts = -(-lens // block_size)
    indices = np.concatenate([row[:count] for row, count in zip(tables, counts, strict=True)])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return side.ints(offsets), side.ints(indices), side.ints((lens - 1) % block_size + 1)
