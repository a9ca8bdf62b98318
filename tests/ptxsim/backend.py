"""The simulator as a kernel backend: the launchers of the library run on it unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pagedkv.kernels.params import Params
from pagedkv.kernels.source import translation_unit
from pagedkv.kernels.tensor_map import Swizzle, check_tensor_map
from pagedkv.kernels.variant import Variant
from pagedkv.kernels.warps import shared_limit
from tests.ptxsim.global_memory import extent_of
from tests.ptxsim.launch import launch
from tests.ptxsim.loader import compile_ptx, program
from tests.ptxsim.machine import Dim3
from tests.ptxsim.stats import Stats
from tests.ptxsim.tensor_map import encode

GUARD = 256  # bytes between arrays, so that an access past an end finds no neighbour
ALIGNMENT = 256
POISON_LIMIT = 1 << 28  # larger arrays are zeros, which cost nothing until they are touched


class PtxsimBackend:
    """Runs kernels in the PTX interpreter; device arrays are NumPy arrays.

    Parameters
    ----------
    capability : what to compile for.
    num_sms : small, so that constant grids stay small.
    races : check for races and for reads of unwritten shared memory.
    track_unwritten : reads of bytes of ``empty`` arrays that nothing has written are errors. Bytes that the host has
        changed from the 0xFF they start with count as written.
    collect_stats : count sectors and bank conflicts, in ``stats``.
    """

    name = "ptxsim"

    def __init__(
        self,
        capability: tuple[int, int] = (9, 0),
        num_sms: int = 4,
        *,
        races: bool = True,
        track_unwritten: bool = False,
        collect_stats: bool = False,
    ) -> None:
        self.capability, self.num_sms = capability, num_sms
        self.shared_limit = shared_limit(capability)
        self.races, self.track_unwritten = races, track_unwritten
        self.stats: Stats | None = Stats() if collect_stats else None
        self.steps = 0  # instructions executed so far
        self._blocks: weakref.WeakValueDictionary[int, NDArray[np.uint8]] = weakref.WeakValueDictionary()
        self._written: dict[int, tuple[NDArray[Any], NDArray[np.uint8]]] = {}

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
        """Run a kernel to its end.

        Raises
        ------
        PtxsimError
            What the kernel did wrong.
        """
        if shared_bytes > self.shared_limit:
            raise ValueError(f"{variant}: {shared_bytes} bytes of shared memory, over the limit of {self.shared_limit}")
        self.steps += launch(
            self._program(variant), grid, block, params.record.tobytes(),
            [array for array in params.arrays if array is not None],
            shared_bytes=shared_bytes, races=self.races, stats=self.stats, num_sms=self.num_sms,
            written=self._shadows(),
        )  # fmt: skip

    def prepare(self, variants: Iterable[Variant], threads: int = 1) -> None:
        """Compile and parse."""
        for one in variants:
            self._program(one)

    def _program(self, variant: Variant) -> Any:
        major, minor = self.capability
        arch = f"compute_{major}{minor}{variant.arch_features}"
        ptx = compile_ptx(translation_unit(variant.kernel), f"{variant.kernel}.cu", variant.options(arch))
        return program(ptx, variant.kernel)

    def _shadows(self) -> dict[int, NDArray[np.uint8]]:
        """Return the written bytes of the arrays from ``empty``.

        What the host wrote since the last launch is included.
        """
        for array, written in self._written.values():
            written |= array != 0xFF
        return {start: written for start, (_, written) in self._written.items()}

    def _allocate(
        self, shape: tuple[int, ...], dtype: DTypeLike, poison: bool
    ) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """An aligned array with guard bytes around it, and its bytes."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        size = count + 2 * GUARD + ALIGNMENT
        block = np.full(size, 0xFF, np.uint8) if poison and size <= POISON_LIMIT else np.zeros(size, np.uint8)
        self._blocks[id(block)] = block
        start = GUARD + -(block.ctypes.data + GUARD) % ALIGNMENT
        octets = block[start : start + count]
        return octets.view(kind).reshape(shape), octets

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, *, stream: Any = None) -> NDArray[Any]:
        """An array of 0xFF bytes: NaN in every float format."""
        array, octets = self._allocate(shape, dtype, True)
        if self.track_unwritten and octets.size:
            self._written[extent_of(array)[0]] = (octets, np.zeros(octets.size, np.uint8))
        return array

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of zeros."""
        return self._allocate(shape, dtype, False)[0]

    def asarray(self, array: Any) -> NDArray[Any]:
        """A copy at an aligned address between guard bytes; what this backend made passes as it is."""
        if (
            isinstance(array, np.ndarray)
            and isinstance(array.base, np.ndarray)
            and self._blocks.get(id(array.base)) is array.base
        ):
            return array
        given = np.asarray(array)
        copy, _ = self._allocate(given.shape, given.dtype, False)
        copy[...] = given
        return copy

    def upload(self, target: Any, source: NDArray[Any], stream: Any = None) -> None:
        """Copies at once; every launch has ended before."""
        np.copyto(target, source)

    def tensor_map(
        self, array: Any, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: Swizzle = 0
    ) -> NDArray[np.void]:
        """A stand-in for the driver's map, checked as the real one is: see tests.ptxsim.tensor_map."""
        check_tensor_map(array.ctypes.data, array.dtype.itemsize, dims, strides, box, swizzle)
        return encode(array.ctypes.data, array.dtype.itemsize, dims, strides, box, swizzle)

    def in_turn(self) -> None:
        """Every launch ends before the next."""

    def is_capturing(self, stream: Any = None) -> bool:
        """There are no graphs; those of tests are in tests.ptxsim.graph."""
        return False

    def synchronize(self) -> None:
        """Every launch has ended before."""

    def to_host(self, array: Any) -> NDArray[Any]:
        """A copy."""
        return np.array(array)
