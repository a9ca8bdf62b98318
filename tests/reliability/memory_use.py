"""A cache with given budgets, filled to the brim in every tier.

It prints what the process and the directory then hold.

python -m tests.reliability.memory_use DEVICE_BLOCKS HOST_BLOCKS DISK_BLOCKS SEED
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import pagedkv as pk
from tests.reliability import child
from tests.reliability.proof import Tally

SPEC = pk.KVSpec(4, 4, 32, "float32", 16, model="toy")  # blocks of 64 KiB
SLACK = 1.02
INTERPRETER_BYTES = 4 << 20  # Python and NumPy come to hold so much more at work than idle
THREADS = 4  # of the cache: three movers and the dispatcher
THREAD_BYTES = 1 << 20  # that the C library keeps for each thread once it was used; MALLOC_ARENA_MAX=1 saves it
OWN_BYTES = INTERPRETER_BYTES + THREADS * THREAD_BYTES
OWN_FILES_BYTES = 256 << 10  # lock, key, superblocks and the directory itself
PROMPT_BLOCKS = 8


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def peak() -> int:
    """Most bytes that were ever resident since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    """From here on, `peak` says what comes."""
    Path("/proc/self/clear_refs").write_text("5")


@dataclass
class Extremes:
    """The most bytes of a directory, the fewest free blocks of each tier, and the reads.

    The reads were compared.
    """

    disk_bytes: int = 0
    free: dict[str, int] = field(default_factory=dict)
    hits: int = 0

    def look(self, cache: pk.KVCache, path: str) -> None:
        """Look again."""
        self.disk_bytes = max(self.disk_bytes, on_disk(path))
        for tier, counts in cache.stats().blocks.items():
            self.free[tier] = min(counts["free"], self.free.get(tier, counts["free"]))


def fill(cache: pk.KVCache, path: str, prompts: int, choose: random.Random) -> Extremes:
    """So many prompts that share nothing, then some of them again."""
    seen = Extremes()
    length = PROMPT_BLOCKS * SPEC.block_size + 1
    kept = [np.array(choose.choices(range(1, 30000), k=length), np.int32) for _ in range(prompts)]
    for tokens in [*kept, *kept[-prompts // 4 :]]:
        with cache.sequence(tokens) as seq:
            k, v = seq.gather()
            expected = tokens[: seq.num_computed].astype(np.float32)
            if not all((array == expected[None, :, None, None]).all() for array in (k, v)):
                raise AssertionError("other bytes than those stored")
            seen.hits += bool(seq.num_computed)
            left = tokens[seq.num_computed :].astype(np.float32)
            new = np.broadcast_to(left[:, None, None], (len(left), SPEC.num_kv_heads, SPEC.head_dim))
            with cache.step([seq]) as step:
                for layer in range(SPEC.num_layers):
                    step.write(layer, new, new)
        seen.look(cache, path)
    return seen


def on_disk(path: str) -> int:
    """Bytes that a directory takes up."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(path))


def allowed_kib(found: Tally) -> int:
    """KiB that the memory may peak above idle, for the budgets of a run."""
    return int(found.found["budget KiB"] * SLACK) + (OWN_BYTES >> 10)


def main(device: int, host: int, disk: int, seed: int) -> Tally:
    """Idle with the smallest cache, then full with the budgets; judged against their sum."""
    choose, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as folder:
        with pk.KVCache(
            SPEC, pk.Blocks(20), pk.Blocks(8), pk.Disk(f"{folder}/small", pk.Blocks(16), admission="all")
        ) as cache:
            fill(cache, f"{folder}/small", 8, choose)
        idle = resident()
        forget_peak()
        budget = (device + host) * SPEC.block_bytes
        names = [f"{blocks * SPEC.block_bytes}B" for blocks in (device, host, disk)]
        with pk.KVCache(SPEC, names[0], names[1], pk.Disk(f"{folder}/kv", names[2], admission="all")) as cache:
            counts = cache.stats().blocks
            arenas = {name: counts[name]["max"] * SPEC.block_bytes for name in ("device", "host")}
            if sum(arenas.values()) != budget or cache.device_arena.nbytes != arenas["device"]:
                tally.fail(f"seed {seed}: arenas of {arenas} bytes for a budget of {budget}")
            prompts = (device + host + disk) * 2 // PROMPT_BLOCKS
            seen = fill(cache, f"{folder}/kv", prompts, choose)
        used = peak() - idle
    tally.count, tally.hits = 1, seen.hits
    if any(free > PROMPT_BLOCKS for free in seen.free.values()):
        tally.fail(f"seed {seed}: the tiers were never full: {seen.free} blocks stayed free")
    if used < budget:
        tally.fail(f"seed {seed}: only {used} bytes more in memory: the budgets of {budget} were not used")
    if seen.disk_bytes > disk * SPEC.block_bytes + OWN_FILES_BYTES:
        tally.fail(f"seed {seed}: the directory held {seen.disk_bytes} bytes of {disk * SPEC.block_bytes}")
    tally.found = {"budget KiB": budget >> 10, "peak above idle KiB": used >> 10, "disk KiB": seen.disk_bytes >> 10}
    return tally


if __name__ == "__main__":
    child.answer(main(*map(int, sys.argv[1:])))
