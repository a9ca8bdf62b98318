"""Runs the kernels in the tests' PTX interpreter, without a GPU.

The bench's control flow can be tested anywhere.

Nothing is timed. What stands in a time's place is the number of steps that the interpreter took, which says nothing
about a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bench.attention.device import Call, Recording
from pagedkv.kernels.nvrtc import default_nvrtc

LABEL = "no device: control flow only"


class Calls:
    """Calls that run when launched."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = tuple(calls)

    def launch(self) -> None:
        """Run all of them."""
        for call in self._calls:
            call()


class PtxsimDevice:
    """The interpreter as a device; arrays are NumPy's."""

    kind = "ptxsim"
    unit = "steps"
    stream = None
    l2_bytes = 0

    def __init__(self) -> None:
        try:
            from tests.ptxsim.backend import PtxsimBackend
        except ImportError as error:
            raise SystemExit(f"--device ptxsim needs the repository's tests folder beside bench ({error})") from error
        self.backend = PtxsimBackend()

    def describe(self) -> dict[str, Any]:
        """That there is no device."""
        return {"device": LABEL, "driver": "none", "nvrtc": ".".join(map(str, default_nvrtc().version))}

    def free_bytes(self) -> int:
        """Enough for the tiny scale."""
        return 1 << 28

    def array(self, host: NDArray[Any]) -> Any:
        """A copy."""
        return self.backend.asarray(host)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array of undefined contents."""
        return self.backend.empty(shape, dtype)

    def copy(self, to: Any, source: Any) -> None:
        """Copy."""
        to.reshape(-1).view(np.uint8)[:] = source.reshape(-1).view(np.uint8)

    def fill(self, array: Any, byte: int) -> None:
        """Set every byte."""
        array.reshape(-1).view(np.uint8)[:] = byte

    def host(self, array: Any) -> NDArray[Any]:
        """A copy."""
        return np.array(self.backend.to_host(array))

    def synchronize(self) -> None:
        """Nothing runs on its own here."""

    def record(self, calls: Sequence[Call]) -> Recording:
        """The calls themselves."""
        return Calls(calls)

    def time(self, recordings: Sequence[Recording], rounds: int) -> list[list[float]]:
        """Steps of the interpreter per launch."""
        counts: list[list[float]] = [[] for _ in recordings]
        for _ in range(rounds):
            for recording, found in zip(recordings, counts, strict=True):
                before = self.backend.steps
                recording.launch()
                found.append(float(self.backend.steps - before))
        return counts
