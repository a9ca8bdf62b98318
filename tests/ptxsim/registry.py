"""Which binder makes an instruction executable.

A binder takes an instruction and the machine, looks up its operands once, and returns a step: a function of the active
lanes. A binder that does not know a modifier raises UnsupportedPtx; nothing is ever skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.ptxsim.active import Active
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Step = Callable[[Active], None]
Binder = Callable[[Instruction, "Machine"], Step]

_BINDERS: dict[str, Binder] = {}


def opcode(*names: str) -> Callable[[Binder], Binder]:
    """Register a binder for opcodes."""

    def register(binder: Binder) -> Binder:
        for name in names:
            assert name not in _BINDERS, name
            _BINDERS[name] = binder
        return binder

    return register


def opcodes() -> list[str]:
    """All opcodes with a binder."""
    return sorted(_BINDERS)


def bind(ins: Instruction, m: Machine) -> Step:
    """The step of one instruction, its guard included.

    Raises
    ------
    UnsupportedPtx
        The simulator does not model it.
    """
    try:
        step = _BINDERS[ins.opcode](ins, m)
    except UnsupportedPtx as error:
        raise UnsupportedPtx(f"{error}: {ins} (PTX line {ins.line}, {ins.source})") from None
    if ins.guard is None:
        return step
    row, negated = m.regs.row(ins.guard.name), ins.guard.negated

    def guarded(active: Active) -> None:
        some = m.restrict(active, row, negated)
        if some.count:
            step(some)

    return guarded


def require(ins: Instruction, *known: str) -> None:
    """Raise unless all modifiers are among the known ones."""
    for mod in ins.mods:
        if mod not in known:
            raise UnsupportedPtx(f"modifier .{mod}")
