"""The process that measures.

:mod:`bench.attention.supervisor` starts it and reads its journal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bench.attention import peers as peer_modules
from bench.attention.arena import Arena
from bench.attention.device import Device
from bench.attention.problems import Problem, choose_copies
from bench.attention.runner import DeviceLost, Row, Runner, Watcher
from bench.attention.scales import FULL, QUICK, TINY, Scale
from bench.attention.sections import NAMES, Bench, Peers, sections
from bench.attention.shapes import Shape
from bench.attention.supervisor import LOST, Journal
from bench.attention.systems import Section
from pagedkv.errors import KernelsUnavailable

KEPT_PROBLEMS = 12
MEMORY_SHARE = 0.5  # of the free memory, for KV


def main() -> int:
    """Measure what the journal has no rows for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    options = parser.parse_args()
    try:
        device = open_device(options.device)
    except KernelsUnavailable as problem:
        print(f"bench.attention: {problem}", file=sys.stderr)
        return 2
    scale = TINY if device.kind == "ptxsim" else QUICK if options.quick else FULL
    try:
        journal = Journal(options.journal)
        measure(device, scale, peer_modules.all_peers(), options.only.split(","), journal, options.deadline)
    except DeviceLost as lost:
        print(f"bench.attention: the device takes no more work: {lost}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(LOST)  # what CuPy and torch would free at the end, they cannot
    return 0


def open_device(kind: str) -> Device:
    """The device of a name."""
    if kind == "ptxsim":
        from bench.attention.simulated import PtxsimDevice

        return PtxsimDevice()
    from bench.attention.cuda import CudaDevice

    return CudaDevice()


def measure(
    device: Device, scale: Scale, peers: Peers, only: Sequence[str], journal: Journal, deadline: float
) -> list[Row]:
    """Run the sections on a device; ``deadline`` is seconds since the epoch.

    Raises
    ------
    DeviceLost
        The device takes no more work in this process.
    """
    known = [line["row"] for line in journal.news() if "row" in line]
    arena = Arena(device, min(scale.arena_bytes, int(device.free_bytes() * MEMORY_SHARE)), scale.period)
    bench = Bench(device, arena, scale, peers, Problems(device, arena, scale).of)
    parts = sections(bench, only)
    total = sum(len(group.entries) for part in parts for group in part.groups)
    journal.write(about={"entries": total, "device": {"kind": device.kind, **device.describe()}, "cpus": _cpus()})
    compile_ahead(parts, known, journal)
    device.free_bytes()
    runner = Runner(device, scale, deadline, watcher=_Writer(journal), known=known, clock=time.time)
    return runner.run(parts)


def compile_ahead(parts: Sequence[Section], known: Sequence[Row], journal: Journal) -> None:
    """Compile and load the kernels of all entries on all CPUs.

    One that fails is told of when it is its turn.
    """
    done = {(row["section"], row["case"], row["system"]) for row in known}
    work = [
        entry.compile
        for part in parts
        for group in part.groups
        for entry in group.entries
        if entry.compile is not None and (part.name, *entry.key) not in done
    ]
    with ThreadPoolExecutor(_cpus()) as pool:
        for number, future in enumerate(as_completed([pool.submit(one) for one in work]), start=1):
            with contextlib.suppress(Exception):
                future.result()
            journal.write(begin={"section": "", "keys": [], "doing": f"compiled {number} of {len(work)}"})


class Problems:
    """Shapes' arrays, the latest few kept."""

    def __init__(self, device: Device, arena: Arena, scale: Scale) -> None:
        self._device, self._arena, self._scale = device, arena, scale
        self._kept: OrderedDict[Shape, Problem] = OrderedDict()

    def of(self, shape: Shape) -> Problem:
        """The problem of a shape.

        Raises
        ------
        MemoryError
            Its KV does not fit into the arena.
        """
        if shape not in self._kept:
            copies = choose_copies(shape, self._device.l2_bytes, self._arena.num_bytes, self._scale.copies)
            self._kept[shape] = Problem(self._device, self._arena, shape, copies)
            if len(self._kept) > KEPT_PROBLEMS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(shape)
        return self._kept[shape]


class _Writer(Watcher):
    """Writes what happens to the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def begin(self, section: str, keys: Sequence[tuple[str, str]], doing: str) -> None:
        self._journal.write(begin={"section": section, "keys": list(keys), "doing": doing})

    def done(self, row: Row) -> None:
        self._journal.write(row=row)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) or 1


if __name__ == "__main__":
    sys.exit(main())
