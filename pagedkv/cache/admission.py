"""Decides which blocks are worth writing to the disk tier.

A run is written and judged together with the blocks of its prefix that the disk lacks: all of them or none.
A demotion that is refused drops its blocks: a miss later, and counted. A copy that is refused stays where it is.

A demotion is never refused for its own sake where hotter runs continue it: they would be dropped with it.

Judging must not fail a move. A run that could not be judged is written as far as the write budget goes: refusing it
would lose its blocks, and the budget, which protects the disk, holds all the same.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from pagedkv.cache.cost_model import CostModel
from pagedkv.observe.callbacks import Log, came_from_signal
from pagedkv.observe.clock import Passed

log = Log(logging.getLogger("pagedkv.cache"))

Mode: TypeAlias = Literal["all", "cost", "second_hit", "hazard"]
Chance: TypeAlias = Callable[[int, float], float | None]  # of a run's node: that it is used within so many seconds

DAY_S = 24 * 60 * 60
BURST_S = 60 * 60  # so much of the daily allowance may be used at once
COMPARED = 256  # runs of late with which a new one is compared


class Reason(enum.IntEnum):
    """Why a run is written, as the core numbers it."""

    EVICTED = 0  # to make room
    WANTED = 1  # a request has found it, or committed it, and it is copied while it is in memory
    ASKED = 2  # by a checkpoint


class WriteBudget:
    """Bytes that may be written per day.

    A token bucket that holds an hour's share, or one block, and starts full.

    A full bucket also admits a write that is larger than it, and the debt is paid before the next write. Opening a
    cache fills the bucket.

    Parameters
    ----------
    bytes_per_day : int
    block_bytes : what writing one block takes, header and all.
    clock : seconds; one that goes back costs nothing and wins nothing.
    """

    def __init__(self, bytes_per_day: int, block_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_day / DAY_S
        self._room = max(self._rate * BURST_S, float(block_bytes))
        self.now = Passed(clock)  # seconds since it was made
        self._left, self._seen = self._room, 0.0

    def take(self, num_bytes: int, *, overdraw: bool = False, spare: bool = False) -> bool:
        """Whether that may be written now.

        With `overdraw` it may, and pays the debt before anything else. With `spare` the lower half of the bucket stays
        for others.
        """
        now = self.now()
        self._left = min(self._room, self._left + (now - self._seen) * self._rate)
        self._seen = now
        left = self._left - self._room / 2 if spare else self._left
        if num_bytes > left and not overdraw and self._left < self._room:  # a full bucket gives to any run
            return False
        self._left -= num_bytes
        return True

    def to_spend(self, since: float) -> float:
        """Bytes to write between `since`, by `now`, and now.

        The rate's, and what makes the bucket half full in the long run.
        """
        now = self.now()
        left = min(self._room, self._left + (now - self._seen) * self._rate)
        return (now - since) * self._rate + left - self._room / 2


class Turnover:
    """How long a block lives in a tier, from how fast the tier is written.

    Parameters
    ----------
    num_blocks : of the tier.
    clock : seconds.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_blocks, self._now = num_blocks, Passed(clock)
        self._written, self._since = 0.0, 0.0

    def add(self, num_blocks: int) -> None:
        """So many were written."""
        self._written += num_blocks
        if self._written > self._num_blocks:  # the writes before the last filling count half
            now = self._now()
            self._written, self._since = self._written / 2, now - (now - self._since) / 2

    def lifetime_s(self) -> float:
        """Seconds from a block's writing to its loss.

        A day before anything is known, and 30 days at most.
        """
        passed = self._now() - self._since
        if not self._written or passed <= 0:
            return float(DAY_S)
        return min(passed * self._num_blocks / self._written, 30.0 * DAY_S)


class Likeliest:
    """For the mode ``hazard``: whether a run is worth writing.

    Its chance of being used while the disk has it must make up for the write.

    Writing is taken to cost what loading costs. Where bytes per day are limited, a run must also be among the best of
    late per byte: those that the allowance suffices for.

    Parameters
    ----------
    chance : see :data:`Chance`; None where nothing is known of a run.
    lives : Turnover
        Of the tier.
    costs : CostModel
    budget : WriteBudget, optional
    """

    def __init__(self, chance: Chance, lives: Turnover, costs: CostModel, budget: WriteBudget | None) -> None:
        self._chance, self.lives, self._costs, self._budget = chance, lives, costs, budget
        self._late: deque[tuple[float, float, int]] = deque(maxlen=COMPARED)  # when, value per byte, bytes

    def value(self, node: int, depth: int, num_blocks: int, tier: int) -> float | None:
        """Work that writing a run is expected to save, less what writing it costs.

        None where nothing is known of it.

        While one of the rates is not known, loading and writing count as free.
        """
        chance = self._chance(node, self.lives.lifetime_s())
        if chance is None:
            return None
        load = self._costs.load_work(num_blocks, tier) or 0.0
        return chance * max(0.0, self._costs.work(depth, num_blocks) - load) - load

    def is_among_the_best(self, value: float, num_bytes: int) -> bool:
        """Whether the allowance has room for this run after recent runs worth more per byte.

        The run counts as one of them from now on.
        """
        if self._budget is None:
            return True
        self._late.append((self._budget.now(), value / num_bytes, num_bytes))
        since, per_byte, sizes = (np.array(column) for column in zip(*self._late, strict=True))
        return float(sizes[per_byte > value / num_bytes].sum()) < self._budget.to_spend(float(since[0]))


class Admission:
    """Says of each run that is to go to the disk whether it is written. Any thread may call it.

    Parameters
    ----------
    mode : ``"all"``, ``"cost"`` (runs that load faster than they compute), ``"second_hit"`` (runs that some request has
        found, or computed again, since they were committed) or ``"hazard"`` (the choice of `likeliest`; where it knows
        nothing of a run, as ``"cost"``).
    costs : CostModel
    write_bytes : of a block, header and all.
    budget : WriteBudget, optional
    likeliest : Likeliest, for the mode ``"hazard"``
    copies : whether runs are also written while they are in memory. Those then have the write budget before evicted
        runs, which may use the upper half of it.

    Attributes
    ----------
    failures : int
        Times that judging a run, or asking the budget, raised an Exception.
    """

    def __init__(
        self,
        mode: Mode,
        costs: CostModel,
        write_bytes: int,
        budget: WriteBudget | None = None,
        likeliest: Likeliest | None = None,
        *,
        copies: bool = False,
    ) -> None:
        self._mode, self._costs, self._write_bytes, self._budget = mode, costs, write_bytes, budget
        self._likeliest, self._copies = likeliest, copies
        self._lock = threading.RLock()  # the clock and log handlers, which are called with it, may ask for `refused`
        self._refused = {"refused_by_admission": 0, "refused_by_write_budget": 0}
        self.failures = 0

    def admits(
        self,
        tier: int,
        num_blocks: int,
        depth: int,
        continued: bool,
        matched: bool,
        node: int = -1,
        reason: Reason = Reason.EVICTED,
        num_bytes: int | None = None,
    ) -> bool:
        """Whether to write a run to `tier`, with the blocks of its prefix that it lacks.

        An Exception in here is counted, the first one is logged, and none comes out, save those of signal handlers. A
        run that could not be judged is written if the budget affords it; where the budget itself fails, what others
        continue is written and nothing else.

        Parameters
        ----------
        num_blocks : that would be written, its prefix's among them. 0: a tail of groups of layers alone, without which
            its whole prefix would be of no use: the budget alone is asked.
        depth : blocks of its prefix that the tier has.
        continued : whether hotter runs continue it, and would be dropped with it.
        matched : whether it was asked for again since it was committed.
        node : its node in the tree.
        reason : a checkpoint asks the budget alone.
        num_bytes : that would be written; default: those of the blocks.
        """
        likeliest = self._likeliest
        num_bytes = num_blocks * self._write_bytes if num_bytes is None else num_bytes
        deserves = affordable = True
        in_any_case = continued or reason is Reason.ASKED or not num_blocks
        spare = self._copies and reason is Reason.EVICTED
        with self._lock:
            try:
                value = likeliest.value(node, depth, num_blocks, tier) if likeliest and not in_any_case else None
                deserves = in_any_case or self._deserves(tier, num_blocks, depth, matched, value)
                if deserves and likeliest is not None and value is not None:
                    affordable = likeliest.is_among_the_best(value, num_bytes)
            except Exception as problem:
                self._failed(problem)
            if not deserves:
                self._refused["refused_by_admission"] += num_blocks
                return False
            try:
                affordable = affordable and (
                    self._budget is None or self._budget.take(num_bytes, overdraw=continued, spare=spare)
                )
                if affordable and likeliest is not None:
                    likeliest.lives.add(num_blocks)
            except Exception as problem:
                self._failed(problem)
                affordable = continued
            if not affordable:
                self._refused["refused_by_write_budget"] += max(num_blocks, 1)
            return affordable

    def _failed(self, problem: Exception) -> None:
        if came_from_signal(problem):
            raise problem
        self.failures += 1
        if self.failures == 1:
            log.warning("what goes to the disk could not be judged; it is written as far as the write budget goes",
                        exc_info=problem)  # fmt: skip

    def refused(self) -> dict[str, int]:
        """Blocks refused so far, by reason."""
        with self._lock:
            return dict(self._refused)

    def _deserves(self, tier: int, num_blocks: int, depth: int, matched: bool, value: float | None) -> bool:
        if value is not None:
            return value > 0
        if self._mode in ("cost", "hazard"):
            return self._costs.worth_writing(depth, num_blocks, tier)
        return matched or self._mode == "all"
