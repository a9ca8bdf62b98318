"""A recipe's signature tells arrays of different forms apart; places of arrays are checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedkv.errors import WrongType
from pagedkv.kernels.arrays import check_place
from pagedkv.kernels.recipe import interned, place, signature


def on_gpu(device: int = 0, ptr: int = 512, **other: Any) -> Any:
    """An array as CuPy's, as far as wrappers look at it."""
    form = {"shape": (4, 8), "strides": (16, 2), "dtype": np.dtype(np.float16), "__cuda_array_interface__": {}}
    return SimpleNamespace(**{**form, **other}, data=SimpleNamespace(ptr=ptr, device_id=device))


@pytest.mark.parametrize("writeable", [True, False])
def test_an_array_on_the_host_has_the_signature_of_no_device(writeable: bool) -> None:
    here = np.zeros((4, 8), np.float16)
    here.flags.writeable = writeable
    ptr = 512 + (here.ctypes.data & 15)
    assert signature(here)[:4] == signature(on_gpu(ptr=ptr))[:4]  # type: ignore[index]
    assert all(signature(here) != signature(on_gpu(device, ptr=ptr)) for device in range(8))


@pytest.mark.parametrize(
    "other",
    [
        on_gpu(shape=(8, 4)), on_gpu(strides=(32, 2)), on_gpu(dtype=np.dtype(ml_dtypes.bfloat16)), on_gpu(ptr=520),
        on_gpu(device=1), None, [1, 2],
    ],
    ids=["shape", "strides", "dtype", "alignment", "device", "None", "list"],
)  # fmt: skip
def test_another_array_on_a_gpu_has_another_signature(other: Any) -> None:
    assert signature(on_gpu()) == signature(on_gpu(ptr=512 + 64))
    assert place(on_gpu()) != place(on_gpu(ptr=512 + 64))
    assert signature(other) != signature(on_gpu())
    assert place(other) != place(on_gpu())


def test_another_array_on_the_host_has_another_signature() -> None:
    whole = np.zeros(64, np.float32)
    one = whole[: 8 * 4].reshape(8, 4)
    read_only = one.view()
    read_only.flags.writeable = False
    others = [
        one.reshape(4, 8),
        whole[: 8 * 8].reshape(8, 8)[:, :4],
        one.view(np.int32),
        read_only,
        whole[1:33].reshape(8, 4),
    ]
    assert len({signature(array) for array in (one, *others)}) == 6
    assert signature(one) == signature(whole[4 : 4 + 32].reshape(8, 4))


def test_equal_forms_have_one_number_and_others_their_own() -> None:
    assert interned((1, (2, 3))) == interned((1, (2, 3))) != interned((1, (2, 4)))


def test_arrays_in_host_memory_or_on_another_gpu_are_refused() -> None:
    backend: Any = SimpleNamespace(name="cupy", device=0)
    check_place(backend, "q", on_gpu())
    with pytest.raises(WrongType, match="q lies on GPU 1, and the kernels run on GPU 0"):
        check_place(backend, "q", on_gpu(device=1))
    with pytest.raises(WrongType, match="q is in host memory"):
        check_place(backend, "q", np.zeros(3))
