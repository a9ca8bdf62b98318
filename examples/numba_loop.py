"""A loop compiled by Numba that allocates and frees blocks.

It calls the core's functions by their addresses. Needs Numba.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from pagedkv.core import FUNCTIONS, BlockPool


def compiled(name: str) -> Callable[..., int]:
    """A core function as ``@njit`` code can call it.

    `FUNCTIONS` gives its address and signature.
    """
    address, _ = FUNCTIONS[name]  # e.g. "int32 (intp pool, int32 n, intp out)": pointers travel as integers
    types: dict[str, list[Any]] = {
        "pool_alloc": [ctypes.c_ssize_t, ctypes.c_int32, ctypes.c_ssize_t],
        "pool_free": [ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_int32, ctypes.c_ssize_t],
    }
    return ctypes.CFUNCTYPE(ctypes.c_int32, *types[name])(address)


pool_alloc = compiled("pool_alloc")
pool_free = compiled("pool_free")


@numba.njit  # type: ignore[untyped-decorator]
def serve(pool: int, lengths: np.ndarray, ids: np.ndarray, bad: np.ndarray) -> tuple[int, int]:
    """Allocate, then free, the blocks of each request: (requests served, blocks handed out)."""
    served, blocks = 0, 0
    for n in lengths:
        if pool_alloc(pool, n, ids.ctypes.data) != 0:
            continue  # a negative code: nothing was taken
        served += 1
        blocks += n
        pool_free(pool, ids.ctypes.data, n, bad.ctypes.data)
    return served, blocks


def main() -> None:
    pool = BlockPool(64)
    lengths = np.array([1, 64, 65, 30], np.int32)
    ids, bad = np.empty(128, np.int32), np.zeros(1, np.int32)
    served, blocks = serve(pool.address, lengths, ids, bad)  # keep `pool` alive for as long as its address is used
    pool.check_integrity()
    print(f"{served} of {len(lengths)} requests served with {blocks} blocks; {pool.num_free} of {len(pool)} free")


if __name__ == "__main__":
    main()
