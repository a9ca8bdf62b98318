"""All binders: importing the instruction modules registers them."""

from __future__ import annotations

from tests.ptxsim import (  # noqa: F401  (imported for their registrations)
    ops_async,
    ops_atomic,
    ops_bits,
    ops_compare,
    ops_convert,
    ops_float,
    ops_half,
    ops_integer,
    ops_matrix,
    ops_mbarrier,
    ops_memory,
    ops_move,
    ops_warp,
    ops_wgmma,
)
from tests.ptxsim.control import TERMINATORS, bind_terminator
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.registry import bind, opcodes
from tests.ptxsim.syntax import Instruction

_KNOWN = frozenset(opcodes()) | TERMINATORS


def require_known(ins: Instruction) -> None:
    """Raise if nothing here executes the instruction's opcode.

    Its modifiers are checked when the instruction first runs.
    """
    if ins.opcode not in _KNOWN:
        raise UnsupportedPtx(f"opcode {ins.opcode!r}: {ins} (PTX line {ins.line}, {ins.source})")


__all__ = ["bind", "bind_terminator", "opcodes", "require_known"]
