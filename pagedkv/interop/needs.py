"""What each framework takes without a copy, as measured.

Anything else is refused or copied, never silently.

Frameworks themselves copy (JAX below 64 bytes of alignment, MLX always), narrow (JAX int64) or write to
read-only arrays (PyTorch) without a word. docs/interop.md has the table with their versions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pagedkv.errors import ExchangeRefused, InvalidArgument
from pagedkv.interop.devices import CUDA, device_code
from pagedkv.interop.dtypes import CODES, in_numpy
from pagedkv.interop.imports import as_view
from pagedkv.interop.memory import compact_strides
from pagedkv.interop.view import View

INTEGERS = frozenset(name for name, (code, _) in CODES.items() if code in (0, 1))
WIDE = frozenset({"int64", "uint64", "float64", "complex128"})
FP8_OF_ONNX = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"})


@dataclass(frozen=True, slots=True)
class Needs:
    """The arrays that a framework imports unchanged.

    Attributes
    ----------
    dtypes : element types it knows.
    alignment : bytes that the address must be a multiple of; 0: of the element's size.
    strides : ``"any"``, ``"positive"``, ``"dense"`` (a transposition of compact) or ``"compact"`` (C order).
    writes : it may write to an imported array, even a read-only one.
    shares : it can use memory that is not its own at all.
    """

    dtypes: frozenset[str]
    alignment: int = 0
    strides: Literal["any", "positive", "dense", "compact"] = "any"
    writes: bool = True
    shares: bool = True


FRAMEWORKS = {
    "numpy": Needs(frozenset(CODES), writes=False),
    "numba": Needs(frozenset(filter(in_numpy, CODES)) - {"float16"}, writes=False),
    "jax": Needs(frozenset(CODES), alignment=64, strides="dense", writes=False),
    "onnxruntime": Needs(
        INTEGERS | {"bool", "float16", "bfloat16", "float32", "float64"} | FP8_OF_ONNX, strides="compact", writes=False
    ),
    "torch": Needs(
        frozenset(CODES) - {"float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"}, strides="positive"
    ),
    "tinygrad": Needs(
        INTEGERS | {"bool", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"},
        strides="compact",
    ),
    "mlx": Needs(
        INTEGERS | {"bool", "float16", "bfloat16", "float32", "complex64"}, strides="positive", shares=False
    ),
}  # fmt: skip


def fit(x: Any, framework: str, *, copy: bool = False) -> View:
    """An array as a framework takes it without a copy of its own.

    Parameters
    ----------
    x : a View or any array.
    framework : ``"jax"``, ``"onnxruntime"``, ``"torch"``, ``"tinygrad"``, ``"mlx"``, ``"numba"`` or ``"numpy"``.
    copy : make one copy where the array as it lies does not fit.

    Returns
    -------
    View
        Of the same memory; with `copy`, and only where needed, of a compact copy that may be written. Frameworks that
        never write get read-only arrays through DLPack before 1.0 as well.

    Raises
    ------
    ExchangeRefused
        It does not fit and `copy` is False; or its dtype is not known there, which no copy changes. All that is
        wrong is named.
    InvalidArgument
        No framework of that name is known here: use :func:`export`, and look at what arrives.
    """
    if framework not in FRAMEWORKS:
        raise InvalidArgument(f"framework must be one of {', '.join(FRAMEWORKS)}, got {framework!r:.40}")
    view, needs = as_view(x), FRAMEWORKS[framework]
    if view.dtype not in needs.dtypes:
        raise ExchangeRefused(f"{framework} has no {view.dtype}: convert the array first, or hand over its bits")
    if framework == "jax" and view.dtype in WIDE and not _jax_has_64_bits():
        raise ExchangeRefused(f"JAX would narrow {view.dtype} to 32 bits: set jax_enable_x64, or convert it first")
    problems = list(_problems(view, needs))
    if problems and not copy:
        raise ExchangeRefused(f"{framework} does not take this array as it is, and copy=False: {'; '.join(problems)}")
    if problems:
        view = view.copy()
    return view if needs.writes else replace(view, harmless=True)


def _problems(view: View, needs: Needs) -> Iterator[str]:
    on_host = device_code(view.device)[0] != CUDA
    if on_host and not needs.shares:
        yield "it copies all that is in host memory"
    if view.read_only and needs.writes:
        yield "it is read-only, and nothing would keep the framework from writing (export with read_only=False)"
    if not view.size:
        return
    alignment = needs.alignment or view.itemsize
    if on_host and view.ptr % alignment:
        yield f"it begins at {view.ptr:#x}, not at a multiple of {alignment} bytes"
    if needs.strides == "compact" and not view.is_compact:
        yield f"strides {view.strides} of shape {view.shape} are not compact"
    elif needs.strides == "dense" and not _is_dense(view):
        yield f"strides {view.strides} of shape {view.shape} leave gaps"
    elif needs.strides == "positive" and any(n > 1 and step < 0 for n, step in zip(view.shape, view.strides)):
        yield f"strides {view.strides} go backwards"


def _is_dense(view: View) -> bool:
    """Whether some order of the axes is compact."""
    axes = sorted((step, n) for n, step in zip(view.shape, view.strides, strict=True) if n > 1)
    shape = tuple(n for _, n in reversed(axes))
    return tuple(step for step, _ in reversed(axes)) == compact_strides(shape, view.itemsize)


def _jax_has_64_bits() -> bool:
    """As the imported JAX is set; without one, its default."""
    jax = sys.modules.get("jax")
    return bool(jax is not None and jax.config.jax_enable_x64)
