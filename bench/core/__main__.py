"""``python -m bench.core``.

The bookkeeping workloads on pagedkv and on the peers, interleaved, in one run.

Each system runs each workload in a process of its own, workload by workload, so that the systems are measured
minutes apart at most. A peer takes part where its wheel lies unzipped: ``PEER_VLLM`` (vLLM 0.33.0) and
``PEER_SGLANG`` (SGLang 0.5.23) name the folders, ``PEER_PYTHON`` the interpreter that has their requirements
(default: the one that runs this). ``docs/benchmarks.md`` says how to install them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.core.bars import OWN, compare
from bench.core.workloads import WORKLOADS
from bench.results import ROOT
from bench.timing import environment, print_table, write_results

COLUMNS = ("case", "system", "variant", "value", "unit", "p99", "best")
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class System:
    """A system under test.

    `variable` names the folder of its unzipped wheel; empty for pagedkv.
    """

    name: str
    module: str
    variable: str
    distribution: str


SYSTEMS = (
    System(OWN, "bench.core.pagedkv_runner", "", "pagedkv"),
    System("vLLM", "bench.core.vllm_runner", "PEER_VLLM", "vllm"),
    System("SGLang", "bench.core.sglang_runner", "PEER_SGLANG", "sglang"),
)


def absence(system: System) -> str:
    """Why `system` cannot take part; empty if it can."""
    if not system.variable:
        return ""
    folder = os.environ.get(system.variable)
    if not folder:
        return f"absent: {system.variable} is not set"
    if not (Path(folder) / system.distribution).is_dir():
        return f"absent: {system.variable} does not hold an unzipped {system.distribution} wheel"
    return ""


def version(system: System) -> str:
    """Version of a peer, from the metadata beside its unzipped wheel."""
    found = sorted(Path(os.environ[system.variable]).glob(f"{system.distribution}-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").partition("-")[2] if found else "unknown"


def run_workload(system: System, letter: str, quick: bool) -> list[dict[str, Any]]:
    """Figures of one workload on one system; one row that says so if it is absent or fails."""
    missing = absence(system)
    if missing:
        return [{"workload": letter, "case": "-", "system": system.name, "variant": missing, "value": None}]
    python = os.environ.get("PEER_PYTHON", sys.executable) if system.variable else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [python, "-m", system.module, "--workloads", letter, "--out", str(out)]
        done = subprocess.run(
            [*command, "--quick"] if quick else command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode != 0:
            print(done.stderr[-4000:], file=sys.stderr)
            failed = f"failed: exit {done.returncode}"
            return [
                {"workload": letter, "case": "-", "system": system.name, "variant": failed, "value": None}
            ]
        figures = json.loads(out.read_text())
    return [{"system": system.name, **figure} for figure in figures]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.core", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the figures here")
    parser.add_argument(
        "--only", metavar="A,B", default=",".join(WORKLOADS), help="workloads, of a,b,c,d,e,f"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run, not how fast is it")
    options = parser.parse_args()
    letters = [letter.strip() for letter in options.only.split(",") if letter.strip()]
    unknown = [letter for letter in letters if len(letter) != 1 or letter not in WORKLOADS]
    if unknown or not letters:
        parser.error(f"--only takes letters of {','.join(WORKLOADS)}, got {options.only!r}")

    described = environment()
    rows: list[dict[str, Any]] = []
    for letter in letters:
        figures: list[dict[str, Any]] = []
        for system in SYSTEMS:
            print(f"workload {letter}: {system.name} ...", file=sys.stderr, flush=True)
            figures += run_workload(system, letter, options.quick)
        rows += figures
        print_table(sorted(figures, key=lambda row: row["case"]), COLUMNS, title=f"\nworkload {letter}")
    compared = compare(rows)
    if compared and not options.quick:
        print_table(compared, title="\nbars (ratio: best peer of this run over pagedkv)")
    if options.json:
        present = [system for system in SYSTEMS if system.variable and not absence(system)]
        peers = {system.name: version(system) for system in present}
        write_results(options.json, "core", rows, env=described, peers=peers, quick=options.quick)
    failed = any(row["value"] is None and row["variant"].startswith("failed") for row in rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
