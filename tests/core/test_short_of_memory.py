"""A failed allocation, whichever it is, leaves the core's books exact and its mutex free."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.failing_alloc import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer brings an allocator of its own")
@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "hazard"])
def test_whichever_allocation_fails_the_books_agree_and_the_call_succeeds_later(tmp_path: Path, policy: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.core.short_of_memory", "all", policy],
        cwd=ROOT, env=os.environ | environment(tmp_path) | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
