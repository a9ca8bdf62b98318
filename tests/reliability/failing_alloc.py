"""Fails the k-th allocation of a thread.

The test compiles failing_alloc, preloads it into a child, and tells it which allocation to fail.

In the parent, `environment` compiles the library and says what the child's environment needs. In the child::

    alloc = FailingAlloc()
    for k in count(1):
        alloc.arm(k)
        try:
            call()
        except MemoryError:
            pass
        finally:
            alloc.disarm()
        if not alloc.failed:
            break           # the call makes fewer than k allocations
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("failing_alloc.c")


class Unbuildable(Exception):
    """There is no C compiler here, or it does not compile the library; the text says which."""


def environment(place: Path) -> dict[str, str]:
    """Compile the library into `place`; return what a child's environment needs besides."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unbuildable("no C compiler (cc, gcc or clang) to build the failing allocator with")
    library = place / "failing_alloc.so"
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-fno-builtin", "-o", library, SOURCE, "-ldl"],
        capture_output=True, text=True,
    )  # fmt: skip
    if built.returncode:
        raise Unbuildable(f"the failing allocator does not compile here: {built.stderr[-500:]}")
    preloaded = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()
    return {"LD_PRELOAD": preloaded, "PYTHONMALLOC": "malloc"}


class FailingAlloc:
    """The allocations of the calling thread, in a process that has the library preloaded."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(None)  # keeps the GIL: nothing else runs between arming and the call
        self._arm, self._disarm = library.failing_alloc_arm, library.failing_alloc_disarm
        self._failed, self._where = library.failing_alloc_failed, library.failing_alloc_where
        self._spare = library.failing_alloc_spare
        self._spare.argtypes, self._spare.restype = (ctypes.c_size_t, ctypes.c_size_t), None
        self._arm.argtypes, self._arm.restype = (ctypes.c_int64, ctypes.c_int64), None
        self._disarm.restype = self._failed.restype = ctypes.c_int64
        self._where.restype = ctypes.c_char_p

    def spare(self, library: str) -> None:
        """Let no allocation of a library fail.

        `library` is a part of its file name. In place of its allocations that were chosen, the next ones fail.

        For libraries whose own way out of a failed allocation is wrong, so that nothing could be said of ours.
        """
        with open("/proc/self/maps") as maps:
            places = [
                line.split()[0].split("-") for line in maps if " r-x" in line and library in line.rpartition("/")[2]
            ]
        if not places:
            raise ValueError(f"no library of this process has {library} in its name")
        self._spare(min(int(first, 16) for first, _ in places), max(int(end, 16) for _, end in places))

    def arm(self, k: int, times: int = 1) -> None:
        """Count this thread's allocations from now on; number k, and `times` in all, fail.

        With k = 0 it only counts.

        The way back from this call and the way to `disarm` allocate too: those are counted, and may be the one.
        """
        self._arm(k, k + times - 1)

    def disarm(self) -> int:
        """None fails any more; how many were seen."""
        return int(self._disarm())

    @property
    def failed(self) -> int:
        """How many failed since `arm`."""
        return int(self._failed())

    @property
    def where(self) -> str:
        """The library (or the interpreter) whose allocation failed last, "" if none did."""
        return os.fsdecode(self._where() or b"")
