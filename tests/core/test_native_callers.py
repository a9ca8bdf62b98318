"""The core without Python.

Another Cython module cimports it, and Numba and ctypes call it by address.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import pagedkv
from pagedkv.core import FUNCTIONS, BlockPool
from tests.core.helpers import cache, nothing_changes, remember, single, sound, tiered

E_RANGE, E_UNDERFLOW, E_OVERFLOW, E_BLOCKS = -3, -4, -5, -7

MODULE = """
# cython: language_level=3
from libc.stdint cimport int32_t
from pagedkv._core.block_pool cimport BlockPool, pool_alloc, pool_available, pool_free, pool_incref
from pagedkv._core.owners cimport place_acquire, place_blocks, place_release, place_share
from pagedkv._core.placement cimport Placement
from pagedkv._core.radix_tree cimport RadixTree, node_top, tree_child

def alloc(BlockPool pool, int32_t n):
    cdef int32_t ids[64]
    cdef int code
    with nogil:
        code = pool_alloc(&pool.pool, n, ids)
    return code, [ids[i] for i in range(n if code == 0 else 0)]

def free(BlockPool pool, list blocks):
    cdef int32_t ids[64]
    cdef int32_t i, bad = -1, n = len(blocks)
    cdef int code
    for i in range(n):
        ids[i] = blocks[i]
    with nogil:
        code = pool_free(&pool.pool, ids, n, &bad)
    return code, bad

def available(BlockPool pool):
    return pool_available(&pool.pool)

def path(Placement placement, const int32_t[::1] tokens):
    cdef int32_t ids[64]
    cdef int32_t owner, other, n, top
    with nogil:
        owner = place_acquire(&placement.place, 0, &tokens[0], tokens.shape[0], -1)
        other = place_share(&placement.place, owner)
        place_release(&placement.place, owner)
        n = placement.place.owners[other].num_blocks
        top = node_top(placement.place.tree, placement.place.owners[other].node) if n else -1
        place_blocks(&placement.place, other, ids)
        place_release(&placement.place, other)
    return [ids[i] for i in range(n)], top

def has_child(RadixTree tree, const int32_t[::1] block):
    cdef int32_t child
    with nogil:
        child = tree_child(&tree.tree, 0, &block[0])
    return child >= 0
"""

SETUP = """
from Cython.Build import cythonize
from setuptools import Extension, setup
extension = Extension("runtime", ["runtime.pyx"], extra_compile_args=["-O0"])
setup(name="runtime", ext_modules=cythonize([extension], include_path=[{include!r}], quiet=True))
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A foreign Cython module, compiled against the ``.pxd`` files of the installed package."""
    pytest.importorskip("Cython")
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.pyx").write_text(MODULE)
    (folder / "setup.py").write_text(SETUP.format(include=str(Path(pagedkv.__file__).parents[1])))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    (built,) = folder.glob("runtime.*.so")
    spec = importlib.util.spec_from_file_location("runtime", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cython_allocates_and_frees_without_the_gil(runtime: ModuleType) -> None:
    pool = BlockPool(2, max_blocks=10, chunk=4)
    code, ids = runtime.alloc(pool, 5)
    assert code == 0
    assert pool.refs(ids).tolist() == [1] * 5
    assert (pool.capacity, runtime.available(pool)) == (6, 5)
    with nothing_changes(pool):
        assert runtime.alloc(pool, 6) == (E_BLOCKS, [])
        assert runtime.free(pool, [ids[0], ids[0]]) == (E_UNDERFLOW, 1)
        assert runtime.free(pool, [ids[0], ids[1], 99]) == (E_RANGE, 2)
    assert runtime.free(pool, ids) == (0, -1)
    assert pool.num_free == 6
    pool.check_integrity()


def test_cython_owns_and_releases_prefixes_without_the_gil(runtime: ModuleType) -> None:
    tree, pool, placement = single(2, 16)
    cache(placement, [1, 1, 2, 2, 3, 3])
    tokens = np.array([1, 1, 2, 2, 9, 9], np.int32)
    assert runtime.path(placement, tokens) == (placement.match(tokens)[1].tolist(), 0)
    assert runtime.path(placement, tokens[::-1].copy()) == ([], -1)
    assert runtime.has_child(tree, tokens[:2])
    assert not runtime.has_child(tree, tokens[2:4])
    assert pool.counts()["live"] == 0
    sound(placement)


def test_cython_sees_the_tier_a_prefix_lies_in(runtime: ModuleType) -> None:
    _, pools, placement = tiered(1, (4, 8))
    ids = pools[1].alloc(2)
    placement.restore([1, 2], ids, tier=1)
    assert runtime.path(placement, np.array([1, 2, 3], np.int32)) == (ids.tolist(), 1)
    sound(placement)


def test_every_function_has_an_address_and_a_signature() -> None:
    assert {"pool_alloc", "pool_free", "pool_incref"} <= FUNCTIONS.keys()
    for address, signature in FUNCTIONS.values():
        assert address > 0
        assert signature.startswith("int32 (intp pool")


def test_ctypes_calls_the_core_by_address() -> None:
    pool = BlockPool(8)
    as_int = [ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_int32, ctypes.c_ssize_t]
    to_alloc = [ctypes.c_ssize_t, ctypes.c_int32, ctypes.c_ssize_t]
    alloc = ctypes.CFUNCTYPE(ctypes.c_int32, *to_alloc)(FUNCTIONS["pool_alloc"][0])
    incref = ctypes.CFUNCTYPE(ctypes.c_int32, *as_int)(FUNCTIONS["pool_incref"][0])
    free = ctypes.CFUNCTYPE(ctypes.c_int32, *as_int)(FUNCTIONS["pool_free"][0])
    ids, bad = np.zeros(8, np.int32), np.full(1, -1, np.int32)
    assert alloc(pool.address, 3, ids.ctypes.data) == 0
    assert incref(pool.address, ids.ctypes.data, 3, bad.ctypes.data) == 0
    assert pool.refs(ids[:3]).tolist() == [2, 2, 2]
    with nothing_changes(pool):
        assert alloc(pool.address, 6, ids.ctypes.data) == E_BLOCKS
        ids[2] = 7
        assert incref(pool.address, ids.ctypes.data, 3, bad.ctypes.data) == E_RANGE
        assert bad[0] == 2
    assert free(pool.address, ids.ctypes.data, 2, bad.ctypes.data) == 0


def test_numba_calls_the_core_by_address() -> None:
    numba = pytest.importorskip("numba")
    as_int = [ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_int32, ctypes.c_ssize_t]
    pool_alloc = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_ssize_t, ctypes.c_int32, ctypes.c_ssize_t)(
        FUNCTIONS["pool_alloc"][0]
    )
    pool_free = ctypes.CFUNCTYPE(ctypes.c_int32, *as_int)(FUNCTIONS["pool_free"][0])

    @numba.njit(nogil=True)
    def churn(pool: int, ids: np.ndarray, bad: np.ndarray, rounds: int) -> tuple[int, int]:
        refused = 0
        for i in range(rounds):
            n = i % 12
            if pool_alloc(pool, n, ids.ctypes.data) != 0:
                refused += 1
                continue
            if pool_free(pool, ids.ctypes.data, n, bad.ctypes.data) != 0:
                return -1, i
        pool_alloc(pool, 2, ids.ctypes.data)
        ids[2] = ids[0]
        return refused, pool_free(pool, ids.ctypes.data, 3, bad.ctypes.data)

    pool = BlockPool(8)
    ids, bad = np.zeros(16, np.int32), np.full(1, -1, np.int32)
    assert churn(pool.address, ids, bad, 1200) == (300, E_UNDERFLOW)
    assert bad[0] == 2
    assert pool.counts()["live"] == 2
    pool.free(ids[:2])
    pool.check_integrity()


def test_blocks_that_the_tree_holds_are_out_of_bounds_for_native_callers_too(runtime: ModuleType) -> None:
    _, pool, placement = single()
    owner = remember(placement, [1])
    with nothing_changes(placement):
        assert runtime.free(pool, placement.blocks_of(owner).tolist()) == (E_UNDERFLOW, 0)


@pytest.mark.slow
@pytest.mark.checkout
def test_the_example_of_a_cython_runtime_runs(tmp_path: Path) -> None:
    pytest.importorskip("Cython")
    script = Path(__file__).parents[2] / "examples" / "cython_runtime" / "run.py"
    command = [sys.executable, "-W", "error", str(script)]
    env = {**os.environ, "PYTHONPATH": str(Path(pagedkv.__file__).parents[1])}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert "[0, 1, 2]" in ran.stdout
