"""Picks the architecture to compile a variant for, and compiles many at once.

With or without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable

from pagedkv import extras
from pagedkv.errors import KernelsUnavailable
from pagedkv.kernels.jit import Binary, CompileCache, default_cache
from pagedkv.kernels.nvrtc import Nvrtc
from pagedkv.kernels.variant import Variant


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
            f"{extras.command(f'cuda{max(nvrtc.version[0], 13)}')}, with --upgrade"
        )
    return f"sm_{max(known)}{variant.arch_features}"


def precompile(
    variants: Iterable[Variant],
    capability: tuple[int, int],
    *,
    threads: int | None = None,
    progress: bool = False,
    cache: CompileCache | None = None,
) -> list[Binary]:
    """Compile variants into the cache, so that no launch has to; needs no GPU.

    Parameters
    ----------
    variants : for instance :func:`pagedkv.kernels.shipped.shipped`'s, or a plan's ``variants()``.
    capability : of the device that will run them, (9, 0) for an H100.
    threads : compilers at once; default: one per CPU.
    progress : show a bar where rich is installed.
    cache : default: this user's.

    Returns
    -------
    One per variant, in their order.

    Raises
    ------
    CompileError, KernelsUnavailable
    """
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
