"""``python -m bench.launches``: CPU time of calls that launch kernels, up to CuPy's launch.

``run`` of each attention kernel, ``plan`` and ``write_kv`` over 32 layers of a pool (32 sequences, 8 KV heads of 128
elements, 4 query heads each; for the kernels of latents 576 numbers under 16 and 64 query heads); and ``write`` and
``attend`` of a step of a KVCache with each kernel, eager and while the stream is being captured into a graph; with one
of them also with a window, with sinks, and without ``out=``. ``bench/launches/stand_in.py`` stands for CuPy: no GPU is
needed, and its time is here only where it makes the new output, a few microseconds.

Medians of the thread's CPU time, all cases in turn. With ``--before TREE``, a checkout of another version, built in
place, the same file measures both turn by turn; a kernel that the other version lacks has no figure there. Bars, in
microseconds: 8 a call, 15 for ``plan``, 3 during a capture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from bench.timing import environment, print_table, write_results

CHILD = Path(__file__).parent / "child.py"
HERE = CHILD.parents[2]


def times(tree: Path, rounds: int) -> dict[str, float]:
    """Microseconds of each call with the pagedkv of a tree."""
    command = [sys.executable, str(CHILD), str(rounds)]
    environ = {**os.environ, "PYTHONPATH": str(tree), "PAGEDKV_AUTOTUNE": "0"}  # kernels of a stand-in compute nothing
    done = subprocess.run(command, cwd=tree, env=environ, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def bar(call: str) -> float:
    """Microseconds that a call may take."""
    return 15.0 if call == "plan" else 3.0 if call.endswith("captured") else 8.0


def commit(tree: Path) -> str:
    """The commit that a tree is at."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.launches", description=__doc__)
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout of the version to compare with")
    parser.add_argument("--runs", type=int, default=9, help="processes of each version, turn by turn")
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of a process, 32 calls of each case")
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    arguments = parser.parse_args()
    env = environment()
    trees = {"now_us": HERE} if arguments.before is None else {"before_us": arguments.before.resolve(), "now_us": HERE}
    found: dict[str, list[dict[str, float]]] = {version: [] for version in trees}
    for _ in range(arguments.runs):
        for version, tree in trees.items():
            found[version].append(times(tree, arguments.rounds))
    rows: list[dict[str, Any]] = []
    for call in found["now_us"][0]:
        row: dict[str, Any] = {"call": call}
        for version, runs in found.items():
            row[version] = median(run[call] for run in runs) if call in runs[0] else None
        rows.append({**row, "least_us": min(run[call] for run in found["now_us"]), "bar_us": bar(call)})
    print_table(rows, tuple(rows[0]), title=f"Launches, medians of {arguments.runs} runs")
    if arguments.json:
        before = {} if arguments.before is None else {"before": commit(arguments.before)}
        write_results(arguments.json, "launches", rows, env=env, **before)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
