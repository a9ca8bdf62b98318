"""A backend that launches nothing and records the variants a wrapper's call needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pagedkv.kernels.backend import Dim3
from pagedkv.kernels.params import Params
from pagedkv.kernels.tensor_map import TENSOR_MAP_BYTES, Swizzle
from pagedkv.kernels.variant import Variant
from pagedkv.kernels.warps import shared_limit


class Recorder:
    """Stands for a device of some compute capability; its arrays are NumPy's.

    Parameters
    ----------
    capability : such as (9, 0).

    Attributes
    ----------
    variants : the kernels launched or prepared, each once, in order.
    """

    name = "recorder"

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.num_sms = 2
        self.shared_limit = shared_limit(capability)
        self.variants: list[Variant] = []

    def launch(
        self,
        variant: Variant,
        grid: Dim3,
        block: Dim3,
        params: Params,
        *,
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        """Note the variant."""
        self.prepare([variant])

    def prepare(self, variants: Iterable[Variant], threads: int = 1) -> None:
        """Note the variants."""
        self.variants += [one for one in dict.fromkeys(variants) if one not in self.variants]

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, *, stream: Any = None) -> Any:
        """A NumPy array."""
        return np.zeros(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A NumPy array."""
        return np.zeros(shape, dtype)

    def asarray(self, array: Any) -> Any:
        """The array itself."""
        return array

    def upload(self, target: Any, source: NDArray[Any], stream: Any = None) -> None:
        """Copy at once."""
        target[...] = source

    def in_turn(self) -> None:
        """Nothing runs."""

    def is_capturing(self, stream: Any = None) -> bool:
        """There are no graphs."""
        return False

    def synchronize(self) -> None:
        """Nothing runs."""

    def to_host(self, array: Any) -> NDArray[Any]:
        """The array itself."""
        return np.asarray(array)

    def tensor_map(
        self, array: Any, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: Swizzle = 0
    ) -> NDArray[np.void]:
        """Zeros: nothing is going to read them."""
        return np.zeros(1, f"V{TENSOR_MAP_BYTES}")
