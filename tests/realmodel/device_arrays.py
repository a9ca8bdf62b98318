"""A stand-in for CuPy, stricter than CuPy.

Only these functions take its arrays, and never beside host arrays.

What real CuPy computes is for a GPU to show. What a host can show is that the model never mixes device and host arrays,
and uses nothing that CuPy does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

import pagedkv as pk
from examples.llama_numpy.model import Llama
from examples.llama_numpy.weights import Floats


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that lies elsewhere: it is no NumPy array, and does not become one by itself."""

    def __init__(self, held: NDArray[Any]) -> None:
        self.held = held

    shape = property(lambda self: self.held.shape)
    dtype = property(lambda self: self.held.dtype)
    T = property(lambda self: DeviceArray(self.held.T))

    def __len__(self) -> int:
        return len(self.held)

    def __array__(self, *_: object, **__: object) -> NDArray[Any]:
        raise TypeError("a device array does not become a host array by itself")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            raise TypeError(f"{ufunc.__name__}.{method} with {options}")
        return DeviceArray(ufunc(*(x if np.isscalar(x) else held(x) for x in inputs)))

    def __getitem__(self, key: Any) -> DeviceArray:
        return DeviceArray(self.held[_key(key)])

    def __setitem__(self, key: Any, value: DeviceArray) -> None:
        self.held[_key(key)] = held(value)

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.held.reshape(*shape))

    def astype(self, dtype: DTypeLike, *, copy: bool = True) -> DeviceArray:
        return DeviceArray(self.held.astype(dtype, copy=copy))


def held(array: Any) -> NDArray[Any]:
    """What a device array holds; anything else is a mistake of its caller."""
    if not isinstance(array, DeviceArray):
        raise TypeError(f"a device array is needed, not {type(array).__name__}")
    return array.held


def _key(key: Any) -> Any:
    """An index: numbers, slices and device arrays."""
    if isinstance(key, tuple):
        return tuple(map(_key, key))
    return key if key is None or key is ... or isinstance(key, int | slice) else held(key)


def _split(array: DeviceArray, edges: int | Sequence[int], axis: int) -> list[DeviceArray]:
    return list(map(DeviceArray, np.split(held(array), edges, axis=axis)))


def _mean(array: DeviceArray, *, axis: int, keepdims: bool) -> DeviceArray:
    return DeviceArray(np.mean(held(array), axis=axis, keepdims=keepdims))


STAND_IN = SimpleNamespace(
    asarray=lambda array: DeviceArray(np.array(array)),
    asnumpy=lambda array: held(array).copy(),
    ascontiguousarray=lambda array: DeviceArray(np.ascontiguousarray(held(array))),
    empty_like=lambda array: DeviceArray(np.empty_like(held(array))),
    exp=lambda array: DeviceArray(np.exp(held(array))),
    mean=_mean,
    split=_split,
    sqrt=lambda array: DeviceArray(np.sqrt(held(array))),
)
METHODS = ("T", "shape", "dtype", "reshape", "astype", "__len__", "__getitem__", "__setitem__")


class DeviceStep:
    """A step, used as on a GPU.

    K, V and queries are device arrays, and so are the results.
    """

    def __init__(self, step: pk.Step) -> None:
        self._step = step
        self.tokens, self.positions, self.q_indptr = step.tokens, step.positions, step.q_indptr

    def write(self, layer: int, k: DeviceArray, v: DeviceArray) -> None:
        self._step.write(layer, held(k), held(v))

    def attend(self, layer: int, q: DeviceArray) -> DeviceArray:
        return DeviceArray(self._step.attend(layer, held(q)))


class DeviceLlama(Llama):
    """A model whose weights and whose steps are made of device arrays."""

    def forward(self, step: Any, rows: ArrayLike | None = None) -> Floats:
        return super().forward(DeviceStep(step), rows)  # type: ignore[arg-type]
