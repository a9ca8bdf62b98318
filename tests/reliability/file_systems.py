"""Real file systems, mounted for a while.

tmpfs, ext4 in a file, and one of FUSE that fails on demand.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = 4096
DISK_BYTES = 16 << 20
FUSE_MODULES = ("mfusepy", "fuse")


class Unavailable(Exception):
    """What is missing on this machine."""


def private_mounts() -> list[str]:
    """A command to run another one under, which may then mount without anybody seeing it.

    Raises
    ------
    Unavailable
    """
    for command in (["unshare", "-m"], ["unshare", "-Urm"]):
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    raise Unavailable("no private mount namespace (unshare -m, unshare -Urm)")


@contextlib.contextmanager
def tmpfs(place: Path) -> Iterator[Path]:
    """An empty file system in memory, of `DISK_BYTES`."""
    with _mounted(place, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none") as disk:
        yield disk


@contextlib.contextmanager
def ext4(place: Path) -> Iterator[Path]:
    """An empty ext4 in a file.

    Raises
    ------
    Unavailable
    """
    if os.geteuid() or not shutil.which("mkfs.ext4", path=_system_path()):
        raise Unavailable("needs root and mkfs.ext4")
    image = place / "image"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    _must("mkfs.ext4", "-q", "-m", "0", str(image))
    with _mounted(place, "-o", "loop", str(image)) as disk:
        yield disk


@contextlib.contextmanager
def fuse(place: Path) -> Iterator[tuple[Path, Path]]:
    """Mount a FUSE directory; return it and the file that says how it fails.

    See :mod:`tests.reliability.fuse_faults`.

    Raises
    ------
    Unavailable
    """
    module = next((name for name in FUSE_MODULES if _imports(name)), None)
    if module is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Unavailable("needs /dev/fuse, libfuse and mfusepy (or fusepy)")
    back, disk, mode = place / "back", place / "disk", place / "mode"
    for folder in (back, disk):
        folder.mkdir(mode=0o700)
    mode.write_text("ok")
    command = [sys.executable, "-m", "tests.reliability.fuse_faults", module, str(back), str(disk), str(mode)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as server:
        try:
            while not os.path.ismount(disk):
                if server.poll() is not None:
                    raise Unavailable(f"FUSE cannot be mounted here ({server.returncode})")
                os.sched_yield()
            yield disk, mode
        finally:
            subprocess.run(["umount", str(disk)], capture_output=True)
            server.terminate()


class Ballast:
    """Fills a file system up to a few pages."""

    def __init__(self, disk: Path) -> None:
        self._path = disk / "ballast"

    def leave(self, pages: int) -> None:
        """Leave as many pages free, as near as the file system comes to that."""
        with self._path.open("wb", buffering=0) as file:
            for size in (1 << 20, PAGE):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
            file.truncate(max(0, file.tell() - pages * PAGE))
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Give the space back."""
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def _mounted(place: Path, *arguments: str) -> Iterator[Path]:
    disk = place / "disk"
    disk.mkdir()
    _must("mount", *arguments, str(disk))
    try:
        yield disk
    finally:
        _must("umount", str(disk))


def _must(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": _system_path()})
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:3])}: {done.stderr.strip()}")


def _system_path() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, OSError):  # mfusepy without libfuse
        return False
    return True
