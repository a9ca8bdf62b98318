"""Reads since the last writes of what they read, instruction by instruction.

The log is exact, and the checker looks at it only in cases of doubt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Lanes

Rows = NDArray[np.int64]
_LONG = 256  # entries after which superseded ones are looked for


@dataclass(slots=True, eq=False)
class Read:
    """One instruction's read.

    Lane i read granules ``rows[i]*many`` to ``rows[i]*many + many - 1``.
    """

    rows: Rows
    many: int
    lanes: Lanes
    time: int
    strong: bool
    granules: Rows | None = None

    def expanded(self) -> Rows:
        """All granules, lane by lane."""
        if self.granules is None:
            if self.many == 1:
                self.granules = self.rows.reshape(-1)
            else:
                self.granules = (self.rows[:, None] * self.many + np.arange(self.many)).reshape(-1)
        return self.granules


@dataclass(slots=True)
class Conflicts:
    """Pairs of a logged read and a write of one granule."""

    granules: Rows
    readers: Lanes
    times: NDArray[np.int64]
    strong: NDArray[np.bool_]
    writers: Lanes


class ReadLog:
    """The log of one memory.

    Parameters
    ----------
    granules : how many the memory has.
    """

    def __init__(self, granules: int) -> None:
        self.size = granules
        self.entries: list[Read] = []
        self.last = 0  # time of the newest entry
        self._marks: NDArray[np.int32] | None = None
        self._limit = _LONG

    def add(self, rows: Rows, many: int, lanes: Lanes, time: int, strong: bool) -> None:
        """Log a read."""
        self.entries.append(Read(rows, many, lanes, time, strong))
        self.last = time

    def clear(self) -> None:
        """Forget the log: every read is ordered before all lanes."""
        self.entries.clear()

    def prune(self, state: NDArray[np.int64], settled: int) -> None:
        """If the log is long, forget what is settled or wholly overwritten since."""
        if len(self.entries) < self._limit:
            return
        self.entries = [
            entry
            for entry in self.entries
            if entry.time > settled and (state.take(entry.expanded()) >> 32 <= entry.time).any()
        ]
        self._limit = max(_LONG, 2 * len(self.entries))

    def conflicts(self, rows: Rows, many: int, lanes: Lanes, settled: int) -> Conflicts | None:
        """All logged reads of the granules that lanes are about to write."""
        if self._marks is None:
            self._marks = np.zeros(self.size, np.int32)
        written = rows if many == 1 else (rows[:, None] * many + np.arange(many)).reshape(-1)
        self._marks[written] = np.arange(1, written.size + 1, dtype=np.int32)
        parts: list[tuple[Any, ...]] = []
        for entry in self.entries:
            if entry.time <= settled:
                continue
            spots = entry.expanded()
            marked = self._marks.take(spots)
            hit = np.flatnonzero(marked)
            if hit.size:
                readers = entry.lanes[hit // entry.many]
                writers = lanes[(marked[hit] - 1) // many]
                parts.append(
                    (spots[hit], readers, np.full(hit.size, entry.time), np.full(hit.size, entry.strong), writers)
                )
        self._marks[written] = 0
        if not parts:
            return None
        return Conflicts(*(np.concatenate([part[i] for part in parts]) for i in range(5)))
