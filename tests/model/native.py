"""Compiles native modules of the tests, with the ``.pxd`` files that the package ships."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import Cython
import numpy as np
from Cython.Build import cythonize
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

import pagedkv
from tests.model.kept import kept

HERE = Path(__file__).parent
MODULES = ("native_world", "native_moves", "native_owners", "native_rows", "native_driver")
FLAGS = ("-O1", "-g0")


@cache
def native_driver() -> ModuleType:
    """Module ``native_driver``."""
    return compiled(HERE, MODULES)


def compiled(folder: Path, modules: Sequence[str]) -> ModuleType:
    """Compile these modules of `folder`, import them, and return the last.

    They may cimport one another. One process of a run compiles them, and the others wait.
    """
    place = kept() / _digest(folder, modules)
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=place.parent) as out:
                _compile(folder, modules, out)
                os.rename(f"{out}/made", place)
    sys.path.insert(0, str(place))
    try:
        return importlib.import_module(modules[-1])
    finally:
        sys.path.remove(str(place))


def _digest(folder: Path, modules: Sequence[str]) -> str:
    """Of all that the compiled files follow from."""
    digest = hashlib.blake2b(repr((sys.version, Cython.__version__, np.__version__, FLAGS)).encode(), digest_size=16)
    shipped = (path for package in pagedkv.__path__ for path in Path(package).rglob("*.pxd"))
    ours = [folder / f"{name}{suffix}" for name in modules for suffix in (".pxd", ".pyx")]
    for path in [*sorted(shipped), *ours]:
        if path.exists():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(folder: Path, modules: Sequence[str], out: str) -> None:
    macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
    extensions = [
        Extension(
            name,
            [str(folder / f"{name}.pyx")],
            include_dirs=[np.get_include()],
            define_macros=macros,
            extra_compile_args=list(FLAGS),
        )
        for name in modules
    ]
    paths = [str(folder), *(str(Path(path).parent) for path in pagedkv.__path__)]
    made = cythonize(extensions, include_path=paths, build_dir=f"{out}/c", quiet=True)
    command = build_ext(Distribution({"ext_modules": made}))
    command.build_lib, command.build_temp, command.parallel = f"{out}/made", f"{out}/o", len(made)
    command.ensure_finalized()
    command.run()
