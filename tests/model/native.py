"""Compiles native modules of the tests, with the ``.pxd`` files that the package ships."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
from Cython.Build import cythonize
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

import pagedkv

HERE = Path(__file__).parent
MODULES = ("native_world", "native_moves", "native_owners", "native_rows", "native_driver")


@cache
def native_driver() -> ModuleType:
    """Module ``native_driver``, compiled into a temporary folder once per process."""
    return compiled(HERE, MODULES)


def compiled(folder: Path, modules: Sequence[str]) -> ModuleType:
    """Compile these modules of `folder`, import them, and return the last.

    They may cimport one another.
    """
    macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
    extensions = [
        Extension(
            name,
            [str(folder / f"{name}.pyx")],
            include_dirs=[np.get_include()],
            define_macros=macros,
            extra_compile_args=["-O1", "-g0"],
        )
        for name in modules
    ]
    paths = [str(folder), *(str(Path(path).parent) for path in pagedkv.__path__)]
    with tempfile.TemporaryDirectory(prefix="pagedkv-native-") as out:
        made = cythonize(extensions, include_path=paths, build_dir=f"{out}/c", quiet=True)
        command = build_ext(Distribution({"ext_modules": made}))
        command.build_lib, command.build_temp, command.parallel = out, f"{out}/o", len(made)
        command.ensure_finalized()
        command.run()
        sys.path.insert(0, out)
        try:
            return importlib.import_module(modules[-1])
        finally:
            sys.path.remove(out)
