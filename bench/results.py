"""What a result file says about itself.

Machine, versions, commit and command, beside the rows.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# made by the benches: they do not make a commit dirty
OUTPUTS = (
    "bench/results", "docs/benchmarks.md", "docs/policies.md", "docs/quantised.md", "docs/images/policies_*.png",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Describe where and what is measured.

    Returns
    -------
    dict
        ``cpu``, ``cores`` (usable), ``memory_gib``, ``os``, ``python``, ``numpy``, ``pagedkv`` (versions,
        ``"absent"`` where not installed), ``commit`` (full hash, ``"none"`` outside a repository), ``dirty``
        (bool, the benches' own outputs aside), ``command``, ``date`` (UTC, ISO 8601) and ``loadavg`` (over
        1, 5 and 15 minutes).
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "pagedkv": _pagedkv_version(),
        "commit": _git("rev-parse", "--verify", "HEAD") or "none",
        "dirty": bool(_git("status", "--porcelain", "--", ".", *(f":!{path}" for path in OUTPUTS))),
        "command": _command(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "loadavg": [round(load, 2) for load in os.getloadavg()],
    }


def write_results(
    path: str | os.PathLike[str],
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    env: Mapping[str, Any] | None = None,
    **extra: Any,
) -> None:
    """Write results as JSON; makes the folder.

    ``{"bench": name, "environment": ..., **extra, "rows": [...]}``.

    Parameters
    ----------
    path : path of the file; replaced whole if it exists.
    name : the bench, such as ``"core"``.
    rows : one mapping per measured figure, values JSON can hold.
    env : what :func:`environment` said when the run began; taken now if left out.
    extra : further top-level fields (ceilings, peers' versions).
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    described = dict(env or environment())
    document = {"bench": name, "environment": described, **extra, "rows": [dict(row) for row in rows]}
    partial = target.with_name(target.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(target)


def read_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that :func:`write_results` wrote.

    Raises
    ------
    ValueError
        If the file is not JSON, or is not such a file.
    """
    document = json.loads(Path(path).read_text())
    if not isinstance(document, dict) or not {"bench", "environment", "rows"} <= document.keys():
        raise ValueError(f"{path}: not a result file: it needs the fields bench, environment and rows")
    return document


def rss_bytes() -> int:
    """Resident memory of this process in bytes (Linux)."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _pagedkv_version() -> str:
    installed = _version("pagedkv")
    if installed != "absent":
        return installed
    try:
        import pagedkv
    except ImportError:
        return "absent"
    return str(getattr(pagedkv, "__version__", "source tree"))


def _git(*arguments: str) -> str:
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _command() -> str:
    """The command line as a reader would type it; absolute paths are cut to their last part."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        program = ["-m", str(spec.name).removesuffix(".__main__")]
    else:
        program = [Path(sys.argv[0]).name] if sys.argv and sys.argv[0] else []
    arguments = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:]]
    return " ".join(["python", *program, *arguments])
