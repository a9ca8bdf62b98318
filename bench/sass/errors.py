"""Errors of reading a kernel's machine code."""

from __future__ import annotations


class SassError(Exception):
    """The disassembly lacks something that the model needs, or cannot be made."""


class UnknownOpcode(SassError):
    """An instruction that the table of opcodes does not name, so that its cost is not known."""


class NoHotLoop(SassError):
    """No loop's pass does whole tiles of the kernel's work."""
