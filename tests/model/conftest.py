"""The native driver is compiled when its first test asks for it, with the ``.pxd`` files that the package ships."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from Cython.Build import cythonize
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

import pagedkv

HERE = Path(__file__).parent
MODULES = ("native_world", "native_moves", "native_owners", "native_rows", "native_driver")


@pytest.fixture(scope="session")
def native_driver(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Module ``native_driver``, compiled into a temporary folder."""
    out = tmp_path_factory.mktemp("native")
    macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
    extensions = [
        Extension(
            name,
            [str(HERE / f"{name}.pyx")],
            include_dirs=[np.get_include()],
            define_macros=macros,
            extra_compile_args=["-O1", "-g0"],
        )
        for name in MODULES
    ]
    paths = [str(HERE), *(str(Path(path).parent) for path in pagedkv.__path__)]
    made = cythonize(extensions, include_path=paths, build_dir=str(out / "c"), quiet=True)
    command = build_ext(Distribution({"ext_modules": made}))
    command.build_lib, command.build_temp, command.parallel = str(out), str(out / "o"), len(made)
    command.ensure_finalized()
    command.run()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(out)
        return importlib.import_module("native_driver")
