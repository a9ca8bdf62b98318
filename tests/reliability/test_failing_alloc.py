"""The failing allocator fails the allocation it was told, and no other.

It fails it in the thread that asked for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.failing_alloc import environment

PROGRAM = """
import threading
from tests.reliability.failing_alloc import FailingAlloc

alloc = FailingAlloc()

def attempt(k, times=1):
    "Makes ten large allocations while number k and following fail: allocations seen, failures, MemoryErrors."
    errors = 0
    try:
        alloc.arm(k, times)
        for _ in range(10):
            bytearray(1 << 20)
    except MemoryError:
        errors = 1
    return alloc.disarm(), alloc.failed, errors

attempt(0)
seen, failed, errors = attempt(0)
assert seen >= 10 and failed == errors == 0, (seen, failed, errors)
for k in range(1, seen + 1):
    _, failed, errors = attempt(k)
    assert failed == errors == 1, (k, failed, errors)
assert attempt(seen + 1000) == (seen, 0, 0)
assert attempt(3, times=1000)[1] > 1

def elsewhere():
    for _ in range(1000):
        bytearray(1 << 20)

other = threading.Thread(target=elsewhere)
other.start()
alloc.spare("libpython" if any("libpython" in line for line in open("/proc/self/maps")) else "python")
assert attempt(1, times=10**6) == (seen, 0, 0), "a library that is spared met a failure"

alloc.arm(10**6)
other.join()
assert alloc.disarm() < 1000, "another thread's allocations were counted"
print("right")
"""


def test_the_numbered_allocation_of_the_armed_thread_fails_and_no_other(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    changes = environment(tmp_path) | {"PYTHONPATH": str(root)}
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, env=os.environ | changes, capture_output=True, text=True, timeout=60
    )
    assert (child.returncode, child.stdout) == (0, "right\n"), child.stderr


def test_without_a_compiler_the_caller_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.reliability.failing_alloc import Unbuildable

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unbuildable, match="no C compiler"):
        environment(tmp_path)
