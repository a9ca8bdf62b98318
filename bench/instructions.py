"""``python -m bench.instructions``: instructions of the bookkeeping's calls, by callgrind.

A busy machine changes them little. callgrind counts a long copy (``rep movsb``) as one instruction per byte.

A process sets every case up from a fixed seed, and one more for each case then calls it: callgrind counts both, all of
their threads, and the difference is what the calls took. ``--beside TREE`` counts a second tree, built in place, in the
same way, and compares.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import track

from bench.results import ROOT

CASES = (
    "allocate and free 1 block", "allocate and free 256 blocks", "decode step of 256 rows", "match 8,192 tokens",
    "own and release 8,192 cached tokens", "insert 8,192 tokens", "evict 64 blocks and insert 64",
    "evict 64 blocks and insert 64, hazard", "cache.sequence with one promotion and one demotion",
    "scheduler, decode step of 32 lanes",
)  # fmt: skip
CALLS, WARM_UP = 200, 20


def cases() -> Iterator[Callable[[], object]]:
    """A call for each of `CASES`, after its setup; each can be made again and again."""
    import numpy as np

    from bench.core import workloads
    from bench.core.pagedkv_runner import Cache, random_buffer
    from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree

    pool = BlockPool(4096)
    yield lambda: pool.free(pool.alloc(1))
    yield lambda: pool.free(pool.alloc(256))
    table = BlockTable(Cache(256 * 64).placement, 256)
    rows = np.array([table.open(workloads.decode_prompt(i))[0] for i in range(256)], np.int64)
    table.step(rows)
    table.commit(rows)
    sampled = np.full(256, 7, np.int32)
    one_call = hasattr(table, "advance")  # in older trees

    def decode() -> None:
        if one_call:
            table.advance(rows, sampled)
            return
        table.append(rows, sampled)
        table.step(rows)
        table.commit(rows)

    yield decode
    cache, prompt = Cache(1024), np.array(workloads.random_tokens(8192, 1), np.int32)
    cache.insert(prompt, 512)
    yield lambda: cache.placement.match(prompt)
    yield lambda: cache.hit(prompt)
    rng = np.random.default_rng(1)
    wide = Cache(4 * CALLS * 512)
    yield lambda: wide.insert(random_buffer(rng, 512), 512)
    full = Cache(4096)
    for _ in range(64):
        full.insert(random_buffer(rng, 64), 64)
    yield lambda: full.insert(random_buffer(rng, 64), 64)
    learning = Cache(1)
    learning.pool, learning.tree = BlockPool(4096), RadixTree(workloads.BLOCK_SIZE, keep_chain=True)
    learning.placement = Placement(learning.tree, [learning.pool], policy="hazard")
    for _ in range(64):
        learning.insert(random_buffer(rng, 64), 64)
    yield lambda: learning.insert(random_buffer(rng, 64), 64)
    yield _promotions()
    yield _decoding()


def _promotions() -> Callable[[], object]:
    """Two prompts take turns on a device that holds one of them.

    Each brings itself up and sends the other down.
    """
    import numpy

    import pagedkv

    spec = pagedkv.KVSpec(2, 2, 16, "float16", 16, model="instructions")
    blocks = getattr(pagedkv, "Blocks", int)  # a plain number in older trees
    cache = pagedkv.KVCache(spec, blocks(9), blocks(32), threads=1)
    prompts = [list(range(1000 * i, 1000 * i + 129)) for i in range(2)]
    turn = [0]
    names = ("moves", "_moves", "_conductor")  # the second and third in older trees
    moves = next(getattr(cache, name) for name in names if hasattr(cache, name))

    def call() -> None:
        turn[0] += 1
        with cache.sequence(prompts[turn[0] % 2]) as seq:
            if (missing := len(seq) - seq.num_computed) > 1:
                kv = numpy.zeros((2, missing, 2, 16), numpy.float16)
                seq.scatter(kv, kv)
        moves.run_moves()

    for _ in range(6):
        call()
    return call


def _decoding() -> Callable[[], object]:
    """A scheduler whose 32 requests all decode.

    What a model would write is only marked as written.
    """
    import pagedkv

    spec = pagedkv.KVSpec(1, 1, 8, "float32", 16, model="instructions")
    blocks = getattr(pagedkv, "Blocks", int)
    cache = pagedkv.KVCache(spec, blocks(4096), max_sequences=32)
    scheduler = pagedkv.Scheduler(cache, pagedkv.SchedulerOptions(max_running=32, max_batch_tokens=2048))
    for number in range(32):
        scheduler.submit(range(number, number + 20), max_new_tokens=1500)

    def call() -> None:
        plan = scheduler.schedule()
        with scheduler.step(plan) as step:
            step.mark_written(0)
        scheduler.report(plan, [7] * len(plan.lanes))

    for _ in range(4):
        call()
    return call


def make_calls(which: int, calls: int) -> None:
    """The counted process: sets up and warms every case, then calls one of them.

    So many times more; -1 calls none.
    """
    for number, call in enumerate(cases()):
        for _ in range(WARM_UP + calls * (number == which)):
            call()
    os._exit(0)


def counted(tree: Path, which: int, calls: int) -> int:
    """Instructions of such a process, all of its threads, with the package in `tree`."""
    command = [
        *("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"),
        *(sys.executable, __file__, "--here", str(which), str(calls)),
    ]
    # what would differ from run to run is off: hashing, writing bytecode, the threads of a library that nothing calls
    steady = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = os.environ | steady | {"PYTHONPATH": os.pathsep.join((str(tree), str(ROOT)))}
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(f"{CASES[which]}: the counted process ended with {done.returncode}\n{done.stderr[-2000:]}")
    return int(found[1])


def instructions(trees: list[Path], calls: int) -> list[list[int]]:
    """Instructions per call of each case, for each tree."""
    jobs = [(tree, which) for tree in trees for which in range(-1, len(CASES))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda job: counted(*job, calls), jobs)
        found = list(track(done, "counting", len(jobs), console=Console(stderr=True)))
    width = 1 + len(CASES)
    rows = [found[i * width : (i + 1) * width] for i in range(len(trees))]
    return [[round((count - base) / calls) for count in counts] for base, *counts in rows]


def main() -> None:
    """Count, print, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument("--beside", type=Path, metavar="TREE", help="another tree of pagedkv, built in place")
    parser.add_argument("--calls", type=int, default=CALLS, help="of each case (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--here", type=int, nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        make_calls(*asked.here)
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed: it counts the instructions (Debian: apt-get install valgrind)")
    from bench.against import commit  # not above: in another tree's process `bench` is that tree's
    from bench.results import environment, write_results

    env = environment()
    now, *others = instructions([ROOT, *([asked.beside.resolve()] if asked.beside else [])], asked.calls)
    before = others[0] if others else None
    for i, name in enumerate(CASES):
        change = "" if before is None else f"{before[i]:>12,} {100 * (now[i] / before[i] - 1):+7.2f} %"
        print(f"{name:55} {now[i]:>12,} {change}")
    if asked.json:
        rows = [{"case": name, "now": now[i], "beside": before and before[i]} for i, name in enumerate(CASES)]
        write_results(asked.json, "instructions", rows, env=env, beside=asked.beside and commit(asked.beside))


if __name__ == "__main__":
    main()
