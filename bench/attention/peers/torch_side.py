"""The same memory and stream as torch sees them.

Torch is imported when a :class:`TorchSide` is made.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.attention.device import Call, Device, Recording
from bench.attention.problems import Problem
from bench.attention.systems import MAX_ERROR, Prepared

MAX_FP8_ERROR = 0.1  # with fp8 KV a peer may round Q and the softmax's weights to fp8, too

# Bits as arrays hold them -> what DLPack is sure to carry, and torch's name for what they are.
_CARRIED = {"uint16": ("int16", "bfloat16"), "uint8": ("uint8", "float8_e4m3fn")}


def absence(device: Device, module: str, package: str) -> str:
    """Why a torch library cannot run on a device, as :meth:`System.absence` says it.

    Nothing is imported.
    """
    needed = dict.fromkeys([(module, package), ("torch", "torch")])
    missing = [shown for name, shown in needed if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "" if device.kind == "cuda" else "no CUDA device: installed, but it needs one"


def version(package: str) -> str:
    """Of a distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class TorchGraph:
    """A graph that torch captured, so that its allocator knows; launched on the bench's stream."""

    def __init__(self, side: TorchSide, calls: Sequence[Call]) -> None:
        self._side = side
        self._graph = side.torch.cuda.CUDAGraph()
        with side.torch.cuda.graph(self._graph, stream=side.stream):
            for call in calls:
                call()

    def launch(self) -> None:
        """Start it."""
        with self._side.current():
            self._graph.replay()


class TorchSide:
    """Torch on the bench's device and stream.

    Attributes
    ----------
    torch : the module.
    name : torch's name of the device.
    stream : the bench's stream as torch's; None without CUDA.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.torch: Any = importlib.import_module("torch")
        self.name = "cuda" if device.kind == "cuda" else "cpu"
        self.stream = self.torch.cuda.ExternalStream(device.stream.ptr) if device.kind == "cuda" else None

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """The bench's stream as torch's current one."""
        if self.stream is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self.torch.cuda.stream(self.stream)
        return context

    def tensor(self, array: Any) -> Any:
        """The same memory as a tensor; uint16 is bfloat16 there, uint8 fp8 e4m3."""
        carried, meant = _CARRIED.get(array.dtype.name, (array.dtype.name, array.dtype.name))
        with self.current():
            return self.torch.from_dlpack(array.view(np.dtype(carried))).view(getattr(self.torch, meant))

    def ints(self, values: Sequence[int] | NDArray[Any]) -> Any:
        """int32 on the device."""
        with self.current():
            return self.torch.tensor(np.asarray(values), dtype=self.torch.int32, device=self.name)

    def zeros(self, num_bytes: int) -> Any:
        """uint8 workspace of zeros."""
        with self.current():
            return self.torch.zeros(num_bytes, dtype=self.torch.uint8, device=self.name)

    def like(self, tensor: Any) -> Any:
        """An output of the shape and dtype of a tensor."""
        with self.current():
            return self.torch.empty_like(tensor)

    def host_bits(self, tensor: Any) -> NDArray[np.uint16]:
        """bfloat16 bits on the host, once the stream is done."""
        with self.current():
            bits: NDArray[np.uint16] = tensor.view(self.torch.int16).cpu().numpy().view(np.uint16)
            return bits

    def prepared(
        self,
        problem: Problem,
        call: Callable[[int], Any],
        out: Any = None,
        *,
        contiguous: bool = False,
        note: str = "",
    ) -> Prepared:
        """Work whose output is ``out`` or what ``call`` returns.

        bfloat16 [num_tokens, num_qo_heads, head_dim].
        """
        latest = [out]

        def run(copy: int) -> None:
            with self.current():
                result = call(copy)
            if out is None:
                latest[0] = result

        def error() -> float:
            result = self.host_bits(latest[0].reshape(problem.q.shape))
            return problem.error(result, problem.expected_contiguous if contiguous else problem.expected)

        def poison() -> None:
            with self.current():
                if latest[0] is not None:
                    latest[0].fill_(float("nan"))

        bound = MAX_ERROR if problem.scale is None else MAX_FP8_ERROR
        return Prepared(run, problem.copies, poison, error, bound, self.record, note)

    def record(self, calls: Sequence[Call]) -> Recording:
        """A graph that torch captures; without CUDA the calls themselves."""
        return TorchGraph(self, calls) if self.stream is not None else self.device.record(calls)

    def matmul(self, size: int) -> Prepared:
        """A square product in bfloat16: the ceiling of the tensor cores."""
        torch = self.torch
        with self.current():
            a, b = (torch.randn(size, size, device=self.name).to(torch.bfloat16) for _ in range(2))
            out = torch.empty_like(a)

        def call(copy: int) -> None:
            with self.current():
                torch.matmul(a, b, out=out)

        def error() -> float:
            with self.current():
                wanted = a[:4].double() @ b.double()
                return float((out[:4].double() - wanted).abs().max() / wanted.abs().max())

        def poison() -> None:
            with self.current():
                out.fill_(float("nan"))

        return Prepared(call, 1, poison, error, MAX_ERROR, self.record, f"torch {torch.__version__}")
