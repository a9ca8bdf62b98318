"""Views: what each protocol is told, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import ExchangeRefused, InvalidArgument, LayoutMismatch, PagedKVError, WrongType
from pagedkv.interop import View, as_view, empty, export

from .conftest import FakeCuda, collected, open_capsule, watched


def test_exports_are_read_only_unless_asked_otherwise():
    array, _ = watched(4)
    assert export(array).read_only
    assert not np.from_dlpack(export(array)).flags.writeable
    mine = np.from_dlpack(export(array, read_only=False))
    mine[0] = 9
    assert array[0] == 9


def test_a_read_only_array_is_not_exported_as_one_that_may_be_written():
    array, _ = watched(4)
    array.flags.writeable = False
    with pytest.raises(LayoutMismatch, match="read-only"):
        export(array, read_only=False)
    assert export(array).read_only


def test_a_consumer_from_before_dlpack_1_is_refused_what_is_read_only_and_told_what_to_do():
    view = export(watched(4)[0])
    for asked in (None, (0, 8)):
        with pytest.raises(BufferError, match="read-only") as refusal:
            view.__dlpack__(max_version=asked)
        assert isinstance(refusal.value, PagedKVError)
        assert "view.copy()" in str(refusal.value)
        assert "read_only=False" in str(refusal.value)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_copy_that_was_asked_for_is_compact_aligned_writable_and_says_so(version):
    array, _ = watched(6, 8)
    part = array[::2, 1::3]
    capsule = export(part).__dlpack__(max_version=version, copy=True)
    found = open_capsule(capsule)
    assert found.tensor.data % 64 == 0
    assert found.tensor.strides[:2] == [3, 1]
    assert getattr(found, "flags", 2) == 2  # copied; not read-only
    copied = np.from_dlpack(_Once(capsule))
    assert copied.tolist() == part.tolist()
    assert not np.shares_memory(copied, array)


class _Once:
    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


def test_copy_false_gives_the_memory_itself():
    array, _ = watched(4)
    assert np.from_dlpack(export(array), copy=False).ctypes.data == array.ctypes.data


@pytest.mark.parametrize("stream", [-1, 0, 1, 2, 12345])
def test_host_memory_has_no_stream(stream):
    with pytest.raises(ExchangeRefused, match="stream"):
        export(watched(4)[0]).__dlpack__(max_version=(1, 0), stream=stream)


@pytest.mark.parametrize("device", [(2, 0), (3, 0), (1, 1), (10, 0)])
def test_host_memory_is_not_moved(device):
    with pytest.raises(ExchangeRefused, match="copy it there"):
        export(watched(4)[0]).__dlpack__(max_version=(1, 0), dl_device=device)


def test_pinned_memory_is_cpu_memory_but_for_those_who_ask_for_pinned_memory():
    view = export(watched(4)[0], device="pinned")
    assert view.__dlpack_device__() == (1, 0)
    for asked, told in ((None, 1), ((1, 0), 1), ((3, 0), 3)):
        capsule = view.__dlpack__(max_version=(1, 0), dl_device=asked)
        assert open_capsule(capsule).tensor.device_type == told
    assert np.from_dlpack(view).tolist() == [0, 1, 2, 3]
    with pytest.raises(WrongType, match="pinned"):
        export(watched(4)[0], device="cuda:0")


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_arrays_without_elements_and_without_axes_go_through(shape):
    array = np.zeros(shape, np.float32)
    view = export(array)
    found = open_capsule(capsule := view.__dlpack__(max_version=(1, 0))).tensor
    assert found.data == (array.ctypes.data if array.size else None)  # DLPack: NULL where there is nothing
    del capsule
    for back in (np.from_dlpack(view), view.numpy(), np.asarray(view)):
        assert (back.shape, back.dtype) == (shape, array.dtype)


def test_bits_are_exported_as_what_they_are():
    bits = np.array([0x3F80, 0x4000], np.uint16)
    view = export(bits, dtype="bfloat16")
    assert (view.dtype, view.ptr) == ("bfloat16", bits.ctypes.data)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert view.numpy().dtype == ml_dtypes.bfloat16
    assert view.numpy().tolist() == [1, 2]
    assert export(np.ones(2, ml_dtypes.float8_e5m2)).dtype == "float8_e5m2"


def test_without_ml_dtypes_bfloat16_is_its_bits(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    bits = np.array([0x3F80, 0x4000], np.uint16)
    assert export(bits, dtype="bfloat16").numpy().dtype == np.uint16
    assert empty((3,), "float8_e4m3fn").numpy().dtype == np.uint8


@pytest.mark.parametrize(
    ("dtype", "claimed"), [("float32", "bfloat16"), ("uint16", "float16"), ("uint8", "bfloat16"), ("uint16", "text")]
)
def test_what_are_not_the_bits_of_a_dtype_are_refused(dtype, claimed):
    with pytest.raises(WrongType):
        export(np.zeros(4, dtype), dtype=claimed)


@pytest.mark.parametrize(
    "array",
    [np.array([None]), np.array(["a"]), np.zeros(2, ">f4"), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "i4")])],
    ids=lambda array: str(array.dtype),
)
def test_elements_that_nobody_else_knows_are_refused(array):
    with pytest.raises(WrongType, match="cannot be exchanged"):
        export(array)


@pytest.mark.parametrize("what", [None, 5, "text", [1.0], {}, object()])
def test_what_is_no_array_is_refused_and_told_what_would_be(what):
    with pytest.raises(WrongType, match="__dlpack__"):
        export(what)


def test_numpys_own_interface_is_offered_for_its_dtypes_and_for_host_memory():
    array, alive = watched(4, 6)
    view = export(array[:, ::2], read_only=False)
    told = view.__array_interface__
    assert told == {
        "shape": (4, 3), "typestr": "<f4", "data": (array.ctypes.data, False), "strides": (24, 8), "version": 3,
    }  # fmt: skip
    through = np.asarray(view)
    assert through.ctypes.data == array.ctypes.data
    through[0, 0] = 5
    assert array[0, 0] == 5
    del array, view
    assert not collected(alive)
    del through
    assert collected(alive)


def test_an_interface_that_cannot_be_had_is_not_there_and_says_why():
    view = empty((4,), "bfloat16")
    assert not hasattr(view, "__array_interface__")
    assert not hasattr(view, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="use DLPack"):
        _ = view.__array_interface__
    with pytest.raises(ExchangeRefused, match="host memory"):
        _ = view.__cuda_array_interface__
    assert np.asarray(view).shape == (4,)  # an array, not an object that holds a view


def test_np_asarray_converts_and_copies_only_as_told():
    view = export(watched(3)[0])
    assert np.asarray(view, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        np.array(view, np.float64, copy=False)
    assert np.array(view, copy=True).ctypes.data != view.ptr


def test_an_array_on_a_gpu_has_the_cuda_array_interface_and_names_its_stream(cuda: FakeCuda):
    array, _ = watched(4, 6)
    view = View(array.ctypes.data, (4, 3), (24, 8), "float32", "cuda:1", owner=array)
    told = view.__cuda_array_interface__
    assert told == {
        "shape": (4, 3), "typestr": "<f4", "data": (array.ctypes.data, True), "strides": (24, 8), "version": 3,
        "stream": 77,
    }  # fmt: skip
    compact = View(array.ctypes.data, (4, 6), (24, 4), "float32", "cuda:1", stream=0, owner=array)
    assert compact.__cuda_array_interface__["strides"] is None
    assert compact.__cuda_array_interface__["stream"] == 1  # 0 would be ambiguous: 1 is the default stream
    assert not hasattr(view, "__array_interface__")
    assert not hasattr(View(64, (4,), (2,), "bfloat16", "cuda:1"), "__cuda_array_interface__")
    with pytest.raises(ExchangeRefused, match="host memory"):
        view.numpy()
    with pytest.raises(ExchangeRefused, match="host memory"):
        np.asarray(view)


def test_raw_numbers_are_all_there_is_to_an_array(cuda: FakeCuda):
    array, _ = watched(4, 6)
    assert export(array[::2]).raw() == (array.ctypes.data, (2, 6), (48, 4), "float32", "cpu", None)
    assert View(64, (2,), (4,), "float32", "cuda:1").raw() == (64, (2,), (4,), "float32", "cuda:1", 77)
    assert as_view(export(array[::2]).raw()).numpy().tolist() == array[::2].tolist()


def test_empty_arrays_are_aligned_as_asked():
    for alignment in (64, 256, 4096):
        view = empty((3, 5), "float16", alignment=alignment)
        assert view.ptr % alignment == 0
        assert view.is_compact
        assert not view.read_only
    for wrong in (0, 3, 48, 1):
        with pytest.raises(InvalidArgument, match="power of two"):
            empty((3,), "float16", alignment=wrong)


def test_strides_that_are_no_whole_elements_are_refused_by_dlpack_alone():
    packed = np.zeros(4, [("a", "<f4"), ("b", "u1")])["a"]
    view = export(packed)
    with pytest.raises(ExchangeRefused, match="multiples"):
        view.__dlpack__(max_version=(1, 0))
    assert np.asarray(view).strides == (5,)
