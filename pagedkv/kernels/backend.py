"""Protocol of a kernel launcher.

CuPy on a GPU is one; the tests' PTX interpreter is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pagedkv.kernels.params import Params
from pagedkv.kernels.tensor_map import Swizzle
from pagedkv.kernels.variant import Variant

Dim3 = tuple[int, int, int]
Result = TypeVar("Result")


class Turns(Protocol):
    """The streams of one workspace, one after another."""

    def take(self, stream: Any, launch: Callable[..., Result], *arguments: Any) -> Result:
        """Return ``launch(*arguments)``; the stream waits for the earlier launches on others."""


class Backend(Protocol):
    """A device that runs kernels, and its arrays.

    Attributes
    ----------
    name : such as ``"cupy"``.
    capability : compute capability, (9, 0) for an H100.
    num_sms : streaming multiprocessors; sizes the constant grids.
    shared_limit : bytes of shared memory that one CTA may ask for.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_limit: int

    def __hash__(self) -> int:
        """By identity: launches are kept by the backend they are for."""

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
        """Start a kernel on a stream; returns before it has run. Compiles it on first use."""

    def prepare(self, variants: Iterable[Variant], threads: int = 1) -> None:
        """Compile and load, so that later launches only launch."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, *, stream: Any = None) -> Any:
        """An uninitialised device array for use on a stream.

        Another stream may still use its memory.
        """

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A device array of zeros, for use on any stream."""

    def asarray(self, array: Any) -> Any:
        """A device copy of a NumPy array; device arrays pass as they are."""

    def upload(self, target: Any, source: NDArray[Any], stream: Any = None) -> None:
        """Copy a NumPy array into a contiguous device array of its shape, ordered by the stream.

        The source may be changed once this returns; the host does not wait for the device.
        """

    def tensor_map(
        self, array: Any, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: Swizzle = 0
    ) -> NDArray[np.void]:
        """The tensor map by which a kernel fetches boxes of a strided array by TMA (sm_90+).

        As :func:`pagedkv.kernels.tensor_map.encode_tensor_map`; a field of a parameter struct takes it.
        """

    def in_turn(self) -> Turns | None:
        """Orders launches of one workspace across streams; None if each ends before the next."""

    def is_capturing(self, stream: Any = None) -> bool:
        """Whether a stream, or None for the current one, is being captured into a graph.

        The device cannot be waited for then. So it is of the null stream while any blocking stream is being captured.
        """

    def synchronize(self) -> None:
        """Wait for the device.

        For constructors, so that no stream still uses their new memory; never per launch.

        Raises
        ------
        InvalidArgument
            Any of its streams is being captured; that capture is broken now.
        """

    def to_host(self, array: Any) -> NDArray[Any]:
        """A NumPy copy of a device array, once all work before it is done."""


def is_backend(thing: Any) -> TypeGuard[Backend]:
    """Whether something launches kernels, as far as its looks tell."""
    return callable(getattr(thing, "launch", None))
