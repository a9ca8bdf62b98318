"""``python -m bench.write_behind``.

Does a decode step notice that its blocks are copied to the disk behind it?

`--sequences` sequences decode under a scheduler; their blocks fill up in turn, so each step commits a sixteenth of
them. Runs of ``write="never"`` (the control) and ``write="all"`` (every committed block is copied) alternate. Between
two steps the thread sleeps for MODEL_S, as long as a short decode step of a model on a GPU takes. A step is
`schedule`, the step's begin and end, and `report`. Of each run the median and the mean step are taken, and of these
the medians over the runs; ``ratio`` is the median over the pairs of runs.

The two clocks answer two questions: the thread's CPU time, whether the step has more work to do; wall time, whether it
also waits for a core, the GIL or a lock.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

import pagedkv as pk
from bench.timing import CPU, WALL, environment, gc_off, print_table, write_results

COLUMNS = ("clock", "of", "never_us", "all_us", "ratio", "gb_per_s", "runs", "steps")
SPEC = pk.KVSpec(8, 2, 64, "float16", 16, model="bench")  # 64 KiB a block
CLOCKS = {"CPU": CPU, "wall": WALL}
MODEL_S = 0.005
WARMUP = 32
PROMPT = 33


def one_run(write: str, count: int, steps: int, folder: Path) -> tuple[dict[str, list[float]], float]:
    """Seconds of each step by clock, and bytes per second that were written behind."""
    blocks = count * (2 + (PROMPT + 16 + WARMUP + steps) // 16)
    disk = pk.Disk(str(folder / write), pk.Blocks(8 * blocks), write=write, admission="all")  # type: ignore[arg-type]
    times: dict[str, list[float]] = {name: [] for name in CLOCKS}
    with pk.KVCache(SPEC, pk.Blocks(blocks), pk.Blocks(64), disk, max_sequences=count) as cache, gc_off():
        scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=count, max_batch_tokens=count * (PROMPT + 16)))
        for number in range(count):
            prompt = np.arange(PROMPT + number % 16, dtype=np.int32) + 1000 * number
            scheduler.submit(prompt, WARMUP + steps + 8)
        began = moved = 0.0
        for turn in range(WARMUP + steps):
            if turn == WARMUP:
                began, moved = WALL(), written(cache)
            starts = {name: clock() for name, clock in CLOCKS.items()}
            plan = scheduler.schedule()
            with scheduler.step(plan) as step:
                for layer in range(SPEC.num_layers):
                    step.mark_written(layer)
            scheduler.report(plan, np.full(len(plan.lanes), 7, np.int32))
            if turn >= WARMUP:
                for name, clock in CLOCKS.items():
                    times[name].append(clock() - starts[name])
            time.sleep(MODEL_S)
        return times, (written(cache) - moved) / (WALL() - began)


def written(cache: pk.KVCache) -> float:
    """Bytes so far."""
    return float(sum(count for way, count in cache.stats().moved_bytes.items() if way.endswith("_to_disk")))


def rows(runs: int, count: int, steps: int, place: str | None) -> list[dict[str, Any]]:
    """The table."""
    found: dict[str, list[tuple[dict[str, list[float]], float]]] = {"never": [], "all": []}
    for _ in range(runs):
        for write, those in found.items():
            with tempfile.TemporaryDirectory(prefix="pagedkv-bench-", dir=place) as folder:
                those.append(one_run(write, count, steps, Path(folder)))
    table: list[dict[str, Any]] = []
    for name in CLOCKS:
        for of, take in (("median step", median), ("mean step", mean)):
            never, all_ = ([take(times[name]) for times, _ in found[write]] for write in ("never", "all"))
            table.append({
                "clock": name, "of": of, "never_us": 1e6 * median(never), "all_us": 1e6 * median(all_),
                "ratio": median(a / n for a, n in zip(all_, never, strict=True)),
                "gb_per_s": median(rate for _, rate in found["all"]) / 1e9, "runs": runs, "steps": steps,
            })  # fmt: skip
    return table


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.write_behind", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=160, help="timed steps of a run")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dir", help="where the stores lie (default: the system's temporary directory)")
    arguments = parser.parse_args()
    env = environment()
    found = rows(arguments.runs, arguments.sequences, arguments.steps, arguments.dir)
    print_table(found, COLUMNS, title="A decode step, and the same with its blocks copied behind it")
    if arguments.json:
        write_results(arguments.json, "write_behind", found, env=env)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
