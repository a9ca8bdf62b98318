"""``python -m bench.scheduler``.

What a step of the scheduler costs, at 256 running sequences, from Python.

``schedule`` and ``report`` are the scheduler's own work, with the sampled tokens' appending. ``step`` is the cache's:
entering ``scheduler.step(plan)`` (allocation, the step's arrays) and leaving it (the commit), with no model between.
``plain step`` is the same work without a scheduler: ``table.append`` of all tokens and ``cache.step`` over a list.

Cases: ``decode``: no request begins or ends; ``churn``: the queue never runs dry and outputs are 100 to 300 tokens, so
in most steps one request ends and another begins, whose prompt of 48 tokens is computed beside the others' tokens;
``full``: as ``churn``, on a device so small that admission waits for blocks. ``quiet`` are those steps of the latter
two in which no request began or ended; ``a request`` is what the other steps take beyond them, per request that ended:
it includes its opening in the cache and its release, not its submission. ``write + attend`` is one layer's of a step of
LAYERS layers whose C kernels return at once: what the checks around them cost. ``check before attend`` is the one of
them that finds ``attend`` before ``write``. Times are CPU time of the thread, medians over steps, with the garbage
collector off.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from random import Random
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np

import pagedkv as pk
from bench.timing import CPU, Sample, environment, gc_off, print_table, summarise, write_results

COLUMNS = ("case", "sequences", "part", "median_us", "p99_us", "best_us", "mean_us", "steps")
SPEC = pk.KVSpec(1, 1, 1, "float16", 16)  # bookkeeping does not see how long a block is
LAYERS = 32
WARMUP = 30
PROMPT = 48


class Load:
    """A scheduler with `count` running sequences, and requests to follow them."""

    def __init__(self, case: str, count: int) -> None:
        self.case, self.random, self.number = case, Random(1), 0
        blocks = count * (PROMPT + 128) // 16 if case == "full" else count * 80
        self.cache = pk.KVCache(SPEC, pk.Blocks(blocks), max_sequences=count + 8)
        options = pk.SchedulerOptions(max_running=count, max_batch_tokens=2048 + count)
        self.scheduler = pk.Scheduler(self.cache, options)
        for _ in range(count + 32):
            self.submit()

    def submit(self) -> None:
        """Submit one more request, with a prompt of its own."""
        self.number += 1
        length = 1000 if self.case == "decode" else self.random.randint(100, 300)
        prompt = np.arange(PROMPT, dtype=np.int32) + 1000 * self.number
        self.scheduler.submit(prompt, length, tenant=f"tenant {self.number % 4}", stop_tokens=[1, 2])

    def turn(self) -> tuple[float, float, float, float, float]:
        """Times of schedule, of the step's begin and end, and of report; lanes.

        Requests that ended, -1 if quiet.
        """
        scheduler = self.scheduler
        waiting = scheduler.stats().waiting
        start = CPU()
        plan = scheduler.schedule()
        planned = CPU()
        with scheduler.step(plan) as step:
            entered = CPU()
            step.mark_written(0)
            left = CPU()
        done = CPU()
        tokens = np.full(len(plan.lanes), 7, np.int32)
        reporting = CPU()
        ended = scheduler.report(plan, tokens)
        over = CPU()
        quiet = not ended and scheduler.stats().waiting == waiting and len(plan.batch) == plan.num_tokens
        for _ in ended:
            self.submit()
        events = -1.0 if quiet else float(len(ended))
        return planned - start, entered - planned + done - left, over - reporting, float(len(plan.lanes)), events


def rows(case: str, count: int, steps: int) -> list[dict[str, Any]]:
    """The table's lines for one case."""
    load = Load(case, count)
    with gc_off():
        for _ in range(WARMUP if case == "decode" else 400):
            load.turn()
        times = np.array([load.turn() for _ in range(steps)])
    stats = load.scheduler.stats()
    quiet = times[:, 4] < 0
    parts = {"schedule": times[:, 0], "report": times[:, 2], "schedule + report": times[:, 0] + times[:, 2]}
    parts |= {"step": times[:, 1], "all": times[:, :3].sum(axis=1)}
    if case != "decode":
        parts["quiet schedule + report"] = parts["schedule + report"][quiet]
    found = [line(case, count, part, summarise(list(values)), mean(values)) for part, values in parts.items()]
    if case != "decode":
        beyond = parts["schedule + report"][~quiet].sum() - mean(parts["schedule + report"][quiet]) * (~quiet).sum()
        found.append({"case": case, "sequences": count, "part": "a request", "steps": int((~quiet).sum())})
        found[-1]["mean_us"] = 1e6 * beyond / times[~quiet, 4].sum()
    found[-1] |= {
        "mean_lanes": float(times[:, 3].mean()), "finished": stats.finished,
        "preemptions": stats.preempted_by_swap + stats.preempted_by_recompute,
    }  # fmt: skip
    load.cache.close()
    return found


def plain(count: int, steps: int) -> list[dict[str, Any]]:
    """The same decode steps without a scheduler."""
    cache = pk.KVCache(SPEC, pk.Blocks(count * 80), max_sequences=count)
    seqs = [cache.sequence(np.arange(PROMPT, dtype=np.int32) + 1000 * i) for i in range(count)]
    table, handles, tokens = cache.table, np.array([seq.row for seq in seqs]), np.full(count, 7, np.int32)

    def turn() -> None:
        table.append(handles, tokens)
        with cache.step(seqs) as step:
            step.mark_written(0)

    times = timed(turn, steps)
    cache.close()
    return [line("decode", count, "plain step", summarise(times), mean(times))]


def layers(count: int, steps: int) -> list[dict[str, Any]]:
    """Write and attend of one layer (the mean of a step's), with kernels that return at once."""
    cache = pk.KVCache(pk.KVSpec(LAYERS, 2, 16, "float32", 16), pk.Blocks(count * 4), max_sequences=count)
    seqs = [cache.sequence(np.arange(33, dtype=np.int32) + 1000 * i) for i in range(count)]
    for seq in seqs:
        with cache.step([seq]) as step:
            for layer in range(LAYERS):
                step.mark_written(layer)
        seq.append(7)
    k, v, q = (np.zeros((count, heads, 16), np.float32) for heads in (2, 2, 4))
    out = np.empty_like(q)
    writes, attends, checks = [], [], []
    with (
        gc_off(),
        patch("pagedkv.cpu._write.write", lambda *_, **__: None),
        patch("pagedkv.cpu._attend.attend", lambda *_, **__: None),
    ):
        for _ in range(WARMUP + steps):
            with cache.step(seqs) as step:
                write = attend = 0.0
                for layer in range(LAYERS):
                    start = CPU()
                    step.write(layer, k, v)
                    written = CPU()
                    step.attend(layer, q, out=out)
                    write, attend = write + written - start, attend + CPU() - written
                start = CPU()
                for layer in range(LAYERS):
                    step._is_written(layer)
                checks.append((CPU() - start) / LAYERS)
            for seq in seqs:
                seq.truncate(33)
                seq.append(7)
            writes.append(write / LAYERS)
            attends.append(attend / LAYERS)
    cache.close()
    parts = {
        "write": writes, "attend": attends, "write + attend": np.add(writes, attends).tolist(),
        "check before attend": checks,
    }  # fmt: skip
    timed_only = {part: times[WARMUP:] for part, times in parts.items()}
    return [line("layer", count, part, summarise(times), mean(times)) for part, times in timed_only.items()]


def timed(turn: Callable[[], None], steps: int) -> list[float]:
    """CPU seconds of each call after a warm-up."""
    times = []
    with gc_off():
        for number in range(WARMUP + steps):
            start = CPU()
            turn()
            if number >= WARMUP:
                times.append(CPU() - start)
    return times


def line(case: str, count: int, part: str, sample: Sample, average_s: float) -> dict[str, Any]:
    """One line of the table."""
    return {
        "case": case, "sequences": count, "part": part, "median_us": sample.us(), "p99_us": sample.p99_s * 1e6,
        "best_us": sample.min_s * 1e6, "mean_us": average_s * 1e6, "steps": sample.rounds,
    }  # fmt: skip


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600, help="timed steps of a case")
    arguments = parser.parse_args()
    env = environment()
    cases = ("decode", "churn", "full")
    found = [found for case in cases for found in rows(case, arguments.sequences, arguments.steps)]
    found += plain(arguments.sequences, arguments.steps)
    found += layers(arguments.sequences, arguments.steps)
    print_table(found, COLUMNS, title="A step of the scheduler, CPU time of the thread")
    if arguments.json:
        write_results(arguments.json, "scheduler", found, env=env)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
