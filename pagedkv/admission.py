"""What is worth writing to the disk tier. A demotion that is refused drops its blocks: a miss later, and counted.

Only a run that nothing continues is ever refused for its own sake. One that others continue is written in any case:
without it what hangs on it, part of which may be on the disk already, could not be matched any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from pagedkv.cost_model import CostModel

Mode: TypeAlias = Literal["all", "cost", "second_hit"]

DAY_S = 24 * 60 * 60
BURST_S = 60 * 60  # so much of the daily allowance may be used at once


class WriteBudget:
    """Bytes that may be written per day: a token bucket that holds an hour's share, or one block, and starts full.

    What a full bucket cannot hold it gives all the same, and owes until then. Each opening of a cache starts anew.

    Parameters
    ----------
    bytes_per_day : int
    block_bytes : what writing one block takes, header and all.
    clock : monotonic seconds.
    """

    def __init__(self, bytes_per_day: int, block_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_day / DAY_S
        self._room = max(self._rate * BURST_S, float(block_bytes))
        self._clock = clock
        self._left, self._seen = self._room, clock()

    def take(self, num_bytes: int, *, overdraw: bool = False) -> bool:
        """Whether that may be written now; with `overdraw` it may, and what is owed is paid before anything else."""
        now = self._clock()
        self._left = min(self._room, self._left + (now - self._seen) * self._rate)
        self._seen = now
        if num_bytes > self._left and not overdraw and self._left < self._room:  # a full bucket gives to any run
            return False
        self._left -= num_bytes
        return True


class Admission:
    """Says of each demotion to the disk whether it is written. Any thread may call it.

    Parameters
    ----------
    mode : ``"all"``, ``"cost"`` (what could be loaded faster than computed) or ``"second_hit"`` (what some request has
        found, or computed again, since it was committed).
    costs : CostModel
    block_bytes : int
    budget : WriteBudget, optional
    """

    def __init__(self, mode: Mode, costs: CostModel, write_bytes: int, budget: WriteBudget | None = None) -> None:
        self._mode, self._costs, self._write_bytes, self._budget = mode, costs, write_bytes, budget
        self._lock = threading.Lock()
        self._refused = {"refused_by_admission": 0, "refused_by_write_budget": 0}

    def admits(self, tier: int, num_blocks: int, depth: int, continued: bool, matched: bool) -> bool:
        """Whether to write a run of `num_blocks` blocks to `tier`.

        Parameters
        ----------
        depth : blocks of its prefix before it.
        continued : whether other runs continue it.
        matched : whether it was asked for again since it was committed.
        """
        deserved = continued or self._deserves(tier, num_blocks, depth, matched)
        with self._lock:
            if not deserved:
                self._refused["refused_by_admission"] += num_blocks
                return False
            if self._budget is None or self._budget.take(num_blocks * self._write_bytes, overdraw=continued):
                return True
            self._refused["refused_by_write_budget"] += num_blocks
            return False

    def refused(self) -> dict[str, int]:
        """Blocks refused so far, by reason."""
        with self._lock:
            return dict(self._refused)

    def _deserves(self, tier: int, num_blocks: int, depth: int, matched: bool) -> bool:
        if self._mode == "cost":
            return self._costs.worth_writing(depth, num_blocks, tier)
        return matched or self._mode == "all"
