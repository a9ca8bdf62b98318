"""``python -m bench.beside_moves``.

Does a decode step that waits for no move notice the moves beside it?

A batch of sequences decodes while, in the background, prefixes are promoted from disk with every checksum on: on
threads without the GIL, but on the same cores and memory. Three kinds of phases alternate: ``alone``; ``reads``, beside
a thread that does nothing but ``preadv`` as many bytes per second from the same files, which is what the machine itself
takes for that; and ``moves``. ``ratio`` is the median step beside moves over the median alone, ``to_reads`` over the
median beside bare reads. ``step`` is all of a step but the model: its arrays, its slots, its commit. ``step and model``
adds a matrix product without the GIL, as long as a step of a small model (set ``OPENBLAS_NUM_THREADS=1``, or it takes
the movers' cores).

The two clocks answer two questions: the thread's CPU time, whether the step has more work to do; wall time, whether it
also waits for a core or for the GIL. With fewer idle cores than mover threads, wall time shows the cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import pagedkv as pk
from bench.timing import CPU, WALL, environment, gc_off, print_table, write_results

KINDS = ("alone", "moves", "reads")  # moves first: reads go at their pace
COLUMNS = ("case", "clock", "alone_us", "reads_us", "moves_us", "ratio", "to_reads", "gb_per_s", "steps")
SPEC = pk.KVSpec(8, 4, 64, "float16", 16, model="bench")  # 128 KiB a block
PREFIX_BLOCKS, PREFIXES = 64, 12


class Beside:
    """Does one piece of work after the other, in a thread of its own, while it may."""

    def __init__(self, work: Callable[[int], object]) -> None:
        self._do, self._stopped = work, False
        self.may, self.idle = threading.Event(), threading.Event()
        self.idle.set()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        number = 0
        while not self._stopped:
            if not self.may.wait(0.1):
                continue
            self.idle.clear()
            self._do(number)
            self.idle.set()
            number += 1

    def pause(self) -> None:
        """No work any more when it returns."""
        self.may.clear()
        self.idle.wait()

    def close(self) -> None:
        """End the thread."""
        self._stopped = True
        self.pause()
        self._thread.join()


class Reads:
    """Reads a prefix's worth of blocks from the store's file.

    In random order, and no faster than told.
    """

    def __init__(self, path: Path, page_cache: str) -> None:
        self._fd, self._drop = os.open(path, os.O_RDONLY), page_cache == "drop"
        self._last = os.fstat(self._fd).st_size // SPEC.block_bytes - 1
        self._rng = np.random.default_rng(1)
        self._into = np.empty(SPEC.block_bytes, np.uint8)
        self.bytes_per_s = 1e9

    def __call__(self, number: int) -> None:
        until = time.perf_counter() + PREFIX_BLOCKS * SPEC.block_bytes / self.bytes_per_s
        for place in self._rng.integers(0, self._last, PREFIX_BLOCKS).tolist():
            offset = place * SPEC.block_bytes
            os.preadv(self._fd, [self._into], offset)
            if self._drop:
                os.posix_fadvise(self._fd, offset, SPEC.block_bytes, os.POSIX_FADV_DONTNEED)
        time.sleep(max(0.0, until - time.perf_counter()))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def prefix(number: int) -> np.ndarray:
    """Tokens of a prefix, none of which another one begins with."""
    return np.arange(PREFIX_BLOCKS * SPEC.block_size + 1, dtype=np.int32) + 100_000 * (number + 1)


@contextmanager
def cold_cache(
    directory: Path, num_seqs: int, steps: int, threads: int, page_cache: Any
) -> Iterator[tuple[pk.KVCache, list[Any]]]:
    """A cache with PREFIXES prefixes on its disk, and sequences that decode.

    The device has room for two of the prefixes.
    """
    room = 2 * PREFIX_BLOCKS + num_seqs * (2 + 2 * (steps + 5) // SPEC.block_size)
    disk = pk.Disk(
        directory / "kv", pk.Blocks(PREFIXES * PREFIX_BLOCKS + 64), page_cache=page_cache, admission="all", shards=8
    )
    with pk.KVCache(SPEC, pk.Blocks(room), disk=disk, threads=threads, max_sequences=num_seqs + 2) as cache:
        for number in range(PREFIXES):
            with cache.sequence(prefix(number)) as seq:
                run(cache, [seq])
        cache.flush()
        seqs = [cache.sequence([number]) for number in range(num_seqs)]
        run(cache, seqs)
        yield cache, seqs


def run(cache: pk.KVCache, seqs: list[Any]) -> None:
    """A step whose KV some kernel wrote."""
    with cache.step(seqs) as step:
        for layer in range(SPEC.num_layers):
            step.mark_written(layer)


def measure(
    cache: pk.KVCache, seqs: list[Any], reads: Reads, model: Callable[[], object] | None, phases: int, steps: int
) -> dict[str, Any]:
    """Median step by clock and kind of phase, in seconds; and the bytes promoted per second."""
    work: dict[str, Beside] = {
        "moves": Beside(lambda number: cache.prefetch(prefix(number % PREFIXES)).wait()),
        "reads": Beside(reads),
    }
    times: dict[tuple[str, str], list[float]] = {(clock, kind): [] for clock in ("CPU", "wall") for kind in KINDS}
    start, busy = promoted(cache), 0.0
    with gc_off():
        for phase in range(len(KINDS) * phases):
            kind = KINDS[phase % len(KINDS)]
            for name, beside in work.items():
                (beside.may.set if name == kind else beside.pause)()
            began = time.perf_counter()
            for number in range(steps + 5):
                for seq in seqs:
                    seq.append(7)
                wall, cpu = WALL(), CPU()
                run(cache, seqs)
                if model is not None:
                    model()
                if number >= 5:
                    times["CPU", kind].append(CPU() - cpu)
                    times["wall", kind].append(WALL() - wall)
            if kind == "moves":
                busy += time.perf_counter() - began
                reads.bytes_per_s = (promoted(cache) - start) / busy
            for seq in seqs:
                seq.truncate(1)
    for beside in work.values():
        beside.close()
    return {**{key: median(found) for key, found in times.items()}, "gb_per_s": reads.bytes_per_s / 1e9}


def promoted(cache: pk.KVCache) -> int:
    """Bytes that came up from the disk."""
    return int(cache.stats().moved_bytes.get("disk_to_device", 0))


def rows(
    directory: Path, num_seqs: int, threads: int, page_cache: str, phases: int, steps: int
) -> list[dict[str, Any]]:
    """The table's lines for one way to treat the page cache."""
    a = np.random.default_rng(0).standard_normal((640, 640)).astype(np.float32)
    out = np.empty_like(a)
    found = []
    with cold_cache(directory, num_seqs, steps, threads, page_cache) as (cache, seqs):
        reads = Reads(directory / "kv" / "data.0000", page_cache)
        for case, model in (("step", None), ("step and model", lambda: np.matmul(a, a, out=out))):
            times = measure(cache, seqs, reads, model, phases, steps)
            for clock in ("CPU", "wall"):
                by_kind = {kind: times[clock, kind] for kind in KINDS}
                found.append(
                    {
                        "case": f"{case}, {num_seqs} sequences, page cache {page_cache}", "clock": clock,
                        **{f"{kind}_us": seconds * 1e6 for kind, seconds in by_kind.items()},
                        "ratio": by_kind["moves"] / by_kind["alone"], "to_reads": by_kind["moves"] / by_kind["reads"],
                        "gb_per_s": times["gb_per_s"], "steps": phases * steps,
                    }
                )  # fmt: skip
        reads.close()
    return found


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.beside_moves", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--dir", metavar="DIR", default=".", help="where the files go (a temporary folder in it)")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="threads of the mover; leave the step a core")
    parser.add_argument("--phases", type=int, default=12, help="of each kind")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of a phase")
    arguments = parser.parse_args()
    env = environment()
    found: list[dict[str, Any]] = []
    for page_cache in ("drop", "keep"):
        with tempfile.TemporaryDirectory(prefix="bench-beside-", dir=arguments.dir) as name:
            found += rows(
                Path(name), arguments.sequences, arguments.threads, page_cache, arguments.phases, arguments.steps
            )
    print_table(found, COLUMNS, title=f"Decode steps beside moves, {arguments.threads} mover threads")
    if arguments.json:
        write_results(arguments.json, "beside_moves", found, env=env, threads=arguments.threads)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
