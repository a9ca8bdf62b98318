"""A failed allocation in a call of ``pagedkv.h`` is a code, and leaves the books exact."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv._core.c_api import get_include
from tests.reliability.failing_alloc import environment

ROOT = Path(__file__).parents[2]

ALLOCATING = {  # with the small tables that every world begins with
    *("pool_new", "placement_new", "table_new", "placement_namespace", "placement_match", "placement_acquire"),
    *("placement_promote", "placement_complete", "table_open", "table_extend", "table_append", "table_truncate"),
    "table_fork",
}


def refusing() -> set[str]:
    """The calls whose comment in the header names E_MEMORY."""
    text = Path(get_include(), "pagedkv.h").read_text()
    found = re.findall(r"(/\*(?:[^*]|\*(?!/))*\*/)\s*int \(\*(\w+)\)\([^)]*\);", text)
    return {name for comment, name in found if "E_MEMORY" in comment}


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer brings an allocator of its own")
def test_whichever_allocation_of_a_call_fails_the_books_agree_and_it_succeeds_later(tmp_path: Path) -> None:
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]).lstrip(os.pathsep)  # an installed wheel first
    ended = subprocess.run(
        [sys.executable, "-m", "tests.c_api.short_of_memory"],
        cwd=ROOT, env=os.environ | environment(tmp_path) | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    refused = {name for name, count in ast.literal_eval(ended.stdout).items() if count}
    assert refused <= refusing(), f"the header does not say E_MEMORY of {refused - refusing()}"
    assert refused >= ALLOCATING
