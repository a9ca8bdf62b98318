"""The modules that ``import pagedkv`` and a cache load. docs/install.md has the times."""

from __future__ import annotations

import json
import subprocess
import sys

MOST, MOST_OF_A_CACHE = 60, 235  # modules, the standard library's beyond NumPy's as well; a new one needs a reason
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


def test_importing_pagedkv_loads_the_parameters_and_errors_alone() -> None:
    found = imported()
    assert {"pagedkv.spec.kv_spec", "pagedkv.errors"} <= found
    assert not any(name.startswith(("pagedkv.cache", "pagedkv.tiers", "pagedkv.kernels")) for name in found)
    assert len(found) <= MOST, f"{len(found)} modules: {sorted(found)}"


def test_the_first_cache_loads_no_room_that_it_does_not_need() -> None:
    found = imported(CODE.replace("import pagedkv\n", "import pagedkv\npagedkv.KVCache\n"))
    assert {"pagedkv.cache.cache", "pagedkv._core.placement"} <= found
    assert found & LATER == set()
    assert len(found) <= MOST_OF_A_CACHE, f"{len(found)} modules: {sorted(found)}"


def test_a_room_is_an_attribute_without_its_own_import() -> None:
    assert "pagedkv.core" in imported(CODE.replace("import pagedkv\n", "import pagedkv\npagedkv.core.BlockPool\n"))


def test_a_room_that_is_left_out_comes_with_its_name() -> None:
    code = CODE.replace("import pagedkv\n", "import pagedkv\npagedkv.Scheduler, pagedkv.TraceRecorder, pagedkv.Rank\n")
    assert {"pagedkv.scheduler", "pagedkv.lab", "pagedkv.cache.ranks.storage"} <= imported(code)


def test_threads_may_use_first_names_at_the_same_moment() -> None:
    code = """
import json, sys, threading
sys.setswitchinterval(1e-6)
import pagedkv
names, found = ["Scheduler", "Rank", "Step", "TraceRecorder", "CacheStats", "KVCache", "Tier", "core"], []
start = threading.Barrier(len(names))
def use(name):
    start.wait()
    try:
        getattr(pagedkv, name)
    except BaseException as problem:
        found.append(repr(problem))
threads = [threading.Thread(target=use, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(found))
"""
    assert imported(code) == set()
