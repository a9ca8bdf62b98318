"""The machine's ceilings, measured between the rounds of the systems.

Memory read per second, and multiply-adds.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagedkv.tiers.memory import anonymous_arena

READ_BYTES = 512 << 20
TIMES = 1_500_000
FLOATS_AT_ONCE = 12 * 16


class Ceilings:
    """Compiled with the C compiler that built this library.

    Raises
    ------
    OSError, subprocess.CalledProcessError
        There is no C compiler, or it does not compile this.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "ceilings.so")
            source = Path(__file__).with_name("ceilings.c")
            command = ["cc", "-O3", "-ffast-math", "-shared", "-fPIC", str(source), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True)
            self._library = ctypes.CDLL(str(library))
        self._library.read_floats.restype = self._library.multiply.restype = ctypes.c_float
        self._arena = anonymous_arena(threads, READ_BYTES // threads // 4096 * 4096, "ceiling")
        self._arena[:] = 0

    def read_gb_per_s(self) -> float:
        """Of all threads together, each through its own part of 512 MiB in huge pages."""
        size = self._arena.shape[1] // 1024 * 1024

        def read(thread: int) -> None:
            self._library.read_floats(ctypes.c_void_p(self._arena[thread].ctypes.data), ctypes.c_size_t(size // 4))

        return self._threads * size / self._timed(read) / 1e9

    def gflop_per_s(self) -> float:
        """Of all threads together: multiplications and additions of floats."""
        seconds = self._timed(lambda _: self._library.multiply(ctypes.c_long(TIMES)))
        return 2 * self._threads * TIMES * FLOATS_AT_ONCE / seconds / 1e9

    def _timed(self, work: object) -> float:
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, range(self._threads)))  # type: ignore[arg-type]
            began = time.perf_counter()
            list(pool.map(work, range(self._threads)))  # type: ignore[arg-type]
            return time.perf_counter() - began
