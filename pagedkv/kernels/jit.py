"""Compiled kernels in memory and on disk: the first request compiles each one.

The folder is ``PAGEDKV_CACHE_DIR``, else ``$XDG_CACHE_HOME/pagedkv/kernels``, else ``~/.cache/pagedkv/kernels``. A
file is ``KERNEL-KEY-CHECKSUM.cubin`` (or ``.ptx``): the key covers everything that goes into the compiler, the checksum
its output. So a file that was cut short or damaged does not match its name, and is compiled again; a path
never means two contents, which CuPy relies on (it remembers modules by path); and the file can be given to NVIDIA's
tools as it is. Files appear by renaming, so processes may share a folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagedkv._version import __version__
from pagedkv.kernels.nvrtc import Nvrtc, default_nvrtc
from pagedkv.kernels.source import translation_unit
from pagedkv.kernels.toolkits import nvrtc_for
from pagedkv.kernels.variant import Variant
from pagedkv.observe.callbacks import Told
from pagedkv.threads.crew import Crew
from pagedkv.threads.monitor import Monitor

Kind = Literal["cubin", "ptx"]
Origin = Literal["compiled", "disk"]
Progress = Callable[[int, int], None]

_DIGEST_BYTES = 16
_CUDA_INCLUDE = re.compile(r"^\s*#\s*include\s+<([\w.]+)\.h>", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled variant.

    Attributes
    ----------
    code : cubin or PTX.
    path : the file that holds it; None where nothing could be written.
    log : the compiler's words; empty if another process compiled it.
    origin : where it came from when this process first asked.
    """

    code: bytes = field(repr=False)
    path: Path | None
    log: str
    origin: Origin

    @property
    def checksum(self) -> str:
        """32 hex digits over the code."""
        return _checksum(self.code)


def default_folder() -> Path | None:
    """Where this user's compiled kernels lie; None if the user has no home."""
    given = os.environ.get("PAGEDKV_CACHE_DIR")
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification says to ignore relative ones
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base, "pagedkv", "kernels")


class CompileCache:
    """Compiles variants with one NVRTC and caches the results.

    Thread-safe; each variant is compiled once.

    Parameters
    ----------
    nvrtc : the compiler.
    folder : of the files; None for memory alone. It need not exist.
    extra_options : NVRTC options for every variant, such as ``--ptxas-options=-v``; they are part of the key.
    """

    def __init__(self, nvrtc: Nvrtc, folder: Path | None, extra_options: Sequence[str] = ()) -> None:
        self.nvrtc, self.folder, self.extra_options = nvrtc, folder, tuple(extra_options)
        self._lock = threading.Lock()
        self._changed = Monitor()
        self._known: dict[tuple[Variant, str, Kind, str], Binary] = {}  # the last is the source
        self._making: set[tuple[Variant, str, Kind, str]] = set()  # under way, in some thread
        self._warned = False

    def key(self, variant: Variant, arch: str, kind: Kind = "cubin") -> str:
        """32 hex digits that identify the result.

        Over sources with headers, options, compiler, and our version.
        """
        source = translation_unit(variant.kernel)
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        parts = (
            *("pagedkv", __version__, kind, variant.kernel, *self._options(variant, arch)),
            *("nvrtc", *map(str, self.nvrtc.version), str(self.nvrtc.library_bytes)),
            *(_header_digest(self.nvrtc.include, name) for name in sorted(set(_CUDA_INCLUDE.findall(source)))),
            source,
        )
        for part in parts:
            digest.update(b"%d:" % len(part.encode()) + part.encode())
        return digest.hexdigest()

    def get(self, variant: Variant, arch: str, kind: Kind = "cubin") -> Binary:
        """A variant for an architecture, compiled on first use.

        ``sm_90a``; ``compute_90`` with ``kind="ptx"``.

        Raises
        ------
        CompileError
            The compiler refuses it; asking again compiles again.
        KernelsUnavailable
            There is no such kernel.
        """
        asked = (variant, arch, kind, translation_unit(variant.kernel))
        known = self._known.get(asked)
        if known is not None:
            return known
        mine = False
        try:
            with self._changed:
                self._changed.wait_for(lambda: asked not in self._making)
                known = self._known.get(asked)
                if known is not None:
                    return known
                mine = True  # before it is noted: after an interrupt between the two there is nothing to take back
                self._making.add(asked)
            made = self._known[asked] = self._make(variant, arch, kind)
            return made
        finally:
            if mine:
                with self._changed:
                    self._making.discard(asked)
                    self._changed.notify_all()

    def precompile(
        self,
        variants: Iterable[Variant],
        arch_of: Callable[[Variant], str],
        kind: Kind = "cubin",
        *,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> list[Binary]:
        """Compile many variants at once; NVRTC releases the GIL.

        Parameters
        ----------
        variants : may repeat themselves.
        arch_of : architecture of each.
        threads : default: one per CPU this process may use.
        progress : told (done, total) after each. An Exception in it is logged once, and compiling goes on.

        Returns
        -------
        One per variant, in their order.

        Raises
        ------
        CompileError
            The first that was refused; those not yet begun are given up.
        """
        wanted = list(variants)
        done, told = 0, None if progress is None else Told(progress, "progress")
        results = []
        with Crew(lambda one: self.get(one, arch_of(one), kind), wanted, threads or available_cpus()) as compiled:
            for binary in compiled:
                results.append(binary)
                done += 1
                if told is not None:
                    told(done, len(wanted))
        return results

    def _options(self, variant: Variant, arch: str) -> tuple[str, ...]:
        return (*variant.options(arch), *self.extra_options)

    def _make(self, variant: Variant, arch: str, kind: Kind) -> Binary:
        stem = f"{variant.kernel}-{self.key(variant, arch, kind)}"
        found = self._read(stem, kind)
        if found is not None:
            return found
        source = translation_unit(variant.kernel)
        compiled = self.nvrtc.compile(source, f"{variant.kernel}.cu", self._options(variant, arch), kind)
        return Binary(compiled.code, self._write(stem, kind, compiled.code), compiled.log, "compiled")

    def _read(self, stem: str, kind: Kind) -> Binary | None:
        """The file of a stem whose content matches its name.

        Files that do not match are removed if possible.
        """
        if self.folder is None:
            return None
        try:
            names = sorted(
                name for name in os.listdir(self.folder) if name.startswith(stem) and name.endswith(f".{kind}")
            )
        except OSError:
            return None
        for name in names:
            path = self.folder / name
            with contextlib.suppress(OSError):
                code = path.read_bytes()
                if name == f"{stem}-{_checksum(code)}.{kind}":
                    return Binary(code, path, "", "disk")
                path.unlink()
        return None

    def _write(self, stem: str, kind: Kind, code: bytes) -> Path | None:
        if self.folder is None:
            return None
        path = self.folder / f"{stem}-{_checksum(code)}.{kind}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, code)
        except OSError as error:
            with self._lock:
                first, self._warned = not self._warned, True
            if first:
                warnings.warn(
                    f"compiled kernels cannot be kept in {self.folder} ({error.strerror}): every process compiles them "
                    f"anew; set PAGEDKV_CACHE_DIR to a folder that can be written",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return None
        return path


def write_whole(path: Path, content: bytes) -> None:
    """Make a file appear with all its content, or not at all; one that is there is replaced."""
    import tempfile  # where a file is made

    handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def available_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) or 1


@functools.lru_cache(maxsize=1)
def default_cache() -> CompileCache:
    """The cache of :func:`default_nvrtc` in :func:`default_folder`, one per process.

    Raises
    ------
    KernelsUnavailable
        There is no NVRTC.
    """
    return CompileCache(default_nvrtc(), default_folder())


@functools.cache
def cache_for_driver(version: int) -> CompileCache:
    """This user's kernel cache, with the newest NVRTC whose cubins the driver loads.

    A driver version of 12080 is 12.8.
    """
    return CompileCache(nvrtc_for((version // 1000, version % 1000 // 10)), default_folder())


def _checksum(code: bytes) -> str:
    return hashlib.blake2b(code, digest_size=_DIGEST_BYTES).hexdigest()


@functools.cache
def _header_digest(include: Path, name: str) -> str:
    """Of a CUDA header and of the .hpp that it includes."""
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES)
    for suffix in (".h", ".hpp"):
        path = include / f"{name}{suffix}"
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()
