"""Performance lint: sectors per global request, wavefronts per shared request.

A model, not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tests.ptxsim.active import Lanes

if TYPE_CHECKING:
    from tests.ptxsim.machine import Machine


@dataclass(slots=True)
class Traffic:
    """Counts of one memory instruction width in one space.

    Attributes
    ----------
    requests : warp-level requests.
    cost : 32-byte sectors (global) or wavefronts (shared).
    ideal : the least they could be for those bytes.
    """

    requests: int = 0
    cost: int = 0
    ideal: int = 0

    @property
    def ratio(self) -> float:
        """How many times the ideal."""
        return self.cost / self.ideal if self.ideal else 1.0


class Stats:
    """Traffic of a launch, by space and access width."""

    def __init__(self) -> None:
        self.traffic: dict[tuple[str, int], Traffic] = {}

    def _row(self, space: str, width: int) -> Traffic:
        return self.traffic.setdefault((space, width), Traffic())

    def global_access(self, m: Machine, addresses: NDArray[np.int64], width: int, lanes: Lanes) -> None:
        """Count the distinct 32-byte sectors that each warp touches."""
        row = self._row("global", width)
        warp = lanes >> 5
        sectors = np.unique(np.stack([warp, addresses >> 5]), axis=1)
        distinct = np.unique(np.stack([warp, addresses]), axis=1)
        row.requests += len(np.unique(warp))
        row.cost += sectors.shape[1]
        _, per_warp = np.unique(distinct[0], return_counts=True)
        row.ideal += int((-(-per_warp * width // 32)).sum())

    def shared_access(self, m: Machine, addresses: NDArray[np.int64], width: int, lanes: Lanes) -> None:
        """Count wavefronts; a bank serves one word at a time.

        8- and 16-byte accesses go by half and quarter warps.
        """
        row = self._row("shared", width)
        words = max(1, width // 4)
        phase = (lanes >> 5) * 8 + (lanes & 31) // (32 // words)
        word = (addresses[:, None] >> 2) + np.arange(words)
        pairs = np.unique(np.stack([np.repeat(phase, words), word.reshape(-1)]), axis=1)
        banks, conflicts = np.unique(pairs[0] * 32 + pairs[1] % 32, return_counts=True)
        phases = np.unique(phase)
        worst = np.zeros(len(phases), np.int64)
        np.maximum.at(worst, np.searchsorted(phases, banks // 32), conflicts)
        row.requests += len(np.unique(lanes >> 5))
        row.cost += int(worst.sum())
        row.ideal += len(phases)

    def report(self) -> str:
        """One line per space and width."""
        names = {"global": "sectors", "shared": "wavefronts"}
        return "\n".join(
            f"{space} {width}-byte: {row.requests} requests, {row.cost} {names[space]}, "
            f"ideal {row.ideal} (x{row.ratio:.2f})"
            for (space, width), row in sorted(self.traffic.items())
        )
