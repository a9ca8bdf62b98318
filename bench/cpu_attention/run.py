"""All problems, systems and ceilings in one run.

Rounds alternate, so that a noisy neighbour hits all alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import version
from statistics import median
from typing import Any

import numpy as np

from bench.cpu_attention.ceilings import Ceilings
from bench.cpu_attention.problems import Problem, problems
from bench.cpu_attention.systems import SYSTEMS, installed
from bench.timing import environment, print_table, write_results
from pagedkv import cpu

COLUMNS = ("shape", "problem", "dtype", "system", "paged", "ms", "gb_per_s", "gflop_per_s", "of_ceiling", "ours_faster")
AGREE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 4e-2, "int8": 4e-2}


class Child:
    """A system's process."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        command = [sys.executable, "-m", "bench.cpu_attention.child", name, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **order: Any) -> Any:
        """What it answers.

        Raises
        ------
        RuntimeError
            The process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def measure(problem: Problem, children: list[Child], ceilings: Ceilings, rounds: int) -> list[dict[str, Any]]:
    """One line per system that takes the problem, ours first.

    Ratios are medians of the rounds' own, for the machine's ceilings change from minute to minute.
    """
    results = {child: child.ask(do="prepare", problem=problem.as_dict()) for child in children}
    taking = [child for child, result in results.items() if result is not None]
    ours = np.array(results[children[0]])
    for child in taking:
        off = np.abs(np.array(results[child]) - ours).max()
        if off > AGREE[problem.dtype] * max(1.0, np.abs(ours).max()):
            print(f"{problem.shape} {problem.name} {problem.dtype}: {child.name} differs by {off}", file=sys.stderr)
    times: dict[Child, list[float]] = {child: [] for child in taking}
    limits = []
    for _ in range(rounds):
        limits.append(ceilings.read_gb_per_s() if problem.q_len == 1 else ceilings.gflop_per_s())
        for child in taking:
            times[child].append(child.ask(do="round"))
    work = problem.kv_bytes if problem.q_len == 1 else problem.flops
    rows = []
    for child in taking:
        seconds = median(times[child])
        gb, gflop = problem.kv_bytes / seconds / 1e9, problem.flops / seconds / 1e9
        rows.append(
            {
                "shape": problem.shape, "problem": problem.name, "dtype": problem.dtype, "system": child.name,
                "paged": "yes" if SYSTEMS[child.name][1]().paged else "no", "ms": seconds * 1e3, "gb_per_s": gb,
                "gflop_per_s": gflop, "ceiling": median(limits),
                "of_ceiling": median(work / s / 1e9 / limit for s, limit in zip(times[child], limits)),
                "ours_faster": median(b / a for a, b in zip(times[children[0]], times[child])),
                "rounds_ms": [round(1e3 * s, 4) for s in times[child]],
                "ceilings": [round(limit, 1) for limit in limits],
            }
        )  # fmt: skip
    return rows


def main(arguments: list[str]) -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention --device cpu", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="few and small problems")
    parser.add_argument("--dtypes", metavar="D", nargs="+", help="of K and V, these alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    options = parser.parse_args(arguments)
    described = environment()
    names = installed()
    missing = sorted({SYSTEMS[name][0] for name in SYSTEMS if name not in names})
    if missing:
        print(f"not installed, so not measured: {', '.join(missing)}", file=sys.stderr)
    ceilings, children = Ceilings(options.threads), [Child(name, options.threads) for name in names]
    rows: list[dict[str, Any]] = []
    try:
        for problem in problems(options.quick):
            if options.dtypes and problem.dtype not in options.dtypes:
                continue
            found = measure(problem, children, ceilings, options.rounds)  # ours comes first
            rows += found
            print(f"{problem.shape} {problem.name} {problem.dtype}: {found[0]['ms']:.3f} ms", file=sys.stderr)
    finally:
        for child in children:
            child.close()
    print_table(rows, COLUMNS, title=f"Attention on the CPU, {cpu.isa()}, {options.threads} threads")
    if options.json:
        modules = {SYSTEMS[name][0] for name in names} - {"pagedkv", "numpy"}
        peers = {module: version(module) for module in sorted(modules)}
        extra = {"isa": cpu.isa(), "threads": options.threads, "missing": missing, "peers": peers}
        write_results(options.json, "attention_cpu", rows, env=described, **extra)
        print(f"wrote {options.json}")
    return 0
