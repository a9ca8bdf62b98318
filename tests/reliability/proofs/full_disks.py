"""Full disks, files over the size limit, a FUSE file system that fails.

The store degrades, and recovers.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

from tests.reliability.faults import Inside, in_worker
from tests.reliability.file_systems import Ballast, Unavailable, ext4, fuse, private_mounts, tmpfs
from tests.reliability.ledger import Step
from tests.reliability.life import Life, Outside
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.scripts import FLUSH, LIFE, OPEN, READ, purge, write
from tests.reliability.small_store import scratch
from tests.reliability.stores import NUM_BLOCKS, READ_PATHS, SEGMENT_SLOTS, SLOT_BYTES

PAGE = 4096
WHOLE_STORE_PAGES = NUM_BLOCKS * SLOT_BYTES // PAGE + 16
FILLED = (OPEN, write(0, *range(NUM_BLOCKS)), FLUSH)
IN_NEED = (
    write(20, 1, 6), READ, write(22, 2), Step("invalidate", (3,)), *purge(1), FLUSH, write(24, 7, 8, 9, 10), READ,
)  # fmt: skip
FUSE_MODES = ("read", "write", "torn", "sync", "full")

Mount: TypeAlias = Callable[[Path], AbstractContextManager[Path]]


def run(count: int, seed: int, tick: Tick) -> Tally:
    """All cases; there is nothing random, and no `count` to choose."""
    tally = Tally()
    merge(tally, "file size limit", in_worker(over_the_size_limit, count, seed, tick, {}))
    try:
        private = private_mounts()
    except Unavailable as missing:
        tally.skipped += (f"tmpfs, ext4 and FUSE: {missing}",)
        return tally
    inside: Inside
    for name, inside in (("tmpfs", on_tmpfs), ("ext4", on_ext4), ("FUSE", on_fuse)):
        merge(tally, name, in_worker(inside, count, seed, tick, {}, private))
    tally.require("openings refused", "writes failed")
    return tally


def merge(tally: Tally, name: str, part: Tally) -> None:
    """Add what a worker found."""
    tally.count += part.count
    tally.hits += part.hits
    tally.wrong += part.wrong
    tally.first_wrong = tally.first_wrong or part.first_wrong
    tally.skipped += part.skipped
    tally.add(f"cases, {name}", part.count)
    for what, count in part.found.items():
        tally.add(what, count)


def on_tmpfs(count: int, seed: int, tick: Tick) -> Tally:
    """In a worker with mounts of its own."""
    return on_full_disk("tmpfs", tmpfs, tick)


def on_ext4(count: int, seed: int, tick: Tick) -> Tally:
    """In a worker with mounts of its own."""
    return on_full_disk("ext4", ext4, tick)


def on_full_disk(name: str, mount: Mount, tick: Tick) -> Tally:
    """Make stores and live in them with every number of free pages.

    Then let sparse stores meet a full disk.
    """
    tally = Tally()
    with mounted(name, mount, tally) as disks:
        for disk in disks:
            ballast = Ballast(disk)
            for pages, read_path in itertools.product(range(WHOLE_STORE_PAGES), READ_PATHS):
                what = f"{name}, {pages} pages free, {read_path}"
                with case(what, disk, read_path, ballast.remove, tally, tick) as (life, faults):
                    ballast.leave(pages)
                    faults.on()
                    life.run(LIFE)
            for pages, read_path in itertools.product(range(12), READ_PATHS):
                what = f"{name}, sparse files, {pages} pages free, {read_path}"
                with case(what, disk, read_path, ballast.remove, tally, tick) as (life, faults):
                    life.run(FILLED)
                    lose_space(disk / "kv", life)
                    ballast.leave(pages)
                    faults.on()
                    life.run(IN_NEED)
    return tally


def on_fuse(count: int, seed: int, tick: Tick) -> Tally:
    """In a worker with mounts of its own."""
    tally = Tally()
    with scratch() as place:
        try:
            with fuse(place) as (disk, mode):
                for how, read_path, script in itertools.product(FUSE_MODES, READ_PATHS, (IN_NEED, LIFE)):
                    what = f"FUSE, {how}, {read_path}"
                    with case(what, disk, read_path, lambda: mode.write_text("ok"), tally, tick) as (life, faults):
                        if script is IN_NEED:
                            life.run(FILLED)
                        mode.write_text(how)
                        faults.on()
                        life.run(script)
                        if how == "torn":
                            life.ledger.nothing_is_sure()
        except Unavailable as missing:
            tally.skipped += (f"FUSE: {missing}",)
    return tally


def over_the_size_limit(count: int, seed: int, tick: Tick) -> Tally:
    """Stores made, opened or used by a process that may not write files of their size."""
    tally = Tally()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # as a host that embeds Python may leave it: deadly
    with scratch() as disk:
        limits = range(0, SEGMENT_SLOTS * SLOT_BYTES + 2 * PAGE, PAGE // 2)
        for limit, read_path, before in itertools.product(limits, READ_PATHS, ("made", "opened", "used")):
            what = f"limit of {limit} bytes before the store is {before}, {read_path}"
            with case(what, disk, read_path, lambda: set_limit(hard, hard), tally, tick) as (life, faults):
                if before == "used":
                    life.run(FILLED)
                elif before == "opened":
                    life.run((*FILLED, Step("close")))
                set_limit(limit, hard)
                faults.on()
                life.run(LIFE if before == "made" else IN_NEED if before == "used" else (OPEN, *IN_NEED))
    return tally


def set_limit(soft: int, hard: int) -> None:
    """The largest file this process may write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def mounted(name: str, mount: Mount, tally: Tally) -> Iterator[Sequence[Path]]:
    """The file system, or none and a word why not."""
    with scratch() as place:
        try:
            with mount(place) as disk:
                yield [disk]
        except Unavailable as missing:
            tally.skipped += (f"{name}: {missing}",)
            yield []


@contextmanager
def case(
    what: str, disk: Path, read_path: str, end: Callable[[], object], tally: Tally, tick: Tick
) -> Iterator[tuple[Life, Outside]]:
    """Yield one store on the disk, which the caller puts into need.

    Then `end` ends the need, and everything is checked.
    """
    faults = Outside(end)
    life = Life(disk / "kv", faults, read_path)
    try:
        yield life, faults
        life.settle()
    except Exception as problem:
        life.complaints.append(f"raised {type(problem).__name__}: {problem}")
        end()
        life.abandon()
    if life.complaints:
        tally.fail(f"{what}: {'; '.join(life.complaints[:3])}")
    tally.count += 1
    tally.hits += life.hits
    tally.add("openings refused", life.refused)
    tally.add("writes failed", life.failed_writes)
    tally.add("payloads found damaged", life.misses["payload"])
    shutil.rmtree(disk / "kv", ignore_errors=True)
    tick(1)


def lose_space(path: Path, life: Life) -> None:
    """Cut the segment files and make them as long again.

    Now they are sparse, and all content is gone.
    """
    for file in path.glob("data.*"):
        size = file.stat().st_size
        os.truncate(file, 0)
        os.truncate(file, size)
    life.ledger.nothing_is_sure()


PROOF = Proof(
    claim="real full disks, file-size limits and a failing FUSE file system: no exception, no signal, no wrong byte, "
    "and all works again when the need is over",
    unit="cases on real file systems",
    quick=100,
    full=100,
    run=run,
)
