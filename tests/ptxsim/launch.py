"""Run a kernel on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.global_memory import extent_of
from tests.ptxsim.machine import Dim3, Machine
from tests.ptxsim.program import Program
from tests.ptxsim.stats import Stats


def dim3(value: int | Sequence[int]) -> Dim3:
    """One to three extents as three."""
    parts = (value,) if isinstance(value, int) else tuple(value)
    x, y, z = (*parts, 1, 1)[:3]
    return x, y, z


def pack_arguments(program: Program, arguments: Sequence[Any]) -> tuple[bytes, list[NDArray[Any]]]:
    """Return the parameter block of separate arguments, and the arrays among them.

    Arrays give addresses, NumPy scalars their bytes.
    """
    block = bytearray(program.param_size)
    arrays: list[NDArray[Any]] = []
    for param, value in zip(program.function.params, arguments, strict=True):
        if isinstance(value, np.ndarray) and value.ndim:
            arrays.append(value)
            data = value.ctypes.data.to_bytes(8, "little")
        else:
            data = bytes(value) if isinstance(value, bytes) else np.asarray(value).tobytes()
        if len(data) != param.size:
            raise TypeError(f"{param.name} takes {param.size} bytes, not the {len(data)} of {value!r}")
        offset = program.param_offsets[param.name]
        block[offset : offset + len(data)] = data
    return bytes(block), arrays


def launch(
    program: Program,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    params: bytes,
    arrays: Iterable[NDArray[Any]],
    *,
    shared_bytes: int = 0,
    races: bool = True,
    stats: Stats | None = None,
    num_sms: int = 4,
    written: dict[int, NDArray[np.uint8]] | None = None,
) -> int:
    """Run one launch to its end.

    Parameters
    ----------
    program : the kernel.
    grid, block : CTAs and threads.
    params : bytes of the parameter block.
    arrays : all memory the kernel may touch.
    shared_bytes : dynamic shared memory.
    races : check races.
    stats : counts traffic.
    num_sms : what ``%nsmid`` says.
    written : by first address, the bytes of an array that have been written; reads of others are errors.

    Returns
    -------
    Instructions executed, however many lanes took part in each.

    Raises
    ------
    PtxsimError
        What the kernel did wrong.
    """
    known = written or {}
    extents = []
    for array in arrays:
        if array.size:
            start, end, writeable = extent_of(array)
            extents.append((start, end, writeable, known.get(start)))
    machine = Machine(
        program, dim3(grid), dim3(block), params, extents,
        shared_bytes=shared_bytes, races=races, stats=stats, num_sms=num_sms,
    )  # fmt: skip
    machine.run()
    return machine.steps
