"""Hits of every policy as exact integers; ``python -m tests.replay.hits`` records them.

``policy_hits.json`` has the synthetic traces, ``shared_hits.json`` the real ones, which are not part of the repository
(``$PAGEDKV_SHARED/traces``): for each trace and size, each policy's hit blocks on device, host and disk.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TypeAlias

from pagedkv.core import POLICIES
from pagedkv.lab.replay import load_trace, replay, resolve

HERE = Path(__file__).parent
Hits: TypeAlias = dict[str, list[int]]
Table: TypeAlias = dict[str, dict[str, Hits]]
ONE_TIER = {share: {"device_memory": share} for share in ("1%", "2%", "5%", "10%", "20%", "50%")}
SHARED = ("mooncake_conversation_dev", "weka_dev_b512", "weka_dev_b64", "lmcache_miniswe_dev")
TIERS = {"device_memory": "1%", "host_memory": "4%", "disk": "10%"}
SIZES = {**ONE_TIER, "tiers": TIERS}
TABLES = {
    "policy_hits.json": (("synthetic:chat", "synthetic:agent"), ("2%", "10%", "tiers")),
    "shared_hits.json": (SHARED, tuple(SIZES)),
}


def shared_folder() -> Path:
    """The shared traces: ``$PAGEDKV_SHARED/traces``, or ``shared/traces`` beside the tree."""
    named = os.environ.get("PAGEDKV_SHARED")
    return (Path(named) if named else HERE.parents[2] / "shared") / "traces"


def source(trace: str) -> str:
    """A synthetic trace's name, or the path of a shared one's file."""
    return trace if ":" in trace else str(shared_folder() / f"{trace}.npz")


def hits_of(trace: str, size: str) -> Hits:
    """Each policy's hit blocks on device, host and disk, from an empty cache."""
    requests = load_trace(source(trace))
    found = replay(requests, list(POLICIES), resolve(requests, **SIZES[size]))
    return {one.policy: [one.hit_blocks[tier] for tier in ("device", "host", "disk")] for one in found}


def recorded(file: str) -> Table:
    """A table as it was written."""
    table: Table = json.loads((HERE / file).read_text(encoding="utf-8"))
    return table


def main(files: list[str]) -> int:
    """Write these tables; without arguments, both."""
    for file in files or list(TABLES):
        traces, sizes = TABLES[file]
        table: Table = {trace: {size: hits_of(trace, size) for size in sizes} for trace in traces}
        lines = [
            f' "{trace}": {{\n' + ",\n".join(f'  "{size}": {json.dumps(hits)}' for size, hits in rows.items()) + "\n }"
            for trace, rows in table.items()
        ]
        (HERE / file).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
