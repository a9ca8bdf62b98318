"""Compile ``decode_loop.pyx`` against the ``.pxd`` files in pagedkv, and run it.

Needs Cython and a C compiler.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np

import pagedkv
from pagedkv.core import BlockPool, Placement, RadixTree

SETUP = """
from Cython.Build import cythonize
from setuptools import Extension, setup

extension = Extension({name!r}, [{source!r}])
setup(name={name!r}, ext_modules=cythonize([extension], include_path=[{include!r}], build_dir="build", quiet=True))
"""


def build(source: Path, folder: Path) -> ModuleType:
    """The module compiled from `source` into `folder`."""
    if importlib.util.find_spec("Cython") is None or importlib.util.find_spec("setuptools") is None:
        raise SystemExit("this example compiles a module: pip install Cython setuptools")
    name = source.stem
    include = str(Path(pagedkv.__file__).parents[1])  # where `cimport pagedkv...` finds the .pxd files
    local = folder / source.name
    local.write_text(source.read_text())
    (folder / "setup.py").write_text(SETUP.format(name=name, source=source.name, include=include))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True)
    (built,) = folder.glob(f"{name}.*.so")
    spec = importlib.util.spec_from_file_location(name, built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runtime = build(Path(__file__).with_name("decode_loop.pyx"), Path(folder))

        pool = BlockPool(1000)
        left, code = runtime.allocate_rounds(pool, 100, 10_000)
        print(f"10,000 rounds of 100 blocks: {left} left in between, code {code}, {pool.num_free} free after")

        tree = RadixTree(4)
        placement = Placement(tree, [BlockPool(64)])
        tokens = np.arange(12, dtype=np.int32)
        owner, _ = placement.acquire(tokens)
        placement.insert(owner, tokens, placement.allocate(3))
        placement.release(owner)
        print("cached blocks of the prompt:", runtime.matched_blocks(placement, tokens))
        placement.check_integrity()


if __name__ == "__main__":
    main()
