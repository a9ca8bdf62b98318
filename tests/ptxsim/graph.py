"""Captured graphs in the interpreter: launches kept with their parameters, and replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import DTypeLike, NDArray

from pagedkv.errors import InvalidArgument
from pagedkv.kernels.params import Params
from pagedkv.kernels.variant import Variant
from tests.ptxsim.backend import PtxsimBackend
from tests.ptxsim.machine import Dim3


@dataclass(frozen=True)
class _Node:
    variant: Variant
    grid: Dim3
    block: Dim3
    params: Params
    shared_bytes: int


class CapturingBackend(PtxsimBackend):
    """A backend that can keep launches, for `replay`, in place of running them.

    As in a CUDA graph, a launch keeps its grid and the bytes of its parameters; the arrays at its pointers are read
    when it runs. An upload during the capture is refused, as
    :class:`pagedkv.kernels.cupy_backend.CupyBackend` refuses it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._captured: list[_Node] | None = None
        self._stream: Any = None
        self._broken = False

    def begin_capture(self, stream: Any = None) -> None:
        """Keep the launches from now on, which are all on this stream."""
        self._captured, self._stream, self._broken = [], stream, False

    def end_capture(self) -> list[_Node]:
        """The launches since the capture began; later ones run again."""
        found, self._captured = self._captured, None
        assert found is not None
        assert not self._broken, "the device was waited for while a graph was captured"
        return found

    def replay(self, graph: list[_Node]) -> None:
        """Run captured launches in their order."""
        for node in graph:
            super().launch(node.variant, node.grid, node.block, node.params, shared_bytes=node.shared_bytes)

    def launch(
        self, variant: Variant, grid: Dim3, block: Dim3, params: Params, *, shared_bytes: int = 0, stream: Any = None
    ) -> None:
        """Run a kernel, or keep its launch with a copy of the parameters."""
        if self._captured is None:
            super().launch(variant, grid, block, params, shared_bytes=shared_bytes, stream=stream)
            return
        kept = Params(params.record.copy(), params.arrays)
        self._captured.append(_Node(variant, grid, block, kept, shared_bytes))

    def is_capturing(self, stream: Any = None) -> bool:
        """Whether the stream's launches are kept."""
        return self._captured is not None and stream == self._stream

    def synchronize(self) -> None:
        """As CUDA, which breaks the capture.

        Raises
        ------
        InvalidArgument
            Any stream is being captured.
        """
        if self._captured is not None:
            self._broken = True
            raise InvalidArgument("a graph is being captured on another stream: wait before the capture")

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """As CuPy, which fills them by a kernel that would be captured, and waits."""
        self.synchronize()
        return super().zeros(shape, dtype)

    def upload(self, target: Any, source: NDArray[Any], stream: Any = None) -> None:
        """Copy, outside a capture.

        Raises
        ------
        InvalidArgument
            A replay would copy whatever the source holds by then.
        """
        if self._captured is not None:
            raise InvalidArgument("an upload while a graph is captured")
        super().upload(target, source, stream)
