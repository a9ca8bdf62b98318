"""One cache directory for many models: a folder for each, under a common budget.

    LOCK            locked while a process chooses, makes or removes folders
    <name>/IN_USE   locked while a process has the folder open; its time says when that was last
    <name>/ABOUT    JSON: the bytes that the store may use, and whose KV it is, for people
    <name>/PROBE    the numeric fingerprint of the model (probe.py)
    <name>/FULL     there when more than half of the store was in use at the last opening: the next one lets it grow
    <name>/store/   the disk tier

A store allocates its space when it is made, and never shrinks. So a new one takes half of the budget that no other
folder uses, and an eighth of the budget at least: folders of other models that no process has open are removed for
that, as a whole, the least recently opened one first.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedkv.adapters.probe import Probe
from pagedkv.cache.parts import SMALL_FILES_BYTES
from pagedkv.errors import FileFormatError, InvalidArgument, LayoutMismatch, TierError, WrongType
from pagedkv.spec.budgets import Disk
from pagedkv.spec.sizes import Blocks, format_size, parse_size
from pagedkv.tiers.disk import file_system
from pagedkv.tiers.disk.descriptors import close_quietly

LEAST_SHARE = 8  # of the budget, for a new folder
MISMATCHES = ("beside", "reset", "refuse")
_BESIDE = 16  # folders of one name at most: models that only their probes tell apart


class Folder:
    """The folder of one model, open: no other process uses or removes it.

    Attributes
    ----------
    path : of the folder.
    num_bytes : that its store may use.
    kept_bytes : that its store had before, 0 for a new one.
    note : why it is not the folder of the same model's last opening; empty if it is.
    """

    def __init__(self, path: Path, lock: int, num_bytes: int, kept_bytes: int, about: str, note: str) -> None:
        self.path, self._lock, self._about = path, lock, about
        self.num_bytes, self.kept_bytes, self.note = num_bytes, kept_bytes, note

    @property
    def store(self) -> str:
        """Path of the disk tier."""
        return str(self.path / "store")

    def keep_size(self) -> None:
        """Go on with the size that the store had: it could not grow."""
        self.num_bytes = self.kept_bytes
        with contextlib.suppress(OSError):  # the next opening goes by the store itself
            _write_about(self.path, self.num_bytes, self._about)

    def note_use(self, used: int, capacity: int) -> None:
        """Remember how full the store is: more than half lets it grow at its next opening."""
        with contextlib.suppress(OSError):
            if used * 2 > capacity:
                (self.path / "FULL").touch(0o600)
            else:
                (self.path / "FULL").unlink(missing_ok=True)

    def give_up(self) -> None:
        """Close it because its store could not be opened.

        It keeps the size that its store had; a new one is made anew next time, with the size that it gets then.
        """
        if self.kept_bytes:
            self.keep_size()
        else:
            with contextlib.suppress(OSError):
                (self.path / "ABOUT").unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let other processes use or remove it. Twice is fine."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            close_quietly(lock)

    __del__ = close


def budget_of(disk: Disk) -> int:
    """Bytes of the whole directory.

    Raises
    ------
    WrongType
        The size is in blocks, which differ from model to model.
    """
    if isinstance(disk.size, Blocks):
        raise WrongType(f"an adapter's disk has a size in bytes, such as '20GiB', not {disk.size!r}")
    return parse_size(disk.size)


def open_folder(disk: Disk, name: str, about: str, probe: Probe | None = None, on_mismatch: str = "beside") -> Folder:
    """Open the folder of a model in the directory of `disk`, or make it.

    Parameters
    ----------
    disk : its path and the common budget.
    name : of the folder: a fingerprint.
    about : whose KV it is, for people.
    probe : compared with that of the folder; None to compare nothing.
    on_mismatch : for a folder of that name with another probe
        ``"beside"``: it stays, and another one is opened; ``"reset"``: it is emptied; ``"refuse"``: an error.

    Raises
    ------
    TierError
        Another process has it open, the directory is not an adapter's, or the others leave too little of the budget.
    LayoutMismatch
        The probes differ, and that is to be refused.
    WrongType, InvalidArgument
    """
    budget = budget_of(disk)
    if on_mismatch not in MISMATCHES:
        raise InvalidArgument(f"on_mismatch must be one of {MISMATCHES}, not {on_mismatch!r}")
    root = Path(disk.path)
    try:
        with _choosing(root):
            path, lock, note = _claim(root, name, probe, on_mismatch)
            try:
                kept = _kept_in(path)
                size = _make_room(root, path, budget, kept)
                _write_about(path, size, about)
                if probe is not None and not (path / "PROBE").exists():
                    probe.write(path / "PROBE")
                os.utime(path / "IN_USE")
            except BaseException:
                close_quietly(lock)
                raise
    except OSError as problem:
        raise TierError(f"cannot open the adapters' directory {root}: {problem.strerror or problem}") from problem
    return Folder(path, lock, size, kept, about, note)


@contextlib.contextmanager
def _choosing(root: Path) -> Iterator[None]:
    """Hold the directory's lock: every process takes it before it looks at the folders."""
    if not root.is_dir():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    foreign = [] if (root / "LOCK").exists() else sorted(entry.name for entry in root.iterdir())
    if foreign or (root / "SUPER").exists():
        what = "holds the disk tier of one cache" if (root / "SUPER").exists() else f"holds {foreign[0]!r}"
        raise TierError(f"{root} {what}, so it is no directory of adapters; name an empty or a new one")
    lock = _open_lock(root / "LOCK")
    try:
        file_system.wait_and_lock(lock)
        yield
    finally:
        close_quietly(lock)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | file_system.flags("O_NOFOLLOW", "O_CLOEXEC"), 0o600)


def _try_lock(folder: Path) -> int:
    """A descriptor that holds the folder's lock; -1 where another process has it open."""
    lock = _open_lock(folder / "IN_USE")
    try:
        file_system.lock(lock)
    except BlockingIOError:
        close_quietly(lock)
        return -1
    except BaseException:
        close_quietly(lock)
        raise
    return lock


def _claim(root: Path, name: str, probe: Probe | None, on_mismatch: str) -> tuple[Path, int, str]:
    """Lock the folder of that name whose probe agrees, or make one.

    Also why it is not the first one of that name.
    """
    note = ""
    for number in range(_BESIDE):
        path = root / (f"{name}.{number}" if number else name)
        if path.is_symlink() or (path.is_dir() and not (path / "IN_USE").exists() and any(path.iterdir())):
            raise TierError(f"{path} is not a model's folder, although it has the name of one: move it away")
        path.mkdir(mode=0o700, exist_ok=True)
        lock = _try_lock(path)
        differs = ""
        if lock >= 0 and not ((path / "ABOUT").exists() and (_kept_in(path) or (path / "PROBE").exists())):
            _empty(path)  # made halfway, by a process that has ended
        elif probe is not None:
            differs = _difference(path, probe)
        if lock < 0 and not differs:
            raise TierError(f"{path} is in use by another process, or by another adapter of this one; close that one")
        if not differs:
            return path, lock, note
        note = f"the model computes other numbers than the one of {path.name}: {differs}"
        if lock >= 0 and on_mismatch == "reset":
            _empty(path)
            return path, lock, note
        if lock >= 0:
            close_quietly(lock)
        if on_mismatch != "beside":
            raise LayoutMismatch(f"{note}; name another directory, or reset it (on_mismatch='reset')")
    raise TierError(f"{root} has {_BESIDE} folders of {name}, all of other models; delete some")


def _difference(path: Path, probe: Probe) -> str:
    try:
        return probe.difference(Probe.read(path / "PROBE"))
    except (OSError, FileFormatError) as problem:
        return f"its probe cannot be read ({problem})"


def _make_room(root: Path, ours: Path, budget: int, kept: int) -> int:
    """Bytes for the store of `ours`, after removing folders where it needs that."""
    others = [path for path in root.iterdir() if path != ours and _is_folder(path)]
    sizes = {path: _size_in(path) for path in others}
    least = max(kept, budget // LEAST_SHARE)
    for path in sorted(others, key=_last_opened):
        if sum(sizes.values()) + least <= budget:
            break
        if _removed(path):
            del sizes[path]
    free = budget - sum(sizes.values()) - kept
    if kept:
        grows = (ours / "FULL").exists()
        return kept + (max(free, 0) // 2 if grows else 0)
    if free < least:
        raise TierError(
            f"the adapters' directory {root} may use {format_size(budget)}, and models that are in use have "
            f"{format_size(sum(sizes.values()))} of it; a new one needs {format_size(least)}: give it a larger size"
        )
    return max(free // 2, least)


def _is_folder(path: Path) -> bool:
    """Whether it is a model's folder.

    All else in the directory is the user's own: it is neither counted nor removed.
    """
    mark = path / "IN_USE"
    return not path.is_symlink() and path.is_dir() and mark.is_file() and not mark.is_symlink()


def _removed(folder: Path) -> bool:
    """Remove a folder; False where a process has it open or the file system refuses."""
    try:
        lock = _try_lock(folder)
        if lock < 0:
            return False
        try:
            _remove(folder)
        finally:
            close_quietly(lock)
    except OSError:
        return False
    return True


def _kept_in(folder: Path) -> int:
    """The size that the folder's store was made with; 0 where there is none.

    By its files, where ABOUT is damaged or has the size to which the store was to grow when its opening failed.
    """
    with contextlib.suppress(OSError):
        files = [file.lstat().st_size for file in (folder / "store").iterdir()]
        least, most = sum(files), sum(files) + SMALL_FILES_BYTES
        noted = _noted_in(folder)
        if files:
            return min(noted, most) if noted is not None and noted >= least else most
    return 0


def _size_in(folder: Path) -> int:
    """Bytes that the folder's store may use; 0 where there is none."""
    noted = _noted_in(folder)
    return _kept_in(folder) if noted is None else noted


def _noted_in(folder: Path) -> int | None:
    """The size in ABOUT; None where that cannot be read."""
    try:
        about: Any = json.loads((folder / "ABOUT").read_text())
        size = about["bytes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return size if isinstance(size, int) and size >= 0 else None


def _last_opened(folder: Path) -> float:
    try:
        return (folder / "IN_USE").stat().st_mtime_ns
    except OSError:
        return 0.0


def _write_about(folder: Path, size: int, about: str) -> None:
    unfinished = folder / "ABOUT.new"
    unfinished.write_text(json.dumps({"bytes": size, "model": about}) + "\n")
    os.replace(unfinished, folder / "ABOUT")


def _empty(folder: Path) -> None:
    """Remove all but the lock; ABOUT first: an interrupted removal counts as made halfway."""
    for name in ("ABOUT", *(entry.name for entry in folder.iterdir() if entry.name != "IN_USE")):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    _empty(folder)
    (folder / "IN_USE").unlink(missing_ok=True)
    folder.rmdir()
