"""What a power loss leaves of a directory, from the log of everything that changed it.

Of writes, what a sync of their file confirmed is there, and of what came after any 512-byte sectors. Creations,
renames, deletions and sizes are there up to some moment after the last sync of the directory, in their order, as
journalling file systems keep them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.reliability.faults import Change, Entry

SECTOR = 512
IGNORED = "LOCK"  # says nothing, and is rewritten at every opening
CHANCES = (0.0, 0.1, 0.5, 0.9, 1.0)  # that a sector without a sync got there

Bytes = NDArray[np.uint8]


@dataclass
class Image:
    """Files of a directory: their numbers by name, and their bytes by number."""

    names: dict[str, int] = field(default_factory=dict)
    files: dict[int, Bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Image:
        """The directory as it is; empty if it is missing."""
        image = cls()
        for file in path.iterdir() if path.exists() else ():
            if file.name != IGNORED:
                image.names[file.name] = file.stat().st_ino
                image.files[file.stat().st_ino] = np.frombuffer(file.read_bytes(), np.uint8)
        return image

    def same(self, other: Image) -> bool:
        """Whether names and bytes are equal."""
        mine, theirs = self.contents(), other.contents()
        return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)

    def contents(self) -> dict[str, Bytes]:
        """Bytes by name."""
        return {name: self.files[number] for name, number in self.names.items() if name != IGNORED}

    def write(self, path: Path) -> None:
        """Make the directory hold this and nothing else."""
        path.mkdir(mode=0o700, exist_ok=True)
        contents = self.contents()
        for name in os.listdir(path):
            if name not in contents:
                (path / name).unlink()
        for name, data in contents.items():
            fd = os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(fd, data.tobytes(), 0)
            os.ftruncate(fd, data.size)
            os.close(fd)


def replay(base: Image, log: Sequence[Entry]) -> Image:
    """The directory if all of the log happened."""
    everything = range(len(log))
    return _apply(base, log, list(everything), len(log), dict.fromkeys(everything))


def lose_power(base: Image, log: Sequence[Entry], rng: np.random.Generator) -> Image:
    """The directory if the power fails at the end of the log."""
    synced_names = 0
    synced: dict[int, int] = {}
    files = set(base.files) | {entry.file for entry in log if entry.kind == Change.CREATE}
    for index, entry in enumerate(log):
        if entry.kind == Change.SYNC and entry.file in files:
            synced[entry.file] = index
        elif entry.kind == Change.SYNC:
            synced_names = index
    names = int(rng.integers(synced_names, len(log) + 1))
    chance = rng.choice(CHANCES)
    kept: dict[int, NDArray[np.bool_] | None] = {}
    for index, entry in enumerate(log):
        if index < synced.get(entry.file, 0):
            kept[index] = None
        elif entry.kind == Change.WRITE:
            kept[index] = rng.random(-(-len(entry.data) // SECTOR)) < chance
    certain = [index for index in kept if kept[index] is None]
    doubtful = [index for index in kept if kept[index] is not None]
    rng.shuffle(doubtful)
    return _apply(base, log, certain + doubtful, names, kept)


def _apply(
    base: Image, log: Sequence[Entry], order: Sequence[int], names: int, kept: dict[int, NDArray[np.bool_] | None]
) -> Image:
    """Apply the first `names` changes of names and sizes, and the kept sectors of writes.

    None keeps all sectors of a write; the writes go in this order.
    """
    image = Image(dict(base.names), dict(base.files))
    for index, entry in enumerate(log):
        if entry.kind == Change.CREATE and entry.name not in image.names and index < names:
            image.names[entry.name] = entry.file
        if entry.kind == Change.CREATE and (entry.file not in base.files):
            image.files.setdefault(entry.file, np.zeros(0, np.uint8))
        elif entry.kind == Change.RENAME and index < names:
            image.names[entry.data.decode()] = image.names.pop(entry.name)
        elif entry.kind == Change.UNLINK and index < names:
            image.names.pop(entry.name, None)
        elif entry.kind in (Change.CUT, Change.GROW) and (index < names or index in kept):
            now = image.files[entry.file]
            size = max(entry.offset, now.size) if entry.kind == Change.GROW else entry.offset
            image.files[entry.file] = np.concatenate((now[:size], np.zeros(max(0, size - now.size), np.uint8)))
    changed: dict[int, Bytes] = {}
    for index in order:
        entry = log[index]
        if entry.kind != Change.WRITE:
            continue
        if entry.file not in changed:
            changed[entry.file] = image.files[entry.file] = image.files[entry.file].copy()
        _put(changed[entry.file], entry, kept[index])
    return image


def _put(file: Bytes, entry: Entry, kept: NDArray[np.bool_] | None) -> None:
    """The kept sectors of a write, as far as the file reaches."""
    data = np.frombuffer(entry.data, np.uint8)[: max(0, file.size - entry.offset)]
    if kept is None:
        file[entry.offset : entry.offset + data.size] = data
        return
    for sector in np.flatnonzero(kept).tolist():
        part = data[sector * SECTOR : (sector + 1) * SECTOR]
        start = entry.offset + sector * SECTOR
        file[start : start + part.size] = part
