"""``python -m bench.loading``.

Do the running requests wait while another request's prefix is loaded from disk?

One request decodes; a second one comes, whose prefix of 400 MiB lies on disk. ``wait_ms`` is the longest time that a
step's ``schedule()`` and entrance took, ``start_ms`` the time from the second request's submission to its first token.
Three ways, in turn: ``none``, without the second request; ``beside``, with the default options; ``caller``, with
``loading_share=0``, where the call of ``schedule()`` that begins the request waits for its load. ``beyond_ms`` is the
median of ``wait_ms`` less that of ``none``. Every run opens the cache anew, and reads with O_DIRECT where the file
system has it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import pagedkv as pk
from bench.timing import environment, gc_off, print_table, write_results

SPEC = pk.KVSpec(32, 8, 128, "float16", 16, model="bench")  # 2 MiB a block
PREFIX_BLOCKS, DEVICE, HOST, DISK = 200, 300, 8, 260
WAYS = {"none": 0.25, "beside": 0.25, "caller": 0.0}
STEPS, COMES_AT, MOST_STEPS, PAUSE_S = 120, 20, 2000, 0.005  # the pause stands for a model
COLUMNS = ("way", "wait_ms", "beyond_ms", "start_ms", "slowest_ms", "runs")


def open_cache(folder: Path) -> pk.KVCache:
    """A cache of three tiers, whose disk keeps its blocks."""
    disk = pk.Disk(str(folder / "kv"), pk.Blocks(DISK), admission="all")
    return pk.KVCache(SPEC, pk.Blocks(DEVICE), pk.Blocks(HOST), disk)


def prepare(folder: Path, prefix: np.ndarray[Any, Any]) -> None:
    """Put the prefix on the disk."""
    with open_cache(folder) as cache:
        with cache.sequence(prefix) as seq:
            kv = np.zeros((SPEC.num_layers, len(prefix), SPEC.num_kv_heads, SPEC.head_dim), np.float16)
            seq.scatter(kv, kv)
        cache.flush()
        if cache.match(prefix)["disk"] < len(prefix) - SPEC.block_size:
            raise RuntimeError("the prefix did not reach the disk")


def one_run(folder: Path, prefix: np.ndarray[Any, Any], way: str) -> tuple[float, float, int]:
    """The longest wait of a step and the late request's start in ms, and tokens from disk."""
    with open_cache(folder) as cache, gc_off():
        scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=8, loading_share=WAYS[way]))
        scheduler.submit(np.arange(900_000, 900_016), MOST_STEPS)
        waits: list[float] = []
        late, came, start_s = None, 0.0, float("nan")
        for number in range(MOST_STEPS):
            if number >= STEPS and (late is None or late.ended):
                break
            if number == COMES_AT and way != "none":
                came, late = time.perf_counter(), scheduler.submit(prefix, 4)
            begun = time.perf_counter()
            plan = scheduler.schedule()
            step = scheduler.step(plan)
            step.__enter__()
            waits.append(time.perf_counter() - begun)
            kv = np.zeros((len(step.tokens), SPEC.num_kv_heads, SPEC.head_dim), np.float16)
            for layer in range(SPEC.num_layers):
                step.write(layer, kv, kv)
            time.sleep(PAUSE_S)
            step.__exit__(None, None, None)
            scheduler.report(plan, np.ones(len(plan.lanes), np.int32))
            if late is not None and np.isnan(start_s) and late.outputs and len(late.outputs[0]):
                start_s = time.perf_counter() - came
        hits = cache.stats().hit_tokens["disk"]
    return 1e3 * max(waits), 1e3 * start_s, hits


def run(num_runs: int) -> list[dict[str, Any]]:
    """A row for each way."""
    prefix = np.arange(PREFIX_BLOCKS * SPEC.block_size + 1)
    found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="pagedkv-loading-") as name:
        folder = Path(name)
        prepare(folder, prefix)
        for _ in range(num_runs):
            for way, runs in found.items():
                runs.append(one_run(folder, prefix, way))
                if way != "none" and runs[-1][2] < len(prefix) - SPEC.block_size:
                    raise RuntimeError(f"{way}: {runs[-1][2]} tokens came from the disk, not {len(prefix) - 1}")
    alone = median(wait for wait, _, _ in found["none"])
    return [
        {
            "way": way,
            "wait_ms": round(median(wait for wait, _, _ in runs), 2),
            "beyond_ms": round(median(wait for wait, _, _ in runs) - alone, 2),
            "start_ms": round(median(start for _, start, _ in runs), 1) if way != "none" else None,
            "slowest_ms": round(max(wait for wait, _, _ in runs), 2),
            "runs": num_runs,
        }
        for way, runs in found.items()
    ]


def main() -> None:
    """Run, print, and write the result file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.loading", description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="of each way (default: 9)")
    parser.add_argument("--json", type=Path, help="write the result file here")
    arguments = parser.parse_args()
    env = environment()
    rows = run(arguments.runs)
    print_table(rows, COLUMNS)
    if arguments.json:
        write_results(arguments.json, "loading", rows, env=env)


if __name__ == "__main__":
    main()
