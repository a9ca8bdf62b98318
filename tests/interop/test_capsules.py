"""DLPack capsules: their layout, read independently with ctypes, and their lifetime."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading

import numpy as np
import pytest

from pagedkv.errors import ExchangeRefused, WrongType
from pagedkv.interop import as_array, as_view, export
from pagedkv.interop._dlpack import take_capsule

from .conftest import DELETER, Legacy, Versioned, capsule_of, collected, consume, delete, open_capsule, watched

VERSIONS = [pytest.param(None, id="legacy"), pytest.param((1, 0), id="1.0"), pytest.param((1, 3), id="1.3")]


def test_a_versioned_capsule_is_laid_out_as_dlpack_says():
    array, _ = watched(3, 4)
    found = open_capsule(capsule := export(array[:, ::2]).__dlpack__(max_version=(1, 0)))
    tensor = found.tensor
    assert (found.major, found.minor, found.flags) == (1, 0, 1)  # flag 1: read-only
    assert (tensor.data, tensor.byte_offset, tensor.ndim) == (array.ctypes.data, 0, 2)
    assert (tensor.device_type, tensor.device_id) == (1, 0)
    assert (tensor.code, tensor.bits, tensor.lanes) == (2, 32, 1)
    assert (tensor.shape[:2], tensor.strides[:2]) == ([3, 2], [4, 2])
    del capsule


def test_a_legacy_capsule_is_laid_out_as_dlpack_said():
    array, _ = watched(2, 3, dtype=np.int16)
    capsule = export(array, read_only=False).__dlpack__()
    tensor = open_capsule(capsule).tensor
    assert (tensor.data, tensor.ndim, tensor.shape[:2], tensor.strides[:2]) == (array.ctypes.data, 2, [2, 3], [3, 1])
    assert (tensor.code, tensor.bits) == (0, 16)


@pytest.mark.parametrize(
    ("asked", "given"), [((1, 0), (1, 0)), ((1, 1), (1, 1)), ((1, 9), (1, 1)), ((2, 0), (1, 1)), ([1, 0], (1, 0))]
)
def test_the_capsule_is_of_the_newest_version_that_both_know(asked, given):
    found = open_capsule(capsule := export(watched(2)[0]).__dlpack__(max_version=asked))
    assert (found.major, found.minor) == given
    del capsule


@pytest.mark.parametrize(
    ("name", "bits", "code"),
    [
        ("bfloat16", 16, 4), ("float8_e3m4", 8, 7), ("float8_e4m3", 8, 8), ("float8_e4m3b11fnuz", 8, 9),
        ("float8_e4m3fn", 8, 10), ("float8_e4m3fnuz", 8, 11), ("float8_e5m2", 8, 12), ("float8_e5m2fnuz", 8, 13),
        ("float8_e8m0fnu", 8, 14), ("bool", 8, 6), ("complex64", 64, 5), ("uint16", 16, 1), ("float64", 64, 2),
    ],
)  # fmt: skip
def test_every_dtype_has_dlpacks_code_and_comes_back(name, bits, code):
    pattern = np.arange(8, dtype=f"uint{bits}").astype(bool) if name == "bool" else np.arange(8, dtype=f"uint{bits}")
    native = pattern if name.startswith(("bfloat", "float8", "bool", "uint")) else pattern.view(name)
    view = export(native, dtype=name)
    tensor = open_capsule(capsule := view.__dlpack__(max_version=(1, 1))).tensor
    assert (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)
    back = as_view(_Producer(capsule))
    assert (back.dtype, back.ptr) == (name, native.ctypes.data)
    assert back.numpy().tobytes() == native.tobytes()


class _Producer:
    """Hands out one capsule."""

    def __init__(self, capsule, device=(1, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return self.device


@pytest.mark.parametrize("version", VERSIONS)
def test_a_capsule_that_nobody_consumes_lets_go_of_the_memory(version):
    array, alive = watched(4)
    capsule = export(array, read_only=version is not None).__dlpack__(max_version=version)
    del array
    assert not collected(alive)
    del capsule
    assert collected(alive)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_consumer_outlives_producer_view_and_capsule(version):
    array, alive = watched(4)
    view = export(array, read_only=False)
    managed = consume(view.__dlpack__(max_version=version))
    del array, view
    assert not collected(alive)
    assert np.ctypeslib.as_array((ctypes.c_float * 4).from_address(managed.tensor.data)).tolist() == [0, 1, 2, 3]
    delete(managed)
    assert collected(alive)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_deleter_may_be_called_by_a_thread_that_python_does_not_know(version):
    array, alive = watched(4)
    managed = consume(export(array, read_only=False).__dlpack__(max_version=version))
    del array
    thread = threading.Thread(target=delete, args=(managed,))
    thread.start()
    thread.join()
    assert collected(alive)


def test_each_of_many_capsules_holds_the_memory_by_itself():
    array, alive = watched(4)
    view = export(array)
    managed = [consume(view.__dlpack__(max_version=(1, 0))) for _ in range(50)]
    unused = [view.__dlpack__(max_version=(1, 0)) for _ in range(50)]
    del array, view
    for one in managed:
        assert not collected(alive)
        delete(one)
    assert not collected(alive)
    unused.clear()
    assert collected(alive)


def test_handing_over_a_hundred_thousand_times_leaves_no_memory_behind():
    array, _ = watched(4)
    view = export(array, read_only=False)
    before = sys.getrefcount(view), sys.getrefcount(array)

    def rounds(n):
        for _ in range(n):
            view.__dlpack__(max_version=(1, 0))
            as_array(_Producer(view.__dlpack__()))
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    rounds(1000)
    pages = rounds(1000)
    grown = rounds(100_000) - pages
    assert (sys.getrefcount(view), sys.getrefcount(array)) == before
    assert grown * 4096 < 100_000 * 48, "more than one structure per round stayed"


def test_an_error_that_is_under_way_survives_the_end_of_a_capsule():
    array, alive = watched(4)

    def fails(array):
        capsule = export(array).__dlpack__(max_version=(1, 0))
        assert capsule is not None
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails(array)
    del array
    assert collected(alive)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_taken_calls_the_producers_deleter_once_and_not_before_its_last_array(version):
    calls = []
    data, axes = np.arange(6, dtype=np.float32), (ctypes.c_int64 * 2)(2, 3)

    @DELETER
    def deleter(_):
        calls.append(1)

    managed = Legacy() if version is None else Versioned(1, 0)
    managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
    tensor = managed.tensor
    tensor.data, tensor.byte_offset, tensor.ndim = data.ctypes.data - 8, 8, 2
    tensor.device_type, tensor.code, tensor.bits, tensor.lanes = 1, 2, 32, 1
    tensor.shape, tensor.strides = axes, None  # no strides: compact
    array = as_array(_Producer(capsule_of(managed)))
    part = array[1:]
    assert (array.ctypes.data, array.tolist()) == (data.ctypes.data, data.reshape(2, 3).tolist())
    assert array.flags.writeable == (version is not None)  # what came before 1.0 cannot say so
    del array
    gc.collect()
    assert not calls
    assert part.tolist() == [[3, 4, 5]]
    del part
    gc.collect()
    assert calls == [1]


def test_a_capsule_without_a_deleter_is_taken():
    data = np.arange(3, dtype=np.int64)
    managed = Legacy()
    tensor, axes = managed.tensor, (ctypes.c_int64 * 1)(3)
    tensor.data, tensor.ndim, tensor.shape = data.ctypes.data, 1, axes
    tensor.device_type, tensor.code, tensor.bits, tensor.lanes = 1, 0, 64, 1
    assert as_array(_Producer(capsule_of(managed))).tolist() == [0, 1, 2]


def test_a_capsule_can_be_consumed_once():
    capsule = export(watched(3)[0]).__dlpack__(max_version=(1, 0))
    first = take_capsule(capsule)
    with pytest.raises(WrongType, match="consumed before"):
        take_capsule(capsule)
    assert first.shape == (3,)


@pytest.mark.parametrize("what", [None, 5, "dltensor", object()])
def test_what_is_no_capsule_is_refused(what):
    with pytest.raises(WrongType):
        take_capsule(what)
    with pytest.raises(WrongType):
        as_view(_Producer(what))


def _foreign(**fields):
    """A versioned structure of one float; its deleter notes its call."""
    managed, axes, data, calls = Versioned(1, 0), (ctypes.c_int64 * 1)(1), np.ones(1, np.float32), []
    deleter = DELETER(lambda _: calls.append(1))
    managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
    tensor = managed.tensor
    tensor.data, tensor.ndim, tensor.shape, tensor.strides = data.ctypes.data, 1, axes, axes
    tensor.device_type, tensor.code, tensor.bits, tensor.lanes = 1, 2, 32, 1
    for name, value in fields.items():
        setattr(managed if name == "major" else tensor, name, value)
    return managed, calls, (axes, data, deleter)


@pytest.mark.parametrize(
    "fields",
    [
        {"major": 2}, {"major": 0}, {"lanes": 4}, {"bits": 4}, {"code": 99}, {"ndim": -1}, {"ndim": 1000},
        {"device_type": 8},
    ],
    ids=str,
)  # fmt: skip
def test_a_capsule_that_is_not_understood_is_refused_and_let_go_of(fields):
    managed, calls, kept = _foreign(**fields)
    with pytest.raises(ExchangeRefused):
        as_view(_Producer(capsule_of(managed)))
    gc.collect()
    assert calls == [1], kept


def test_arrays_and_capsules_that_are_alive_when_python_ends_do_no_harm():
    script = (
        "import sys, numpy as np; from pagedkv.interop import as_array, export\n"
        "view = export(np.ones(4))\n"
        "sys.kept = [np.from_dlpack(view), as_array(view), view.__dlpack__(max_version=(1, 0))]\n"
        "sys.kept.append(sys.kept); print('leaving')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "leaving\n", "")
