"""Compile the policy ``lfu``, register it, and replay a trace under it beside LRU.

Needs Cython and a C compiler.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pagedkv as pk
from pagedkv.core import policies
from pagedkv.lab.replay import replay


def build(folder: Path) -> None:
    """Compile ``policy_lfu`` in a copy of this folder and import it, which registers it."""
    for source in Path(__file__).parent.iterdir():
        if source.is_file():
            shutil.copy(source, folder)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True)
    sys.path.insert(0, str(folder))
    importlib.import_module("policy_lfu")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        print("policies:", ", ".join(policies()))
        for result in replay("synthetic:agent", ["lru", "lfu"], "2%"):
            print(f"{result.policy}: {result.hit_blocks['total']:,} of {result.block_accesses:,} blocks hit")
        spec = pk.KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32", block_size=16)
        with pk.KVCache(spec, "1MiB", policy="lfu") as cache, cache.sequence(list(range(40))) as sequence:
            with cache.step([sequence]) as step:
                step.mark_written(0)
            cache.check_integrity()


if __name__ == "__main__":
    main()
