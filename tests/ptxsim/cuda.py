"""Compile and run small CUDA sources: for tests of the simulator itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.launch import launch, pack_arguments
from tests.ptxsim.loader import compile_ptx, program
from tests.ptxsim.stats import Stats

OPTIONS = ("-std=c++17", "-ftz=true", "-lineinfo", "-default-device")
C_TYPES = {
    "u16": ("unsigned short", "h", np.uint16), "s16": ("short", "h", np.int16), "u32": ("unsigned", "r", np.uint32),
    "s32": ("int", "r", np.int32), "u64": ("unsigned long long", "l", np.uint64), "s64": ("long long", "l", np.int64),
    "f32": ("float", "f", np.float32), "f64": ("double", "d", np.float64), "f16": ("unsigned short", "h", np.float16),
}  # fmt: skip


def run(
    source: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *arguments: Any,
    kernel: str = "k",
    macros: Sequence[str] = (),
    arch: str = "compute_90",
    shared_bytes: int = 0,
    races: bool = True,
    stats: Stats | None = None,
) -> None:
    """Run an ``extern "C"`` kernel of a source on arrays and NumPy scalars."""
    ptx = compile_ptx(source, "test.cu", (f"-arch={arch}", *OPTIONS, *(f"-D{macro}" for macro in macros)))
    run_ptx(ptx, grid, block, *arguments, kernel=kernel, shared_bytes=shared_bytes, races=races, stats=stats)


def run_ptx(
    ptx: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *arguments: Any,
    kernel: str = "k",
    shared_bytes: int = 0,
    races: bool = True,
    stats: Stats | None = None,
) -> None:
    """Run a kernel of a PTX text."""
    code = program(ptx, kernel)
    params, arrays = pack_arguments(code, arguments)
    launch(code, grid, block, params, arrays, shared_bytes=shared_bytes, races=races, stats=stats)


@dataclass(frozen=True, slots=True)
class Asm:
    """One inline PTX statement and what NumPy says it computes.

    Attributes
    ----------
    name : for the test's id.
    text : PTX; ``%0`` is the result, ``%1`` and on the sources.
    result, sources : types (keys of ``C_TYPES``).
    expect : the reference, on whole arrays.
    """

    name: str
    text: str
    result: str
    sources: tuple[str, ...]
    expect: Callable[..., Any]


def asm_unit(cases: Sequence[Asm]) -> str:
    """A translation unit with a kernel ``k_<i>`` per case: out[i] = statement(a[i], b[i], ...)."""
    kernels = []
    for number, case in enumerate(cases):
        kind, letter, _ = C_TYPES[case.result]
        given = [C_TYPES[source] for source in case.sources]
        params = "".join(f"const {c}* a{i}, " for i, (c, _, _) in enumerate(given))
        inputs = ", ".join(f'"{constraint}"(a{i}[t])' for i, (_, constraint, _) in enumerate(given))
        text = case.text.replace("\n", "\\n")
        kernels.append(
            f'extern "C" __global__ void k_{number}({params}{kind}* out) {{\n'
            f"  const int t = blockIdx.x * blockDim.x + threadIdx.x;\n  {kind} r;\n"
            f'  asm volatile("{text}" : "={letter}"(r) : {inputs});\n  out[t] = r;\n}}'
        )
    return "\n".join(kernels)


def run_asm(cases: Sequence[Asm], case: Asm, *inputs: NDArray[Any]) -> NDArray[Any]:
    """Results of one case of a unit on arrays of one length, a multiple of 32."""
    result: NDArray[Any] = np.zeros(len(inputs[0]), C_TYPES[case.result][2])
    typed = [np.ascontiguousarray(x, C_TYPES[s][2]) for x, s in zip(inputs, case.sources, strict=True)]
    run(asm_unit(cases), len(result) // 32, 32, *typed, result, kernel=f"k_{list(cases).index(case)}")
    return result


def sample(kind: str, count: int, seed: int) -> NDArray[Any]:
    """Numbers of a type, awkward ones first."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(C_TYPES[kind][2])
    if dtype.kind == "f":
        edges = [0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 65504, 1e-3, 3e9, -3e9, 1e-39]
        values = rng.standard_normal(count) * np.exp2(rng.integers(-12, 13, count))
        values[: len(edges)] = rng.permutation(edges)
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    info = np.iinfo(dtype)
    values = rng.integers(info.min, info.max, count, dtype, endpoint=True)
    small = rng.integers(0, 70, count).astype(dtype)
    values = np.where(rng.random(count) < 0.3, small, values)
    edges = [0, 1, 2, 31, 32, 33, info.max, info.min, info.max - 1]
    values[: len(edges)] = rng.permutation(np.array(edges, dtype))
    return values
