"""``python -m bench.against TREE``.

Beside another version of pagedkv, built in its own checkout TREE: runs of ``bench.scheduler``, of the core's decode
step and of a request whose prefix of 400 MiB lies on disk, turn by turn in one session, so that both meet the same
machine. The table has medians over the runs, the spread of each, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.timing import environment, print_table, write_results

HERE = Path(__file__).parent.parent
COLUMNS = (
    *("what", "part", "theirs_us", "theirs_from_us", "theirs_to_us", "ours_us", "ours_from_us", "ours_to_us"),
    "ratio",
)


def scheduler_rows(tree: Path) -> dict[tuple[str, str], float]:
    """Microseconds by (case, part) of one run there."""
    found = run(tree, "bench.scheduler", "--steps", "300")
    return {(row["case"], row["part"]): float(row.get("median_us") or row["mean_us"]) for row in found}


def core_rows(tree: Path) -> dict[tuple[str, str], float]:
    """The core's decode step there, arrays ready."""
    return {("core", f"decode step of {count}"): core_step(tree, count) for count in (256, 4096)}


def core_step(tree: Path, count: int) -> float:
    """Median microseconds of a decode step of `count` rows.

    Where the table has ``advance`` that is one call, else its three.
    """
    return float(python(tree, "-c", STEP, str(count)))


STEP = """
import sys, time
from statistics import median
import numpy as np
import pagedkv as pk
count = int(sys.argv[1])
blocks = getattr(pk, "Blocks", int)(count * 80)
cache = pk.KVCache(pk.KVSpec(1, 1, 1, "float16", 16), blocks, max_sequences=count)
seqs = [cache.sequence(np.arange(48, dtype=np.int32) + 1000 * i) for i in range(count)]
table, rows, tokens = cache.table, np.array([seq.row for seq in seqs]), np.full(count, 7, np.int32)
with cache.step(seqs) as step:
    step.mark_written(0)
times = []
if hasattr(table, "advance"):
    table.append(rows, tokens)
    table.step(rows)
for _ in range(400):
    start = time.thread_time()
    if hasattr(table, "advance"):
        table.advance(rows, tokens)
    else:
        table.append(rows, tokens)
        table.commit(rows, table.try_step(rows, None, 0).number)
    times.append(time.thread_time() - start)
print(1e6 * median(times[100:]))
"""


def loading_rows(tree: Path) -> dict[tuple[str, str], float]:
    """There, a request that loads beside one that decodes.

    Its first token, and the other's longest wait.
    """
    start, wait = python(tree, "-c", LOADING).split()
    return {("loading", "first token"): float(start), ("loading", "longest wait of the other"): float(wait)}


LOADING = """
import os, tempfile, time
from statistics import median
import numpy as np
import pagedkv as pk
Blocks = getattr(pk, "Blocks", int)
spec = pk.KVSpec(32, 8, 128, "float16", 16, model="bench")
prefix = np.arange(3201)
zeros = np.zeros((32, 3201, 8, 128), np.float16)
starts, longest = [], []
with tempfile.TemporaryDirectory(prefix="pagedkv-against-") as folder:
    def opened():
        return pk.KVCache(spec, Blocks(300), Blocks(8), pk.Disk(folder + "/kv", Blocks(260), admission="all"))
    with opened() as cache:
        with cache.sequence(prefix) as seq:
            seq.scatter(zeros, zeros)
        cache.flush()
    os.sync()
    for _ in range(5):
        with opened() as cache:
            scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=8))
            scheduler.submit(np.arange(900_000, 900_016), 2000)
            waits, late, number = [], None, 0
            while late is None or not late.outputs or not len(late.outputs[0]):
                if number == 20:
                    came, late = time.perf_counter(), scheduler.submit(prefix, 4)
                number += 1
                begun = time.perf_counter()
                plan = scheduler.schedule()
                step = scheduler.step(plan)
                step.__enter__()
                waits.append(time.perf_counter() - begun)
                kv = zeros[0, :len(step.tokens)]
                for layer in range(32):
                    step.write(layer, kv, kv)
                time.sleep(0.005)
                step.__exit__(None, None, None)
                scheduler.report(plan, np.ones(len(plan.lanes), np.int32))
            starts.append(time.perf_counter() - came)
            longest.append(max(waits))
            assert cache.stats().hit_tokens["disk"] == 3200
print(1e6 * median(starts), 1e6 * median(longest))
"""


def python(tree: Path, *arguments: str) -> str:
    """What Python prints in a tree."""
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environ, check=True, capture_output=True, text=True
    ).stdout


def run(tree: Path, module: str, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a benchmark's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        python(tree, "-m", module, *arguments, "--json", str(out))
        found: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return found


def main() -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=__doc__)
    parser.add_argument("tree", type=Path, help="a checkout of the other version, built in place")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    arguments = parser.parse_args()
    env = environment()
    times: dict[str, dict[tuple[str, str], list[float]]] = {"theirs": {}, "ours": {}}
    for number in range(arguments.runs):
        for whose, tree in (("theirs", arguments.tree.resolve()), ("ours", HERE)):
            for what, us in {**scheduler_rows(tree), **core_rows(tree), **loading_rows(tree)}.items():
                times[whose].setdefault(what, []).append(us)
        print(f"run {number + 1} of {arguments.runs}", file=sys.stderr)
    rows = [row(what, times) for what in times["ours"]]
    print_table(rows, COLUMNS, title=f"Beside {commit(arguments.tree)}, microseconds, medians of {arguments.runs} runs")
    if arguments.json:
        write_results(arguments.json, "against", rows, env={**env, "theirs": commit(arguments.tree)})
        print(f"wrote {arguments.json}")


def row(what: tuple[str, str], times: dict[str, dict[tuple[str, str], list[float]]]) -> dict[str, Any]:
    """One line of the table."""
    found: dict[str, Any] = {"what": what[0], "part": what[1]}
    for whose in ("theirs", "ours"):
        values = times[whose].get(what)
        if values:
            found[f"{whose}_us"] = median(values)
            found[f"{whose}_from_us"], found[f"{whose}_to_us"] = min(values), max(values)
    if "theirs_us" in found:
        found["ratio"] = found["ours_us"] / found["theirs_us"]
    return found


def commit(tree: Path) -> str:
    """The commit that a tree is at."""
    return subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
