"""Exceptions everywhere in the caller's thread.

At lines, calls and returns, by signals, in callbacks, and by failing allocations.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.reliability import child, failing_alloc
from tests.reliability.proof import Proof, Tally, Tick

SHARES = {"points": 0.7, "signals": 0.12, "callbacks": 0.08, "dispatcher": 0.03, "allocations": 0.07}
SLICE = 4000  # cases of one process: what leaks in the interpreter itself ends with it
APART = 1_000_000  # case numbers between two slices: some of them fit no scene
AT_ONCE = 4  # processes
CONTROL = 400  # interruptions of the control at most: it ends with the first wrong bytes
MOST_DEATHS = 5  # of processes, before a mode is given up
FULL = 20_000  # cases from which on every room must have been interrupted, and not the main ones alone
ROOMS = (
    "admission", "attention", "block_layout", "budgets", "cache", "callbacks", "checkpoint", "clock", "core",
    "cost_model", "cpu", "crew", "device_kv", "dispatcher", "dtypes", "engine", "explain", "gpu_kv", "gpu_layers",
    "hooks", "interop", "jobs", "journal", "latency", "kernels", "kv_spec", "learned", "load", "matcher", "metrics",
    "moves",
    "namespace", "parts", "paths", "pin", "place", "policies", "prefetch", "recording", "records", "remainder",
    "remote", "roots", "runtime", "scheduler", "scrub", "sequence", "sizes", "spawn", "stats", "step", "storage",
    "tiered", "tiers", "traced_step", "waits",
)  # fmt: skip
NOT_OF_A_CACHE = {
    "cli", "doctor", "payoff", "store", "main__", "replay", "show", "simulate", "sizing", "traces",  # commands
    "choice",  # a part of the doctor
    "dispatcher_thread", "events", "serving",  # threads of their own
    "config", "layers",  # what reads a model's file
    "per_layer",  # checks of a spec that a caller makes before there is a cache
    "ranks",  # processes of their own: tests/ranks
    "reach",  # of specs with windows; its callers only choose tables
    "disk_lanes", "gpu_group_kv", "group_kv", "group_mover", "grouped", "groups", "points_found",  # by groups
    "adapters", "extras", "streams",  # above a cache, whose calls are interrupted; errors
    "layer_scales", "layout", "scales", "server_url",  # read when a cache is opened; its callers only look numbers up
    "c_api", "ending", "errors", "init__", "monitor", "reference", "version",  # no lines that a cache's caller passes
}  # fmt: skip
MAIN = ("cache", "core", "engine", "hooks", "load", "moves", "prefetch", "scheduler", "sequence", "step")
NEED_NVRTC = {"attention", "gpu_kv", "gpu_layers", "kernels"}
OUT = ("KeyboardInterrupt", "SystemExit", "HandlerTimeout", "MemoryError")


def run(count: int, seed: int, tick: Tick) -> Tally:
    """The modes in processes of their own, some at a time: most of a case is waiting."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="pagedkv-interrupts-") as name, ThreadPoolExecutor(AT_ONCE) as pool:
        place, left = Path(name), count
        control(CONTROL, seed, place, tally)
        begun = []
        for mode, share in SHARES.items():
            wanted = left if mode == "allocations" else max(1, round(count * share))
            left -= wanted
            try:
                environment = failing_alloc.environment(place) if mode in ("allocations", "dispatcher") else {}
            except failing_alloc.Unbuildable as problem:
                tally.skipped = (f"failing allocations: {problem}",)
                continue
            for first in range(0, wanted, SLICE):
                cases = Slice(mode, APART * (first // SLICE), min(SLICE, wanted - first), seed)
                begun.append(pool.submit(_slice, cases, place, {**os.environ, **environment}, tick))
        for tallies in begun:
            for found in tallies.result():
                child.add(tally, found)
    complete(tally, count)
    return tally


class Slice(NamedTuple):
    """So many cases of a mode, from case number `first` on."""

    mode: str
    first: int
    count: int
    seed: int


def _slice(cases: Slice, place: Path, environment: dict[str, str], tick: Tick) -> list[Tally]:
    """What came of it: a tally of each process that it took."""
    mode, first, wanted, seed = cases
    progress, done, tallies = place / f"{mode}-{first}", 0, []
    while done < wanted and len(tallies) < MOST_DEATHS:
        progress.write_text("")
        ended = child.run(
            "tests.reliability.interrupt_worker", mode, first, wanted - done, seed, progress, tick=tick,
            environment=environment,
        )  # fmt: skip
        at = int(progress.read_text() or first)
        found = ended.tally or Tally()
        if ended.exit_code or ended.tally is None:
            found.add("processes that died")
            found.fail(f"{mode} {at} of seed {seed}: exit code {ended.exit_code}:\n{ended.errors[-3000:]}")
        tallies.append(found)
        done, first = done + found.count, at + 1
        if found.wrong and not ended.exit_code:
            break  # it has said what is wrong, and the rest is not worth its time
    return tallies


def control(count: int, seed: int, place: Path, tally: Tally) -> None:
    """The same checks over the old order: wrong unless they find wrong bytes."""
    environment = {**os.environ, "PAGEDKV_INTERRUPT_PATIENCE_S": "2", "PAGEDKV_INTERRUPT_MOST_WRONG": str(count)}
    worker, progress = "tests.reliability.interrupt_worker", place / "control"
    ended = child.run(worker, "control", 0, count, seed, progress, environment=environment)
    found = {} if ended.tally is None else ended.tally.found
    tally.add("control: given up although queued", found.get("given up although queued", 0))
    tally.add("control: wrong bytes", found.get("wrong bytes", 0))
    if not found.get("wrong bytes"):
        tally.fail(f"the control found no wrong bytes: the proof would not see them either; {ended.errors[-1000:]}")


def complete(tally: Tally, count: int) -> None:
    """Wrong unless every room and every kind of exception was there."""
    tally.require(*(f"in {room}" for room in MAIN), *(f"{name} came out" for name in OUT))
    if count >= FULL:
        rooms = [room for room in ROOMS if room not in NEED_NVRTC or tally.found.get("passed in kernels")]
        if len(rooms) < len(ROOMS):
            tally.skipped = (*tally.skipped, "the kernels' rooms: NVRTC is missing")
        # of the other Cython modules only the disk's readers-writer gate allocates in a caller's thread, one object for
        # each visit: tests/tiers/test_rw_gate.py fails each of its allocations
        tally.require(*(f"in {room}" for room in rooms), "signals", "allocations in core")
    for what in [what for what in tally.found if what.startswith("passed in ")]:
        del tally.found[what]
    for sort in ("wrong", "hung", "leaked"):
        tally.found.setdefault(sort, 0)


PROOF = Proof(
    claim="an exception in the caller's thread at every line, call, return and callback, by signals and by failing "
    "allocations, in every public call over one to three tiers: it comes out, nothing wrong is served, nothing hangs, "
    "nothing leaks, and the same call works afterwards",
    unit="interruptions",
    quick=300,
    full=100_000,
    run=run,
)
