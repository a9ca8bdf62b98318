"""Compiles the policy against the ``.pxd`` files of the installed pagedkv."""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

import pagedkv

setup(
    ext_modules=cythonize(
        [Extension("policy_lfu", ["policy_lfu.pyx"])],
        include_path=[str(Path(pagedkv.__file__).parents[1])],
        build_dir="build",
        quiet=True,
    )
)
