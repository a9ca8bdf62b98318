"""The lanes that run an instruction together.

The simulator keeps one NumPy lane per CUDA thread of the whole grid. A group of lanes at one program counter is an
``Active``: register arithmetic may run over all lanes when every live lane is in the group (``where`` is None), memory
accesses always need the exact lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Lanes = NDArray[np.int64]


class Active:
    """A set of lanes.

    Attributes
    ----------
    mask : which lanes; never modified in place.
    count : how many.
    full : all lanes of the machine.
    where : None if registers of every lane may be overwritten (all live lanes take part), else ``mask``.
    """

    __slots__ = ("_index", "_warps", "count", "full", "mask", "where")

    def __init__(self, mask: Mask, live: int, count: int | None = None) -> None:
        self.mask = mask
        self.count = int(np.count_nonzero(mask)) if count is None else count
        self.full = self.count == len(mask)
        self.where = None if self.count == live else mask
        self._index: Lanes | None = None
        self._warps: Lanes | slice | None = None

    @property
    def index(self) -> Lanes:
        """Lane numbers, ascending."""
        if self._index is None:
            self._index = np.flatnonzero(self.mask)
        return self._index

    @property
    def selection(self) -> Lanes | slice:
        """What picks the lanes out of a register row: a whole slice is much cheaper than an index."""
        return slice(None) if self.full else self.index

    @property
    def warps(self) -> Lanes | slice | None:
        """Return the numbers of the warps (a whole slice when all).

        None when some warp is here only in part.
        """
        if self._warps is None:
            if self.full:
                self._warps = slice(None)
            else:
                rows = self.mask.reshape(-1, 32)
                some = rows.any(axis=1)
                if np.count_nonzero(some) * 32 != self.count:
                    return None
                self._warps = np.flatnonzero(some)
        return self._warps

    def take(self, row: NDArray[Any]) -> NDArray[Any]:
        """A register row's (or a constant's) values of these lanes: a view when all take part."""
        if row.ndim == 0:
            return np.broadcast_to(row, (self.count,))
        return row if self.full else row[self.index]

    def put(self, row: NDArray[Any], values: NDArray[Any]) -> None:
        """Store one value per lane of this set."""
        if self.full:
            row[...] = values
        else:
            row[self.index] = values


def merge(row: NDArray[Any], active: Active, values: NDArray[Any]) -> None:
    """Store full-width results (one per lane of the machine) for the active lanes."""
    if active.where is None:
        row[...] = values
    else:
        np.putmask(row, active.where, values)
