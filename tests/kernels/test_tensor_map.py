"""Tensor maps, with a stand-in for the driver.

What the driver is asked, and what is refused before it is asked.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedkv.attention import PagedAttention
from pagedkv.errors import InvalidArgument, KernelsUnavailable, WrongType
from pagedkv.kernels import driver, tensor_map
from pagedkv.kernels.tensor_map import encode_tensor_map, l2_bytes
from tests.attention.noting import Noting, aligned

ADDRESS = 0x7F0000001000
U32, U64, INT, POINTER = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
# As cuda.h declares it, so a call with other types or another count of arguments cannot succeed.
ENCODE = ctypes.CFUNCTYPE(
    INT, POINTER, INT, U32, POINTER, *(ctypes.POINTER(kind) for kind in (U64, U64, U32, U32)), INT, INT, INT, INT
)


class FakeDriver:
    """cuTensorMapEncodeTiled: writes 0..127 into the map, notes its arguments."""

    def __init__(self) -> None:
        self.status, self.calls = 0, []
        self.cuTensorMapEncodeTiled = ENCODE(self._encode)

    def cuGetErrorName(self, status: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_OF_THIS_TEST"
        return 0

    def _encode(self, where: int, kind: int, rank: int, start: int, *rest: Any) -> int:
        dims, strides, box, steps, *numbers = rest
        lists = (dims[:rank], strides[: rank - 1], box[:rank], steps[:rank])
        self.calls.append((where % 64, kind, rank, start, *lists, *numbers))
        ctypes.memmove(where, bytes(range(128)), 128)
        return self.status


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(tensor_map, "load_driver", lambda: made)
    monkeypatch.setattr(driver, "load_driver", lambda: made)
    return made


def on_device(dtype: Any, pointer: int = ADDRESS) -> Any:
    return SimpleNamespace(dtype=np.dtype(dtype), data=SimpleNamespace(ptr=pointer))


def test_a_cache_of_blocks_is_described_as_the_hardware_wants_it(fake: FakeDriver) -> None:
    dims, strides, box = (128, 8, 16, 1000), (256, 2048, 65536), (64, 1, 16, 1)
    made = encode_tensor_map(on_device(ml_dtypes.bfloat16), dims, strides, box, 128)
    assert (made.dtype, made.shape, made.tobytes()) == (np.dtype("V128"), (1,), bytes(range(128)))
    kind, swizzle, promotion = 9, 3, 3  # BFLOAT16, 128B, L2_256B
    steps = [1, 1, 1, 1]
    expected = (0, kind, 4, ADDRESS, list(dims), list(strides), list(box), steps, 0, swizzle, promotion, 0)
    assert fake.calls == [expected]


@pytest.mark.parametrize(
    ("start", "itemsize", "dims", "strides", "box", "expected"),
    [
        (ADDRESS, 2, (128, 8, 16, 9), (256, 2048, 65536), (64, 1, 16, 1), 256),  # NHD: a row of 256 bytes
        (ADDRESS, 1, (128, 8, 16, 9), (128, 1024, 32768), (128, 1, 16, 1), 128),  # behind it the next head's
        (ADDRESS, 2, (64, 8, 16, 9), (128, 1024, 32768), (64, 1, 16, 1), 128),
        (ADDRESS, 1, (128, 8, 16, 9), (2048, 128, 32768), (128, 1, 16, 1), 256),  # HND: a block of the head's rows
        (ADDRESS, 1, (128, 1, 16, 9), (128, 128, 4096), (128, 1, 16, 1), 256),  # one head: the same in NHD
        (ADDRESS, 2, (96, 8, 16, 9), (192, 1536, 32768), (64, 1, 16, 1), 64),
        (ADDRESS + 128, 2, (128, 8, 16, 9), (256, 2048, 65536), (64, 1, 16, 1), 128),  # runs straddle 256 bytes
        (ADDRESS + 16, 2, (128, 8, 16, 9), (256, 2048, 65536), (64, 1, 16, 1), 16),
    ],
)
def test_l2_fetches_no_more_than_a_contiguous_run_at_a_time(
    fake: FakeDriver,
    start: int,
    itemsize: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    expected: int,
) -> None:
    assert l2_bytes(start, itemsize, dims, strides, box) == expected
    encode_tensor_map(on_device({1: np.uint8, 2: np.float16}[itemsize], start), dims, strides, box, 128)
    assert fake.calls[0][10] == {256: 3, 128: 2, 64: 1}.get(expected, 0)  # CUtensorMapL2promotion


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (np.float16, 6),
        (np.float32, 7),
        (ml_dtypes.bfloat16, 9),
        (ml_dtypes.float8_e4m3fn, 0),
        (np.int8, 0),
        (np.uint16, 1),
    ],
)
def test_dtypes_are_numbered_as_in_cuda_h(fake: FakeDriver, dtype: Any, number: int) -> None:
    encode_tensor_map(on_device(dtype), (64, 4), (256,), (16, 1))
    assert fake.calls[0][1] == number


@pytest.mark.parametrize(("swizzle", "number"), [(0, 0), (32, 1), (64, 2), (128, 3)])
def test_swizzles_are_numbered_as_in_cuda_h(fake: FakeDriver, swizzle: Any, number: int) -> None:
    encode_tensor_map(on_device(np.float16), (64, 4), (128,), (16, 1), swizzle)
    assert fake.calls[0][9] == number


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"array": on_device(np.float16, ADDRESS + 8)}, "no multiple of 16"),
        ({"strides": (24,)}, "a stride is a multiple of 16"),
        ({"strides": (2**40,)}, "below 2\\^40"),
        ({"strides": ()}, "one stride less"),
        ({"dims": (0, 4)}, "a dim is 1"),
        ({"dims": (1,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "1 to 5 dims"),
        ({"box": (512, 1)}, "a side of the box is 1 to 256"),
        ({"box": (4, 1)}, "a multiple of 16 bytes"),
        ({"box": (128, 1), "swizzle": 128}, "at most the swizzle's width"),
        ({"swizzle": 16}, "the swizzle is"),
    ],
)
def test_what_the_hardware_cannot_describe_is_refused_with_the_reason(
    fake: FakeDriver, changes: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"array": on_device(np.float16), "dims": (64, 4), "strides": (128,), "box": (8, 1)}
    with pytest.raises(InvalidArgument, match=message):
        encode_tensor_map(**{**given, **changes})
    assert not fake.calls


def test_another_dtype_is_refused(fake: FakeDriver) -> None:
    with pytest.raises(WrongType, match="complex64"):
        encode_tensor_map(on_device(np.complex64), (64, 4), (128,), (8, 1))


def test_what_the_driver_refuses_is_an_error_with_its_name_for_it(fake: FakeDriver) -> None:
    fake.status = 1
    with pytest.raises(InvalidArgument, match=r"dims \(64, 4\).*CUDA_ERROR_OF_THIS_TEST"):
        encode_tensor_map(on_device(np.float16), (64, 4), (128,), (8, 1))


class OfAnOldDriver(Noting):
    """Launches are noted; tensor maps are asked of the driver, as by CuPy's backend."""

    tensor_map = staticmethod(encode_tensor_map)


@pytest.mark.parametrize("kernel", ["decode_tma", "prefill_wgmma"])
def test_a_kernel_with_tma_is_refused_by_a_driver_older_than_tensor_maps(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    old = SimpleNamespace(cuDriverGetVersion=lambda version: setattr(version._obj, "value", 11080))
    monkeypatch.setattr(tensor_map, "load_driver", lambda: old)
    monkeypatch.setattr(driver, "load_driver", lambda: old)
    assert not driver.has_tensor_maps()
    backend = OfAnOldDriver()
    attention = PagedAttention(
        num_qo_heads=4, num_kv_heads=1, head_dim=64, max_sequences=1, kernel=kernel, device=backend
    )
    attention.plan(aligned((1, 1), np.int32), aligned((1,), np.int32))
    backend.launches.clear()
    pools = [aligned((1, 16, 1, 64), np.float16) for _ in "kv"]
    with pytest.raises(KernelsUnavailable, match=r"is for CUDA 11\.8, and kernels with TMA need one for CUDA 12\.0"):
        attention.run(aligned((1, 4, 64), np.float16), *pools)
    assert not backend.launches


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libnot-there.so.1")
    driver.load_driver.cache_clear()
    try:
        with pytest.raises(KernelsUnavailable, match="no NVIDIA driver here"):
            encode_tensor_map(on_device(np.float16), (64, 4), (128,), (8, 1))
        assert driver.driver_version() is None
    finally:
        driver.load_driver.cache_clear()
