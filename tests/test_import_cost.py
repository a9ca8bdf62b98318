"""The modules that ``import pagedkv`` loads, counted; docs/install.md has the time."""

from __future__ import annotations

import json
import subprocess
import sys

MOST = 230  # of our modules and the standard library's beyond NumPy's; a new one needs a reason
LATER = {  # rooms that a cache alone does not need, and modules of the standard library that come with them
    *("pagedkv.scheduler", "pagedkv.serving", "pagedkv.events", "pagedkv.lab", "pagedkv.tools", "pagedkv.cli"),
    *("pagedkv.cache.ranks.storage", "pagedkv.tiers.ranks.wire", "pagedkv.tiers.remote.opening"),
    *("asyncio", "decimal", "email", "fractions", "importlib.metadata", "multiprocessing", "random", "secrets"),
    *("socket", "ssl", "subprocess", "tempfile", "zipfile"),
}
CODE = """
import json, sys
import numpy, numpy.typing
before = set(sys.modules)
import pagedkv
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported(code: str = CODE) -> set[str]:
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_pagedkv_loads_a_cache_and_no_other_room() -> None:
    found = imported()
    assert {"pagedkv.cache.cache", "pagedkv._core.placement"} <= found
    assert found & LATER == set()
    assert len(found) <= MOST, f"{len(found)} modules: {sorted(found)}"


def test_a_room_that_is_left_out_comes_with_its_name() -> None:
    code = CODE.replace("import pagedkv\n", "import pagedkv\npagedkv.Scheduler, pagedkv.TraceRecorder, pagedkv.Rank\n")
    assert {"pagedkv.scheduler", "pagedkv.lab", "pagedkv.cache.ranks.storage"} <= imported(code)
