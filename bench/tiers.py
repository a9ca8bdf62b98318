"""``python -m bench.tiers``.

Moves between tiers against what the machine can do, measured in the same run.

Memory to memory is held against memcpy of the same bytes on as many threads; memory to disk and back, with every
checksum on, against raw ``pwrite``/``preadv`` of the same bytes (buffered, and O_DIRECT where the file system has it).
Ceiling and work alternate round by round, so that a noisy neighbour hits both. ``share`` is work over ceiling.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.timing import Sample, environment, gc_off, print_table, summarise, write_results
from pagedkv.core import MOVE_DTYPE
from pagedkv.tiers import DeviceTier, DiskTier, HostTier, Mover, Record

DEVICE, HOST, DISK = 0, 1, 2
COLUMNS = ("case", "block", "gb_per_s", "p99_gb_per_s", "ceiling", "ceiling_gb_per_s", "share")
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time: `setup` runs before every round, outside the time."""

    run: Work
    setup: Work | None = None


def alternate(cases: Mapping[str, Case], rounds: int, warmup: int = 1) -> dict[str, Sample]:
    """Time all `cases` once per round, in turn."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    with gc_off():
        for number in range(warmup + rounds):
            for name, case in cases.items():
                if case.setup is not None:
                    case.setup()
                start = time.perf_counter()
                case.run()
                if number >= warmup:
                    times[name].append(time.perf_counter() - start)
    return {name: summarise(found) for name, found in times.items()}


def in_threads(threads: int, work: Callable[[int], object]) -> Work:
    """Run ``work(0)`` to ``work(threads - 1)``, each in a thread that lives on between rounds."""
    start, stop = threading.Barrier(threads + 1), threading.Barrier(threads + 1)

    def loop(number: int) -> None:
        while True:
            start.wait()
            work(number)
            stop.wait()

    for number in range(threads):
        threading.Thread(target=loop, args=(number,), daemon=True).start()

    def run() -> None:
        start.wait()
        stop.wait()

    return run


def moves(src: int, dst: int, src_blocks: NDArray[np.int32], dst_blocks: NDArray[np.int32]) -> NDArray[np.void]:
    """Moves in transfers of 16 blocks."""
    batch = np.zeros(src_blocks.size, MOVE_DTYPE)
    batch["src_tier"], batch["dst_tier"] = src, dst
    batch["src_block"], batch["dst_block"] = src_blocks, dst_blocks
    batch["transfer"] = np.arange(src_blocks.size) // 16
    return batch


def moved(mover: Mover, batch: NDArray[np.void]) -> Work:
    """Submit and wait; a move that did not arrive ends the bench."""

    def run() -> None:
        _, ok = mover.submit(batch).results()
        if not ok.all():
            raise SystemExit(f"bench.tiers: {int((~ok).sum())} transfers failed: {mover.stats()}")

    return run


def memory_rows(block_bytes: int, total_bytes: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Device to host and back, with blocks scattered on both sides.

    Against one memcpy per thread of its whole share.
    """
    count = total_bytes // block_bytes
    device, host = DeviceTier(count, block_bytes), HostTier(count, block_bytes)
    device.arena[:], host.arena[:] = 1, 2
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    share = device.arena.nbytes // threads

    def ceiling(number: int) -> None:
        at = number * share
        ctypes.memmove(host.arena.ctypes.data + at, device.arena.ctypes.data + at, share)

    with Mover({DEVICE: device, HOST: host}, threads=threads) as mover:
        there = moves(DEVICE, HOST, order, order[::-1].copy())
        back = moves(HOST, DEVICE, order, order[::-1].copy())
        cases = {
            "memcpy": Case(in_threads(threads, ceiling)),
            "device to host": Case(moved(mover, there)),
            "host to device": Case(moved(mover, back)),
        }
        samples = alternate(cases, rounds)
    return [
        row(name, block_bytes, device.arena.nbytes, samples[name], "memcpy", samples["memcpy"])
        for name in ("device to host", "host to device")
    ]


@dataclass(slots=True)
class RawFile:
    """A preallocated file of blocks, written and read by threads.

    With nothing around the system calls.
    """

    path: Path
    block_bytes: int
    count: int
    threads: int
    direct: bool

    def open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
        fd = os.open(self.path, flags, 0o600)
        os.posix_fallocate(fd, 0, self.block_bytes * self.count)
        return fd

    def works(self, fd: int, arena: NDArray[np.uint8], order: NDArray[np.int32]) -> tuple[Work, Work]:
        """Write all and read all, blocks in the given order, each thread every n-th."""

        def write(number: int) -> None:
            for block in order[number :: self.threads].tolist():
                os.pwrite(fd, arena[block], block * self.block_bytes)

        def read(number: int) -> None:
            for block in order[number :: self.threads].tolist():
                os.preadv(fd, [arena[block]], block * self.block_bytes)

        return in_threads(self.threads, write), in_threads(self.threads, read)


def cool(*paths: Path) -> None:
    """Write back and forget the page cache of files."""
    for path in paths:
        fd = os.open(path, os.O_RDWR)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cool_tier(tier: DiskTier) -> None:
    """Forget a tier's page cache; a mapping keeps its pages alive until they are unmapped."""
    tier.flush()
    for mapping in tier._store.files._maps:
        mapping.madvise(mmap.MADV_DONTNEED)
    cool(*sorted(Path(tier.path).glob("data.*")))


def record_of(block: int) -> Record:
    """Some name for a block."""
    name = block.to_bytes(32, "little")
    return Record(name, name, name, np.full(16, block, np.int32))


@contextmanager
def tier_and_mover(
    directory: Path, host: HostTier, threads: int, shards: int, read_path: Any, page_cache: Any
) -> Iterator[tuple[DiskTier, Mover]]:
    """A disk tier of the host's size with a mover between them."""
    records = [record_of(block) for block in range(host.num_blocks)]

    def describe(batch: NDArray[np.void]) -> list[Record]:
        stored = np.where(batch["dst_tier"] == DISK, batch["dst_block"], batch["src_block"])
        return [records[block] for block in stored.tolist()]

    path = directory / f"tier-{shards}-{read_path}"
    with (
        DiskTier(
            path, host.num_blocks, host.block_bytes, fingerprint=bytes(32), shards=shards, read_path=read_path,
            page_cache=page_cache,
        ) as disk,
        Mover({HOST: host, DISK: disk}, threads=threads, describe=describe) as mover,
    ):
        yield disk, mover


def disk_rows(
    directory: Path,
    block_bytes: int,
    total_bytes: int,
    threads: int,
    rounds: int,
    shards: int,
    read_path: str,
    page_cache: str,
) -> list[dict[str, Any]]:
    """Host to disk and back, warm and cold, against raw files in the same directory.

    With ``page_cache="drop"`` the tier leaves nothing warm behind, so it has no warm reads.
    """
    count = total_bytes // block_bytes
    host = HostTier(count, block_bytes)
    host.arena[:] = np.random.default_rng(1).integers(0, 255, block_bytes, dtype=np.uint8)
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    raw = RawFile(directory / "raw", block_bytes, count, threads, direct=False)
    raw_fd = raw.open()
    direct_fd = _open_direct(RawFile(directory / "direct", block_bytes, count, threads, direct=True))
    raw_write, raw_read = raw.works(raw_fd, host.arena, order)
    with tier_and_mover(directory, host, threads, shards, read_path, page_cache) as (disk, mover):
        out = moved(mover, moves(HOST, DISK, order, order))
        back = moved(mover, moves(DISK, HOST, order, order))
        plans: dict[str, dict[str, Case]] = {
            "write": {
                "pwrite": Case(raw_write, lambda: cool(raw.path)),
                "tier": Case(out, lambda: cool_tier(disk)),
            },
            "write and sync": {
                "pwrite": Case(lambda: (raw_write(), os.fdatasync(raw_fd)), lambda: cool(raw.path)),
                "tier": Case(lambda: (out(), disk.flush()), lambda: cool_tier(disk)),
            },
            "warm read": {"preadv": Case(raw_read), "tier": Case(back)},
            "cold read": {
                "preadv": Case(raw_read, lambda: cool(raw.path)),
                "tier": Case(back, lambda: cool_tier(disk)),
            },
        }
        if page_cache == "drop":
            del plans["warm read"]
        if direct_fd is not None:
            direct = RawFile(directory / "direct", block_bytes, count, threads, direct=True)
            direct_write, direct_read = direct.works(direct_fd, host.arena, order)
            plans["write and sync"]["O_DIRECT"] = Case(direct_write)
            plans["cold read"]["O_DIRECT"] = Case(direct_read)
        rows = []
        for what, cases in plans.items():
            samples = alternate(cases, rounds)
            tier = samples.pop("tier")
            name = f"{what}, {shards} sums, {read_path}" if "read" in what else f"{what}, {shards} sums"
            name += f", {page_cache}"
            rows += [row(name, block_bytes, host.arena.nbytes, tier, kind, found) for kind, found in samples.items()]
    for fd in (raw_fd, direct_fd):
        if fd is not None:
            os.close(fd)
    return rows


def _open_direct(file: RawFile) -> int | None:
    """A descriptor with O_DIRECT whose blocks are written.

    None where the file system refuses it.
    """
    try:
        fd = file.open()
        block = np.frombuffer(mmap.mmap(-1, file.block_bytes), np.uint8)
        for number in range(file.count):
            os.pwrite(fd, block, number * file.block_bytes)
    except OSError as problem:
        print(f"O_DIRECT is not measured: {problem.strerror}", file=sys.stderr)
        return None
    return fd


def row(case: str, block_bytes: int, total: int, work: Sample, kind: str, ceiling: Sample) -> dict[str, Any]:
    """One line of the table."""
    return {
        "case": case,
        "block": f"{block_bytes >> 10} KiB",
        "gb_per_s": work.gb_per_s(total),
        "p99_gb_per_s": total / work.p99_s / 1e9,
        "ceiling": kind,
        "ceiling_gb_per_s": ceiling.gb_per_s(total),
        "share": ceiling.median_s / work.median_s,
        "rounds": work.rounds,
        "bytes": total,
    }


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.tiers", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--dir", metavar="DIR", default=".", help="where the files go (a temporary folder in it)")
    parser.add_argument("--mib", type=int, default=256, help="MiB moved per round (default 256)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the mover and of the ceilings")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds per figure")
    parser.add_argument("--quick", action="store_true", help="only blocks of 2 MiB with a checksum per layer")
    arguments = parser.parse_args()
    env = environment()
    total = arguments.mib << 20
    rows: list[dict[str, Any]] = []
    for block_bytes in (2 << 20,) if arguments.quick else (2 << 20, 64 << 10):
        rows += memory_rows(block_bytes, total, arguments.threads, arguments.rounds * 3)
    for block_bytes, shards, read_path, page_cache in (
        (2 << 20, 32, "direct", "drop"),
        (2 << 20, 32, "pread", "drop"),
        (2 << 20, 32, "pread", "keep"),
        (2 << 20, 32, "mapping", "keep"),
        (2 << 20, 1, "pread", "drop"),
        (64 << 10, 1, "direct", "drop"),
        (64 << 10, 1, "pread", "drop"),
        (64 << 10, 1, "pread", "keep"),
        (64 << 10, 1, "mapping", "keep"),
    ):
        if arguments.quick and (block_bytes, shards) != (2 << 20, 32):
            continue
        with tempfile.TemporaryDirectory(prefix="bench-tiers-", dir=arguments.dir) as name:
            rows += disk_rows(
                Path(name), block_bytes, total, arguments.threads, arguments.rounds, shards, read_path, page_cache
            )
    print_table(rows, COLUMNS, title=f"Moves between tiers, {arguments.threads} threads")
    if arguments.json:
        write_results(arguments.json, "tiers", rows, env=env, threads=arguments.threads)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
