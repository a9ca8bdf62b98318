from typing import Any, final

import numpy as np
from numpy.typing import NDArray

READ_ONLY: int
IS_COPIED: int
MAX_NDIM: int

def make_capsule(
    owner: Any,
    ptr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: tuple[int, int],
    device: tuple[int, int],
    flags: int = 0,
    version: tuple[int, int] | None = None,
) -> Any: ...

@final
class Taken:
    @property
    def ptr(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...] | None: ...
    @property
    def dtype(self) -> tuple[int, int, int]: ...
    @property
    def device(self) -> tuple[int, int]: ...
    @property
    def flags(self) -> int: ...
    @property
    def version(self) -> tuple[int, int] | None: ...

def take_capsule(capsule: Any) -> Taken: ...
def address_of(array: NDArray[Any]) -> int: ...
def ndarray_at(
    ptr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    read_only: bool,
    owner: Any,
) -> NDArray[Any]: ...
