"""Copies of this tree compiled with the compiler's sanitizers, and programs run in them.

The ``.pyx`` files beside this one (callers of the core, planted mistakes) become modules of the copy's package.
Compiled modules are kept under ``build/`` by a digest of everything they are made of, so that only the first proof
that needs a sanitizer compiles.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = ROOT / "build" / "sanitizers"
COMPILER = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
REPORT_LINES = 40


@dataclass(frozen=True)
class Sanitizer:
    """One way of compiling and running.

    Attributes
    ----------
    flags : what ``-fsanitize=`` takes.
    runtimes : libraries that have to be in the process before anything else.
    environment : what they are told.
    report : the first line of a report.
    """

    flags: str
    runtimes: tuple[str, ...]
    environment: Mapping[str, str]
    report: str

    def missing(self) -> str:
        """Why nothing can be compiled or run like this here; empty where it can."""
        if not (ROOT / "setup.py").exists():
            return "no setup.py: instrumented modules need the repository"
        for package in ("Cython", "setuptools"):
            if importlib.util.find_spec(package) is None:
                return f"no {package}"
        if shutil.which(COMPILER) is None:
            return f"no compiler {COMPILER}"
        absent = [name for name in self.runtimes if not self._runtime(name).is_absolute()]
        return f"{COMPILER} has no {', '.join(absent)}" if absent else ""

    def surroundings(self, folder: Path) -> dict[str, str]:
        """Environment of a program run in a copy. What it compiles itself is instrumented as well."""
        own = {
            "LD_PRELOAD": " ".join(str(self._runtime(name)) for name in self.runtimes),
            "PYTHONPATH": str(folder),
            "PYTHONMALLOC": "malloc",  # or all Python objects would lie in a few large blocks
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "CFLAGS": f"-fsanitize={self.flags}",
            "LDFLAGS": f"-fsanitize={self.flags}",
        }
        return {**os.environ, **own, **self.environment}

    def reports(self, output: str) -> list[str]:
        """The reports in what a program wrote."""
        lines = output.splitlines()
        return ["\n".join(lines[i : i + REPORT_LINES]) for i, line in enumerate(lines) if re.search(self.report, line)]

    @staticmethod
    def _runtime(name: str) -> Path:
        """Where the compiler has a library; only its name if it has none."""
        asked = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        return Path(asked.stdout.strip())


ADDRESS = Sanitizer(
    "address,undefined",
    ("libasan.so", "libubsan.so", "libstdc++.so"),
    {
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
    "ERROR: AddressSanitizer|runtime error:",
)
THREAD = Sanitizer(
    "thread",
    ("libtsan.so",),
    {"TSAN_OPTIONS": "exitcode=0:halt_on_error=0:ignore_noninstrumented_modules=1:history_size=4"},
    "WARNING: ThreadSanitizer",
)


@dataclass(frozen=True)
class Copy:
    """A tree of its own whose modules are instrumented."""

    folder: Path
    sanitizer: Sanitizer

    def compile(self, modules: Iterable[str] = ()) -> None:
        """Build the modules again, or all of them, from the sources in this copy."""
        only = [f"--only={','.join(modules)}"] if modules else []
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", *only]
        environment = os.environ | {"PAGEDKV_SANITIZE": self.sanitizer.flags}
        for name in ("CFLAGS", "LDFLAGS", "PAGEDKV_DEBUG"):
            environment.pop(name, None)
        done = subprocess.run(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout[-4000:]}"

    def edit(self, path: str, old: str, new: str) -> None:
        """Change a source of this copy: `old` must be there once."""
        source = self.folder / path
        text = source.read_text()
        assert text.count(old) == 1, f"{path} has this {text.count(old)} times instead of once:\n{old}"
        source.write_text(text.replace(old, new))

    def python(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Python in this copy, stderr in its output."""
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self.sanitizer.surroundings(self.folder) | changes,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip


@contextmanager
def instrumented(sanitizer: Sanitizer) -> Iterator[Copy]:
    """A compiled copy of the tree as it is now, in a temporary folder of this process."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pagedkv-sanitized-") as name:
        copy = Copy(Path(name), sanitizer)
        passed_over = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.so", "*.egg-info")
        shutil.copytree(ROOT, copy.folder, ignore=passed_over, dirs_exist_ok=True)
        flavour = sanitizer.flags.replace(",", "-")
        kept = KEPT / f"{flavour}-{_digest(copy.folder)}"
        with (KEPT / f"{flavour}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the second process finds it compiled
            if not kept.exists():
                helpers = [Path(shutil.copy2(source, copy.folder / "pagedkv")) for source in HERE.glob("*.pyx")]
                copy.compile()
                for helper in helpers:  # the tests that read the package's sources see its own only
                    helper.unlink()
                for older in KEPT.glob(f"{flavour}-*"):
                    shutil.rmtree(older)
                _put(copy.folder / "pagedkv", kept)
            _put(kept, copy.folder / "pagedkv")
        yield copy


def _digest(tree: Path) -> str:
    """Stands for everything that goes into the compiled modules."""
    kinds = (".pyx", ".pxd", ".h", ".c")
    sources = [path for path in sorted((tree / "pagedkv").rglob("*")) if path.suffix in kinds]
    sources += sorted((tree / HERE.relative_to(ROOT)).glob("*.pyx"))
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(f"{sys.version} {version}".encode())
    for package in ("numpy", "Cython"):
        digest.update(importlib.import_module(package).__version__.encode())
    for path in [tree / "setup.py", *sources]:
        digest.update(f"{path.relative_to(tree)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _put(modules: Path, into: Path) -> None:
    """Copy the compiled modules of a package.

    It copies all of them or, if this is interrupted, none where `into` is new.
    """
    unfinished = into if into.exists() else into.with_name(f".{into.name}")
    for module in modules.rglob("*.so"):
        target = unfinished / module.relative_to(modules)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(module, target)
    unfinished.rename(into)
