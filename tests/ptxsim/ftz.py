"""Flushing of subnormal floats to zero, as the GPU's ``.ftz`` does it.

The host's floating point unit does the flushing.

Kernels are compiled with ``-ftz=true``, so nearly every float32 instruction flushes; steps of instructions without
``.ftz`` run inside :func:`preserving`.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_MACHINE = platform.machine()
# Where the control word lies in fenv_t, and its bits that flush inputs and results.
_LAYOUT = {"x86_64": (28, 0x8040), "AMD64": (28, 0x8040), "aarch64": (0, 1 << 24), "arm64": (0, 1 << 24)}


class _Modes:
    """The two floating point environments."""

    def __init__(self) -> None:
        self.libm = ctypes.CDLL("libm.so.6")
        self.set = self.libm.fesetenv
        self.set.argtypes = [ctypes.c_void_p]
        self._keep = []
        offset, bits = _LAYOUT[_MACHINE]
        addresses = []
        for flush in (False, True):
            env = ctypes.create_string_buffer(256)
            self.libm.fegetenv(env)
            word = ctypes.c_uint32.from_buffer(env, offset)
            word.value = word.value | bits if flush else word.value & ~bits
            self._keep.append(env)
            addresses.append(ctypes.addressof(env))
        self.off, self.on = addresses


_modes: _Modes | None = None


def _get() -> _Modes:
    global _modes
    if _modes is None:
        if _MACHINE not in _LAYOUT:
            raise NotImplementedError(f"how to flush subnormal floats on {_MACHINE}")
        _modes = _Modes()
    return _modes


@contextmanager
def flushing() -> Iterator[None]:
    """Subnormal inputs and results of float32 and float64 arithmetic are zero."""
    modes = _get()
    modes.set(modes.on)
    try:
        yield
    finally:
        modes.set(modes.off)


@contextmanager
def preserving() -> Iterator[None]:
    """Within :func:`flushing`: ordinary IEEE arithmetic."""
    modes = _get()
    modes.set(modes.off)
    try:
        yield
    finally:
        modes.set(modes.on)
