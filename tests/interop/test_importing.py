"""Foreign arrays as views and as NumPy arrays.

Which protocol is asked, whose memory it is, and what is refused.
"""

from __future__ import annotations

import array as standard
import mmap

import numpy as np
import pytest

from pagedkv.errors import ExchangeRefused, InvalidArgument, LayoutMismatch, WrongType
from pagedkv.interop import RawArray, as_argument, as_array, as_view, exchanges, export
from tests.shown import shown

from .conftest import Dlpack, FakeCuda, collected, watched


def test_numpy_arrays_pass_as_they_are():
    array, _ = watched(4)
    assert as_array(array) is array
    assert as_array(array, writable=True) is array
    array.flags.writeable = False
    with pytest.raises(ExchangeRefused, match="read-only"):
        as_array(array, writable=True)


def test_dlpack_is_asked_for_its_newest_version_and_nothing_is_copied():
    array, alive = watched(3, 4)
    producer = Dlpack(array)
    taken = as_array(producer)
    assert producer.options == [{"max_version": (1, 1)}]
    assert (taken.ctypes.data, taken.strides, taken.tolist()) == (array.ctypes.data, array.strides, array.tolist())
    del array, producer
    assert not collected(alive)
    del taken
    assert collected(alive)


def test_a_producer_from_before_dlpack_1_is_asked_again_as_it_understands():
    array, _ = watched(4)
    old = Dlpack(array, old=True)
    assert as_array(old).ctypes.data == array.ctypes.data
    assert old.options == [{"stream": None}]


def test_what_may_be_written_is_what_the_producer_says_or_the_callers_word():
    array, _ = watched(4)
    assert not as_view(Dlpack(array)).read_only
    assert as_view(Dlpack(export(array))).read_only
    with pytest.raises(ExchangeRefused, match="to be written"):
        as_view(Dlpack(export(array)), writable=True)
    assert as_view(Dlpack(array, old=True)).read_only  # it does not say
    mine = as_array(Dlpack(array, old=True), writable=True)
    mine[0] = 9
    assert array[0] == 9


def test_dlpack_comes_before_the_array_interface():
    class Both(Dlpack):
        @property
        def __array_interface__(self):
            raise AssertionError("asked for the second best")

    array, _ = watched(4)
    assert as_array(Both(array)).ctypes.data == array.ctypes.data


def test_a_refusal_is_passed_on_with_its_reason():
    class Refusing(Dlpack):
        def __dlpack__(self, **_):
            raise BufferError("detach me first")

        __array_interface__ = {"version": 3}

    with pytest.raises(ExchangeRefused, match="Refusing does not hand its array over: detach me first"):
        as_view(Refusing(np.ones(3)))


def test_what_a_producer_raises_for_reasons_of_its_own_passes_through():
    class Broken(Dlpack):
        def __dlpack__(self, **_):
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        as_view(Broken(np.ones(3)))


def test_dlpack_without_a_device_is_refused():
    class Half:
        def __dlpack__(self, **_):
            raise AssertionError

    with pytest.raises(ExchangeRefused, match="__dlpack_device__"):
        as_view(Half())


def test_devices_that_are_not_reached_are_refused_before_anything_is_asked_for():
    class Metal(Dlpack):
        def __dlpack_device__(self):
            return (8, 0)

    with pytest.raises(ExchangeRefused, match="type 8"):
        as_view(producer := Metal(np.ones(3)))
    assert producer.options == []


def test_numpys_interface_and_buffers_are_read_in_place():
    array, alive = watched(4)

    class Interface:
        __array_interface__ = array.__array_interface__
        keeps = array

    assert as_array(Interface()).ctypes.data == array.ctypes.data
    numbers = standard.array("f", [1, 2, 3])
    taken = as_array(numbers, writable=True)
    taken[1] = 7
    assert numbers[1] == 7
    assert as_view(b"abc").read_only
    with mmap.mmap(-1, 4096) as memory:
        taken = as_array(memory, writable=True)
        taken[5] = 1
        assert memory[5] == 1
        del taken
    assert alive() is not None


@pytest.mark.parametrize("kind", [RawArray, lambda *items: items])
def test_raw_arrays_are_read_in_place(kind):
    array, _ = watched(4, 6)
    assert as_array(kind(array.ctypes.data, (4, 6), None, "float32")).tolist() == array.tolist()
    half = as_array(kind(array.ctypes.data, (4, 3), (24, 8), "float32", "cpu"), writable=True)
    half[0, 1] = -1
    assert array[0, 2] == -1
    assert as_view(kind(array.ctypes.data, (2,), (2,), "bfloat16", "pinned", None)).dtype == "bfloat16"


@pytest.mark.parametrize(
    "raw",
    [
        (64, (2,), None), (64, (2,), None, "float32", "cpu", None, 7), (64, (2,), None, "text"),
        (64, (2,), None, "float32", "moon"), (0, (2,), None, "float32"), (-64, (2,), None, "float32"),
        (65, (2,), None, "float32"), (64, (2,), (3,), "float32"), (64, (2, 2), (4,), "float32"),
        (64, (-2,), None, "float32"), (64, (2.5,), None, "float32"), (64, (2,), None, "float32", "cpu", 5),
        (64, (True,), None, "float32"),
    ],
    ids=str,
)  # fmt: skip
def test_raw_arrays_that_cannot_be_are_refused(raw):
    with pytest.raises((WrongType, InvalidArgument)):
        as_view(raw)


@pytest.mark.parametrize("what", [None, 5, 2.5, "text", [1.0, 2.0], {}, object(), (), ("a",), ([1.0],)], ids=shown)
def test_what_is_no_array_is_refused_by_name(what):
    assert not exchanges(what)
    with pytest.raises(WrongType, match=type(what).__name__):
        as_view(what)


def test_an_argument_without_a_protocol_is_left_to_who_checks_it():
    for what in (None, 5, [1.0], "text", array := np.ones(2)):
        assert as_argument("k", what) is what
    taken = as_argument("k", Dlpack(array))
    assert taken.ctypes.data == array.ctypes.data
    with pytest.raises(LayoutMismatch, match=r"out cannot be read as an array: .*read-only"):
        as_argument("out", export(array), writable=True)


def test_an_array_on_a_gpu_is_a_cupy_array_of_the_same_memory(cuda: FakeCuda):
    array, alive = watched(4, 6)
    raw = RawArray(array[::-1, ::2].ctypes.data, (4, 3), (-24, 8), "float32", "cuda:2")
    taken = as_array(raw)
    assert isinstance(taken, cuda.ndarray)
    assert (taken.data.ptr, taken.data.mem.device_id) == (raw.ptr, 2)
    assert taken.host().tolist() == array[::-1, ::2].tolist()
    assert as_array(taken) is taken
    assert alive() is not None


def test_a_copy_is_not_taken_for_the_array_where_it_is_to_be_written():
    class Copies(Dlpack):
        def __dlpack__(self, **options):
            return super().__dlpack__(**options, copy=True)

    producer = Copies(np.zeros(4))
    with pytest.raises(ExchangeRefused, match="copy"):
        as_array(producer, writable=True)
    assert as_array(producer).tolist() == [0, 0, 0, 0]
