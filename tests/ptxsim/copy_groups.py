"""cp.async: each lane's groups of copies.

A group lands at the wait that needs it and not earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Active, Lanes, Mask
from tests.ptxsim.errors import AsyncCopyError
from tests.ptxsim.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine

Row = NDArray[Any]


@dataclass(slots=True, eq=False)
class PendingCopy:
    """One cp.async instruction.

    Lanes, their group numbers, destinations (flat shared bytes) and data.
    """

    lanes: Lanes
    group: NDArray[np.int64]
    flat: NDArray[np.int64]
    width: int
    data: Row
    ins: Instruction

    def part(self, chosen: Mask) -> PendingCopy:
        """The copies of some of the lanes."""
        return PendingCopy(
            self.lanes[chosen], self.group[chosen], self.flat[chosen], self.width, self.data[chosen], self.ins
        )


class CopyGroups:
    """The copies of a launch that are on their way."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.committed = np.zeros(m.lanes, np.int64)  # groups closed so far
        self.copies: list[PendingCopy] = []

    def issue(self, active: Active, flat: NDArray[np.int64], width: int, data: Row, ins: Instruction) -> None:
        """Copies join the open group of their lanes."""
        shared = self.m.shared
        if shared.shadow is not None:
            rows, many = shared.rows(flat, width)
            shared.shadow.check_write(rows, many, active.index)
            shared.shadow.mark_in_flight(rows, many, active.index)
        self.copies.append(PendingCopy(active.index, self.committed[active.index], flat, width, data, ins))

    def commit(self, active: Active) -> None:
        """Close the open group."""
        self.committed[active.index] += 1

    def wait(self, active: Active, allowed: int | None) -> None:
        """Complete all groups of the lanes but the newest ``allowed``.

        None completes uncommitted copies too.
        """
        keep = []
        for copy in self.copies:
            due = active.mask[copy.lanes]
            if allowed is not None:
                due = due & (copy.group < self.committed[copy.lanes] - allowed)
            rest = self._land(copy, due)
            if rest is not None:
                keep.append(rest)
        self.copies = keep

    def of(self, active: Active) -> list[PendingCopy]:
        """What the lanes have issued and not waited for."""
        return [copy for copy in self.copies if active.mask[copy.lanes].any()]

    def land_some(self, copies: list[PendingCopy], active: Active) -> None:
        """Complete the lanes' part of those copies that are still on their way."""
        keep = []
        for copy in self.copies:
            rest = self._land(copy, active.mask[copy.lanes]) if any(copy is one for one in copies) else copy
            if rest is not None:
                keep.append(rest)
        self.copies = keep

    def _land(self, copy: PendingCopy, due: Mask) -> PendingCopy | None:
        """Complete a part of a copy; what is left of it."""
        if not due.any():
            return copy
        done = copy if due.all() else copy.part(due)
        shared = self.m.shared
        shared.views[done.width][done.flat // done.width] = done.data
        if shared.shadow is not None:
            shared.shadow.record(*shared.rows(done.flat, done.width), done.lanes)
        return None if done is copy else copy.part(~due)

    def require_none(self) -> None:
        """At the kernel's end.

        Raises
        ------
        AsyncCopyError
            A copy was never waited for.
        """
        if self.copies:
            copy = self.copies[0]
            raise AsyncCopyError(
                f"cp.async of {self.m.describe(int(copy.lanes[0]))} is still in flight when the kernel ends"
                f"\n  at {copy.ins.source}: {copy.ins} (PTX line {copy.ins.line})"
            )
