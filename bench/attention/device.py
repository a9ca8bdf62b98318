"""What the bench asks of a device: arrays, graphs of calls, and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import DTypeLike, NDArray

from pagedkv.kernels.backend import Backend

Call = Callable[[], None]


class Recording(Protocol):
    """Several calls, recorded to be launched as one."""

    def launch(self) -> None:
        """Start all of them on the device's stream."""


class Device(Protocol):
    """A device that runs the bench.

    Attributes
    ----------
    kind : ``"cuda"`` or ``"ptxsim"``.
    unit : of what :meth:`time` returns: ``"s"``, or ``"steps"`` where there is no device to take time.
    stream : where everything runs; it is also CuPy's current stream.
    l2_bytes : of the last cache before memory.
    """

    kind: str
    unit: str
    stream: Any
    l2_bytes: int

    @property
    def backend(self) -> Backend:
        """Launches this library's kernels."""

    def describe(self) -> dict[str, Any]:
        """Name, driver, compilers: the fields that results carry."""

    def free_bytes(self) -> int:
        """Memory that is left."""

    def array(self, host: NDArray[Any]) -> Any:
        """A copy on the device, there when this returns."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array of undefined contents."""

    def copy(self, to: Any, source: Any) -> None:
        """Copy one contiguous array on the device to another of its size, on the stream."""

    def fill(self, array: Any, byte: int) -> None:
        """Set every byte of a contiguous array, on the stream."""

    def host(self, array: Any) -> NDArray[Any]:
        """A copy on the host, once the stream is done."""

    def synchronize(self) -> None:
        """Wait for the stream; an error of an earlier launch is raised here."""

    def record(self, calls: Sequence[Call]) -> Recording:
        """Record calls, which have run once before, as one graph."""

    def time(self, recordings: Sequence[Recording], rounds: int) -> list[list[float]]:
        """Launch all recordings in turn, ``rounds`` times.

        For each recording what every launch took, in ``unit``.
        """
