"""Picks the architecture to compile a variant for, and compiles many at once.

With or without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
from collections.abc import Iterable
from typing import Any

from pagedkv import extras
from pagedkv.errors import InvalidArgument, KernelsUnavailable, WrongType
from pagedkv.kernels.jit import Binary, CompileCache, default_cache, default_folder
from pagedkv.kernels.nvrtc import Nvrtc
from pagedkv.kernels.toolkits import nvrtc_for
from pagedkv.kernels.variant import Variant


def checked_pair(given: Any, name: str, example: str) -> tuple[int, int]:
    """A version of two numbers, such as a compute capability, as a tuple of int.

    Raises
    ------
    WrongType, InvalidArgument
        It is no pair of whole numbers, or one of them is negative.
    """
    try:
        if isinstance(given, str | bytes) or any(isinstance(one, bool) for one in given):
            raise TypeError
        major, minor = map(operator.index, given)
    except (TypeError, ValueError):
        raise WrongType(f"{name} must be a pair of whole numbers, such as {example}, got {given!r:.60}") from None
    if major < 0 or minor < 0:
        raise InvalidArgument(f"{name} must not be negative, got {(major, minor)}; write it as {example}")
    return major, minor


def architecture(variant: Variant, capability: tuple[int, int], nvrtc: Nvrtc) -> str:
    """The ``sm_`` name to compile a variant for.

    A device runs code for its own compute capability or for an earlier one of the same major number; code that
    uses an architecture's own instructions (``sm_90a``) runs on that capability alone.

    Raises
    ------
    KernelsUnavailable
        This NVRTC is too old (or too new) for the device.
    """
    major, minor = capability
    known = [arch for arch in nvrtc.architectures() if arch // 10 == major and arch % 10 <= minor]
    if variant.arch_features:
        known = [arch for arch in known if arch % 10 == minor]
    if not known:
        version = ".".join(map(str, nvrtc.version))
        every = ", ".join(f"{arch // 10}.{arch % 10}" for arch in nvrtc.architectures())
        raise KernelsUnavailable(
            f"NVRTC {version} does not compile for compute capability {major}.{minor} (it knows {every}): "
            f"{_cure(major * 10 + minor, nvrtc)}"
        )
    return f"sm_{max(known)}{variant.arch_features}"


def _cure(number: int, nvrtc: Nvrtc) -> str:
    """What to do about a capability, 90 for 9.0, for which this NVRTC does not compile."""
    if number > min(nvrtc.architectures()):
        return f"{extras.command(f'cuda{max(nvrtc.version[0], 13)}')}, with --upgrade"
    if nvrtc.version[0] == 12:
        return "the device is too old for every NVRTC that pagedkv takes"
    return (
        f"CUDA 12's may: {extras.command('cuda12')}; precompile(driver=(12, 9)) takes it, and launches do where "
        f"the packages of [cuda13] are not installed"
    )


def precompile(
    variants: Iterable[Variant],
    capability: tuple[int, int],
    *,
    threads: int | None = None,
    progress: bool = False,
    cache: CompileCache | None = None,
    driver: tuple[int, int] | None = None,
) -> list[Binary]:
    """Compile variants into the cache, so that no launch has to; needs no GPU.

    Parameters
    ----------
    variants : for instance :func:`pagedkv.kernels.shipped.shipped`'s, or a plan's ``variants()``.
    capability : of the device that will run them, (9, 0) for an H100.
    threads : compilers at once; default: one per CPU.
    progress : show a bar where rich is installed.
    cache : default: this user's, with the NVRTC for `driver`.
    driver : CUDA version that the driver there is for, such as (12, 8) (``nvidia-smi`` and ``pagedkv doctor`` show it).
        The newest NVRTC here whose cubins it loads compiles, as it does at a launch there. None: the newest of all,
        whose cubins a driver of an older major version neither finds nor loads.

    Returns
    -------
    One per variant, in their order.

    Raises
    ------
    CompileError, KernelsUnavailable
        The latter where no NVRTC here compiles for that driver or capability.
    WrongType, InvalidArgument
        `capability` or `driver` is no pair of numbers; or both `cache` and `driver` were given.
    """
    capability = checked_pair(capability, "capability", "(9, 0)")
    if driver is not None:
        if cache is not None:
            raise InvalidArgument("precompile takes cache= or driver=, not both: a cache has an NVRTC already")
        cache = CompileCache(nvrtc_for(checked_pair(driver, "driver", "(12, 8)")), default_folder())
    cache = cache or default_cache()
    wanted = list(variants)
    bar = _Bar(len(wanted)) if progress and importlib.util.find_spec("rich") is not None else None
    try:
        return cache.precompile(
            wanted, lambda one: architecture(one, capability, cache.nvrtc), threads=threads, progress=bar
        )
    finally:
        if bar is not None:
            bar.stop()


class _Bar:
    """rich's progress bar on stderr."""

    def __init__(self, total: int) -> None:
        console = importlib.import_module("rich.console").Console(stderr=True)
        self._progress = importlib.import_module("rich.progress").Progress(console=console, transient=True)
        self._task = self._progress.add_task("compiling kernels", total=total)
        self._progress.start()

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done)

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()
