"""``python -m bench.calls``.

What a router or a runtime that does not page asks of the cache, beside a control that does only the unavoidable part.

``match``: 8,192 tokens (int32 array) of which device, host and disk hold a part each; CPU time of the calling thread.
Control: one comparison of as many tokens by NumPy, which must read them too.

``gather``: the KV of 1,500 tokens of SmolLM2-135M in float16 (34.6 MB) into arrays that exist, in either layout, and
as much of a range that begins and ends within blocks; the clock on the wall. Control: ``memcpy`` of the same number of
bytes by the C library, one call for K and one for V, in one thread. Each round times all of them in turn. The cache's
kernels use the threads of ``PAGEDKV_NUM_THREADS``.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from bench.timing import CPU, WALL, environment, gc_off, measure, print_table, write_results
from pagedkv import cpu

NUM_TOKENS = 8192
SMALL = pk.KVSpec(1, 1, 8, "float32", 16, model="bench@1")
SMOLLM2 = pk.KVSpec(30, 3, 64, "float16", 16, model="bench@1")
GATHERED = 1500
COLUMNS = ("call", "case", "value", "unit", "ratio to control", "note")


def fill(cache: pk.KVCache, tokens: Any) -> None:
    """Compute a prompt, so that its blocks are cached."""
    spec = cache.spec
    with cache.sequence(tokens) as seq:
        shape = (spec.num_layers, len(seq) - seq.num_computed, spec.num_kv_heads, spec.head_dim)
        zeros = np.zeros(shape, spec.np_dtype)
        seq.scatter(zeros, zeros)


def match_rows(rounds: int, inner: int) -> list[dict[str, Any]]:
    """``match`` of a prompt over three tiers, and its control."""
    prompt = np.arange(NUM_TOKENS, dtype=np.int32)
    same, others = prompt.copy(), np.arange(10**6, 10**6 + 360 * 16, dtype=np.int32)
    with tempfile.TemporaryDirectory() as folder:
        disk = pk.Disk(str(Path(folder) / "kv"), pk.Blocks(1000), admission="all")
        with pk.KVCache(SMALL, pk.Blocks(520), pk.Blocks(200), disk) as cache:
            fill(cache, prompt)
            fill(cache, others)  # pushes the end of the prompt down
            held = cache.match(prompt)
            if not all(held.values()) or sum(held.values()) != NUM_TOKENS:
                raise RuntimeError(f"the prompt should lie on three tiers: {held}")
            own = measure(lambda: cache.match(prompt), rounds=rounds, inner=inner, clock=CPU)
            control = measure(lambda: np.array_equal(prompt, same), rounds=rounds, inner=inner, clock=CPU)
    note = ", ".join(f"{name} {tokens:,}" for name, tokens in held.items())
    return [
        row("match", "8,192 tokens, three tiers", own.us(), "us CPU", own.median_s / control.median_s, note),
        row("match", "control: array_equal", control.us(), "us CPU", None, "two arrays of 8,192 int32"),
    ]


def gather_rows(rounds: int) -> list[dict[str, Any]]:
    """``gather`` in both layouts and of a range, and memcpy."""
    spec = SMOLLM2
    with pk.KVCache(spec, pk.Blocks(GATHERED // spec.block_size + 4)) as cache:
        fill(cache, np.arange(GATHERED + 20, dtype=np.int32))
        with cache.sequence(np.arange(GATHERED + 21, dtype=np.int32)) as seq:
            shape = (spec.num_layers, GATHERED, spec.num_kv_heads, spec.head_dim)
            turned = (shape[0], shape[2], shape[1], shape[3])
            nhd, hnd, source = (
                tuple(np.ones(form, spec.np_dtype) for _ in "kv") for form in (shape, turned, shape)
            )
            num_bytes = sum(array.nbytes for array in nhd)

            def copy() -> None:
                for to, array in zip(nhd, source, strict=True):
                    ctypes.memmove(to.ctypes.data, array.ctypes.data, array.nbytes)

            calls: dict[str, Callable[[], object]] = {
                "control: memcpy, 1 thread": copy,
                "tokens 0 to 1,500, NHD": lambda: seq.gather(0, GATHERED, out=nhd),
                "tokens 7 to 1,507, NHD": lambda: seq.gather(7, GATHERED + 7, out=nhd),
                "tokens 0 to 1,500, HND": lambda: seq.gather(0, GATHERED, out=hnd, layout="HND"),
            }
            times = in_turns(calls, rounds)
    control = statistics.median(times["control: memcpy, 1 thread"])
    note = f"{num_bytes / 1e6:.1f} MB of {spec.dtype}, "
    return [
        row(
            "gather", case, statistics.median(taken) * 1e3, "ms wall", statistics.median(taken) / control,
            note + ("one thread" if case.startswith("control") else f"{cpu.num_threads()} threads"),
        )
        for case, taken in times.items()
    ]  # fmt: skip


def in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round; the first round is not counted."""
    times: dict[str, list[float]] = {case: [] for case in calls}
    with gc_off():
        for _ in range(rounds + 1):
            for case, call in calls.items():
                begin = WALL()
                call()
                times[case].append(WALL() - begin)
    return {case: taken[1:] for case, taken in times.items()}


def row(call: str, case: str, value: float, unit: str, ratio: float | None, note: str) -> dict[str, Any]:
    """One line of the table."""
    return {"call": call, "case": case, "value": value, "unit": unit, "ratio to control": ratio, "note": note}


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, not how fast is it")
    arguments = parser.parse_args()
    env = environment()
    rounds = 3 if arguments.quick else 25
    found = match_rows(rounds, 10 if arguments.quick else 1000) + gather_rows(rounds)
    print_table(found, COLUMNS, title="Calls")
    if arguments.json:
        write_results(arguments.json, "calls", found, env=env)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
