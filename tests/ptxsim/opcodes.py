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
from tests.ptxsim.control import bind_terminator
from tests.ptxsim.registry import bind, opcodes

__all__ = ["bind", "bind_terminator", "opcodes"]
