"""Which stream waits for which on a GPU.

A stand-in for CuPy notes events and waits in order.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.errors import ExchangeRefused, InvalidArgument
from pagedkv.interop import RawArray, View, as_array, as_view, export
from pagedkv.interop.devices import stream_pointer

from .conftest import Dlpack, FakeCuda, open_capsule

PLACE = np.arange(8, dtype=np.float32)


def on_gpu(**fields) -> View:
    """A view that says it lies on a GPU."""
    return View(PLACE.ctypes.data, (8,), (4,), "float32", "cuda:1", owner=PLACE, **fields)


@pytest.mark.parametrize(
    ("asked", "waiting"), [(None, 1), (1, 1), (2, 2), (4096, 4096)], ids=["none", "default", "per thread", "pointer"]
)
def test_the_consumers_stream_waits_for_the_exporters(cuda: FakeCuda, asked, waiting):
    capsule = on_gpu().__dlpack__(stream=asked, max_version=(1, 0))
    assert cuda.log == [("device", 1), ("record", 77), ("wait", waiting)]
    tensor = open_capsule(capsule).tensor
    assert (tensor.device_type, tensor.device_id, tensor.data) == (2, 1, PLACE.ctypes.data)


def test_minus_one_and_ones_own_stream_wait_for_nothing(cuda: FakeCuda):
    on_gpu().__dlpack__(stream=-1, max_version=(1, 0))
    on_gpu(stream=4096).__dlpack__(stream=4096, max_version=(1, 0))
    on_gpu(stream=0).__dlpack__(stream=None, max_version=(1, 0))  # both are the default stream
    assert cuda.log == []


@pytest.mark.parametrize("stream", [0, -2, True, "1", 1.5])
def test_streams_that_the_standard_does_not_know_are_refused(cuda: FakeCuda, stream):
    with pytest.raises(ExchangeRefused, match="stream"):
        on_gpu().__dlpack__(stream=stream, max_version=(1, 0))
    assert cuda.log == []


def test_the_stream_an_array_is_ready_on_can_be_said(cuda: FakeCuda):
    export(on_gpu(), stream=SimpleNamespace(ptr=555)).__dlpack__(stream=2, max_version=(1, 0))
    assert cuda.log == [("device", 1), ("record", 555), ("wait", 2)]


def test_streams_come_as_pointers_objects_and_the_cuda_protocol(cuda: FakeCuda):
    class Protocol:
        def __cuda_stream__(self):
            return (0, 99)

    found = [stream_pointer(stream) for stream in (None, 0, 1, 7, SimpleNamespace(ptr=0), SimpleNamespace(ptr=8))]
    assert found == [77, 1, 1, 7, 1, 8]
    assert stream_pointer(Protocol()) == 99
    for wrong in (-1, True, "1", 2.5, object()):
        with pytest.raises(InvalidArgument, match="stream"):
            stream_pointer(wrong)


def test_an_importer_says_on_which_stream_it_will_read(cuda: FakeCuda):
    producer = Dlpack(on_gpu())
    as_array(producer)
    as_array(producer, stream=4096)
    assert producer.options == [{"stream": 77, "max_version": (1, 1)}, {"stream": 4096, "max_version": (1, 1)}]
    assert cuda.log == [("device", 1), ("record", 77), ("wait", 4096)]


class Interface:
    def __init__(self, **fields):
        self.__cuda_array_interface__ = {
            "shape": (8,), "typestr": "<f4", "data": (PLACE.ctypes.data, True), "version": 3, **fields,
        }  # fmt: skip


def test_the_cuda_array_interface_is_waited_for_and_read_in_place(cuda: FakeCuda):
    view = as_view(Interface(stream=4096))
    assert cuda.log == [("device", 3), ("record", 4096), ("wait", 77)]
    assert (view.ptr, view.strides, view.device, view.read_only) == (PLACE.ctypes.data, (4,), "cuda:3", True)
    cuda.log.clear()
    for unsynchronised in ({}, {"stream": None}, {"version": 2}):
        as_view(Interface(**unsynchronised))
    assert cuda.log == []


@pytest.mark.parametrize(
    "fields", [{"version": 1}, {"mask": 1}, {"data": None}, {"shape": 5}, {"version": None}], ids=str
)
def test_interfaces_that_are_not_understood_are_refused(cuda: FakeCuda, fields):
    with pytest.raises(ExchangeRefused):
        as_view(Interface(**fields))


def test_a_raw_array_says_what_it_is_to_wait_for(cuda: FakeCuda):
    as_view(RawArray(PLACE.ctypes.data, (8,), None, "float32", "cuda:1", 4096), stream=555)
    assert cuda.log == [("device", 1), ("record", 4096), ("wait", 555)]


def test_a_copy_on_a_gpu_is_made_on_the_arrays_stream(cuda: FakeCuda):
    strided = View(PLACE.ctypes.data, (4,), (8,), "float32", "cuda:1", stream=555, owner=PLACE)
    copied = strided.copy()
    assert cuda.log == [("device", 1), ("on", 555)]
    assert (copied.shape, copied.strides, copied.read_only, copied.device) == ((4,), (4,), False, "cuda:1")
    assert as_array(copied).host().tolist() == [0, 2, 4, 6]
