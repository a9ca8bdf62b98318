"""``pagedkv doctor --disk DIR``: tries a temporary store there, and gives a verdict.

It makes the calls that a cache makes.

All of it happens in a private directory inside DIR that is gone at the end, whatever happens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from pagedkv.errors import InvalidArgument, TierError
from pagedkv.spec.sizes import format_size
from pagedkv.tiers.disk.file_system import file_system_of, is_network
from pagedkv.tiers.disk.format import Geometry
from pagedkv.tools.payoff import verdict
from pagedkv.tools.store.benchmark import (
    BLOCK_BYTES,
    Measured,
    geometry_for,
    measure,
    measured_bytes,
    open_store,
    record_of,
)
from pagedkv.tools.store.show import counted, progress

MEMORY = ("tmpfs", "ramfs")
SMALLEST = 16 * BLOCK_BYTES


class Finding(NamedTuple):
    """One line of the report; see `pagedkv.tools.doctor.Check`."""

    name: str
    status: Literal["ok", "warning", "failed", "skipped"]
    detail: str


def check_arguments(directory: str, size: int) -> None:
    """Check the arguments before anything is tried.

    Raises
    ------
    TierError, InvalidArgument
        The directory does not exist, or the size is too small to measure anything.
    """
    if size < SMALLEST:
        raise InvalidArgument(f"a size of {format_size(size)} measures nothing; at least {format_size(SMALLEST)}")
    if not Path(directory).is_dir():
        raise TierError(f"{directory} is not a directory; name one on the disk to be tried")


def examine(directory: str, size: int, numbers: dict[str, Any]) -> Generator[Finding, None, None]:
    """Try a directory with a store of `size` bytes.

    Parameters
    ----------
    directory : exists already.
    size : of the store; about twice as much is in use for a moment.
    numbers : filled with the measurements, for JSON.

    Raises
    ------
    TierError
        The directory cannot be written, or a plain file in it cannot be read back.
    """
    g = geometry_for(size)
    try:
        with tempfile.TemporaryDirectory(prefix="pagedkv-doctor-", dir=directory) as folder:
            yield from _examine(Path(folder), g, numbers)
    except OSError as problem:
        raise TierError(f"cannot try {directory}: {problem.strerror}") from problem


def _examine(folder: Path, g: Geometry, numbers: dict[str, Any]) -> Iterator[Finding]:
    yield _file_system(folder, numbers)
    free, needed = _free(folder), 2 * g.num_blocks * g.slot_bytes
    numbers |= {"free_bytes": free, "store_bytes": g.num_blocks * g.slot_bytes, "block_bytes": g.block_bytes}
    if needed > free:
        detail = f"{format_size(free)} free, {format_size(needed)} needed; pass a smaller --size"
        yield Finding("space", "failed", detail)
        return
    yield Finding("space", "ok", f"{format_size(free)} free")
    path = folder / "kv"
    try:
        with open_store(path, g) as tier:
            yield Finding(
                "store",
                "ok",
                f"{g.num_blocks} blocks of {format_size(g.block_bytes)} in {counted(g.num_segments, 'file')}",
            )
            yield _lock(path, g)
            with progress("measuring", measured_bytes(g)) as tick:
                found = measure(folder, tier, g, tick)
    except TierError as problem:
        yield Finding("store", "failed", str(problem))
        return
    found.cold = found.cold and numbers["file_system"] not in MEMORY
    numbers["measured"] = found.to_dict()
    yield from _speeds(found)
    right = not found.wrong
    yield Finding(
        "round trip", "ok" if right else "failed",
        "every block was read as it was written" if right else f"{found.wrong} blocks differ from the bytes written",
    )  # fmt: skip
    yield _reopened(path, g)
    yield _damaged(path, g)
    yield _verdict(found, numbers)


def _file_system(folder: Path, numbers: dict[str, Any]) -> Finding:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        kind = file_system_of(fd)
    finally:
        os.close(fd)
    network = is_network(kind)
    numbers |= {"file_system": kind, "network": network}
    if network:
        detail = f"{kind}, over a network: locks and syncs may not hold, so a tier refuses it without network_fs=True"
        return Finding("file system", "warning", detail)
    if kind in MEMORY:
        return Finding("file system", "warning", f"{kind} is memory: nothing survives a restart, a host tier is faster")
    return Finding("file system", "ok", kind or "unknown")


def _free(folder: Path) -> int:
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize


def _lock(path: Path, g: Geometry) -> Finding:
    try:
        open_store(path, g).close()
    except TierError:
        return Finding("lock", "ok", "a second opener is turned away")
    return Finding("lock", "failed", "two openers had the directory at once: locks do not work on this file system")


def _speeds(found: Measured) -> Iterator[Finding]:
    names = {
        "write": "write, buffered", "write_synced": "write, synced", "read_cold": "read, cold",
        "read_warm": "read, page cache",
    }  # fmt: skip
    for name, said in names.items():
        ours, ceiling = getattr(found.store, name), getattr(found.ceiling, name)
        detail = f"{ours / 1e9:.2f} GB/s with checksums, {ours / ceiling:.0%} of {ceiling / 1e9:.2f} GB/s without"
        if name == "read_cold" and not found.cold:
            yield Finding(
                said, "warning", f"{detail}; the page cache could not be emptied, so the device may be slower"
            )
        else:
            yield Finding(said, "ok", detail)


def _reopened(path: Path, g: Geometry) -> Finding:
    with open_store(path, g) as tier:
        found = list(tier.records())
        right = sum(stored.record == record_of(stored.block) for stored in found)
    if right == len(found) == g.num_blocks:
        return Finding("reopen", "ok", f"all {right} blocks are found again")
    return Finding("reopen", "failed", f"{len(found)} of {g.num_blocks} blocks are found again, {right} of them right")


def _damaged(path: Path, g: Geometry) -> Finding:
    """Change one byte of a block's payload; only that block may be a miss, and must be."""
    victim = g.num_blocks // 2
    segment, index = divmod(victim, g.segment_slots)
    at = index * g.slot_bytes + g.header_bytes + g.block_bytes // 3
    fd = os.open(path / f"data.{segment:04d}", os.O_RDWR | os.O_CLOEXEC)
    try:
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ 1]), at)
    finally:
        os.close(fd)
    blocks = np.array([victim - 1, victim, victim + 1], np.int32)
    room = np.zeros((3, g.block_bytes), np.uint8)
    with _quiet(), open_store(path, g) as tier:
        hit = tier.read(blocks, [record_of(block) for block in blocks.tolist()], room, np.arange(3, dtype=np.int32))
        misses = tier.stats().misses["payload"]
    if hit.tolist() == [True, False, True] and misses == 1:
        return Finding("damage", "ok", "a block with one changed bit is a counted miss, its neighbours are hits")
    return Finding(
        "damage", "failed", f"one bit was changed in the second of three blocks, and hits are {hit.tolist()}"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The tier's log says nothing: the damage is our own."""
    log, silence = logging.getLogger("pagedkv.tiers.disk"), logging.Filter("none")
    log.addFilter(silence)
    try:
        yield
    finally:
        log.removeFilter(silence)


def _verdict(found: Measured, numbers: dict[str, Any]) -> Finding:
    return Finding("verdict", "ok", verdict("disk", found.store.read_cold, numbers))
