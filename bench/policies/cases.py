"""The traces, the sizes each is replayed at, and published results of other policies."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.results import ROOT
from pagedkv.lab.replay import Trace, load_trace

TRACES = Path(os.environ.get("PAGEDKV_SHARED") or ROOT.parent / "shared") / "traces"
FILES = {"chat": "mooncake_conversation_dev", "agents": "weka_dev_b512", "miniswe": "lmcache_miniswe_dev"}
GOLDEN = "golden.json"
SHARES = (1, 2, 5, 10, 20, 50)  # percent of the unique blocks, where golden.json does not know the trace


class MissingTraces(Exception):
    """The traces are not where they were looked for; says which and what to do."""


@dataclass(frozen=True, slots=True)
class Size:
    """A capacity.

    Attributes
    ----------
    name : ``"1%"`` of the unique blocks, or ``"8B:G+H"``: a model's blocks in GPU, host and NVMe of one machine.
    blocks : of one tier.
    published : hit blocks of other policies, by their names in golden.json.
    """

    name: str
    blocks: int
    published: Mapping[str, int] = field(default_factory=dict)


def require_traces(folder: Path) -> None:
    """All files are there.

    Raises
    ------
    MissingTraces
    """
    names = [*(f"{stem}.npz" for stem in FILES.values()), GOLDEN]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise MissingTraces(
            f"{', '.join(missing)} not found in {folder}: the traces are not part of the repository; "
            "say where they lie with --traces DIR"
        )


def load(folder: Path, name: str) -> tuple[Trace, list[Size]]:
    """A trace and its sizes, smallest first."""
    trace = load_trace(folder / f"{FILES[name]}.npz")
    golden: dict[str, Any] = json.loads((folder / GOLDEN).read_text())["traces"]
    known = golden.get(FILES[name], {}).get("capacities", {})
    sizes = [Size(size, entry["blocks"], entry["reference"]) for size, entry in known.items()]
    sizes = sizes or [Size(f"{share}%", trace.num_unique * share // 100) for share in SHARES]
    return trace, sorted(sizes, key=lambda size: size.blocks)
