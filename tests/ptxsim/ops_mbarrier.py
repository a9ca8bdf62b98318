"""mbarrier objects in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.registry import Step
from tests.ptxsim.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine


def bind_try_wait(ins: Instruction, number: int, m: Machine) -> Step:
    """mbarrier.try_wait."""
    raise UnsupportedPtx("mbarrier.try_wait")
