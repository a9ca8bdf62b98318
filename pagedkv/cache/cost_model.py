"""The value of a cached block: seconds to load it against seconds to compute it again.

Arithmetic over measurements.

Computing token x of a prompt again costs ``(1 + x / cost_tokens) / rate`` seconds: attention grows with depth, all else
does not. Loading n bytes costs ``latency + n * slope`` seconds, a line laid through what real loads took.

Why a run of cold blocks is loaded as a whole or not at all: a hit is a prefix, so the choice is only how many blocks k
of the run [a, a + n) to load before computing the rest. The time saved is the cost of computing blocks a .. a + k - 1,
minus ``latency + k * load``. Each further block costs more to compute than the one before and the same to load, so the
saving is a convex function of k, and a convex function is largest at an end of its range: at k = 0, or at k = n.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core.tier import Tier
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.observe.latency import CacheLatencies
from pagedkv.spec.sizes import check_plain, whole_number

REMOTE = int(Tier.REMOTE)
DECAY = 0.9  # weight of everything seen so far when something new is seen
FRESH_S = 600.0  # a load rate not seen for so long is not believed: loads declined because of it could not correct it


class Line:
    """``seconds = latency + slope * amount``, fitted to measurements.

    Least squares whose weights fade.
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Something of this amount took so long."""
        for name, value in (("n", 1.0), ("x", amount), ("y", seconds), ("xx", amount**2), ("xy", amount * seconds)):
            setattr(self, f"_{name}", DECAY * getattr(self, f"_{name}") + value)

    def fit(self) -> tuple[float, float] | None:
        """Latency and slope, neither negative; None before anything was seen."""
        if not self._n:
            return None
        spread = self._n * self._xx - self._x**2
        if spread > 1e-9 * self._n * self._xx:
            slope = (self._n * self._xy - self._x * self._y) / spread
            latency = (self._y - slope * self._x) / self._n
            if slope > 0 and latency >= 0:
                return latency, slope
        return 0.0, self._y / self._x  # all of one size, or no line that makes sense: a rate alone


class CostModel:
    """Measured rates of one cache, and what follows from them. Any thread may call it.

    As long as either rate is not known, everything is worth loading and writing.

    Parameters
    ----------
    block_size, block_bytes : tokens and bytes of a block.
    cost_tokens : tokens of context, more than 0, at which attention costs as much to recompute as everything else.
    prefill_tokens_per_s : the caller's rate at the start of a prompt, where it is known beforehand.
    clock : monotonic seconds.

    Attributes
    ----------
    latencies : CacheLatencies
        Of matches, promotions, reads and writes: for dashboards, and nothing here follows from them.

    Raises
    ------
    WrongType, InvalidArgument
    """

    def __init__(
        self,
        block_size: int,
        block_bytes: int,
        cost_tokens: float,
        prefill_tokens_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_size, self._block_bytes = block_size, block_bytes
        self._cost_tokens = positive(cost_tokens, "cost_tokens")
        self._clock, self._lock = clock, threading.Lock()
        self._lines: dict[int, tuple[Line, float]] = {}  # by tier: the line, and when it was last added to
        self._seconds = self._work = 0.0
        self.latencies = CacheLatencies()
        if prefill_tokens_per_s is not None:
            self._seconds, self._work = 1.0, positive(prefill_tokens_per_s, "prefill_tokens_per_s")

    def observe_move(self, way: tuple[int, int], num_bytes: int, seconds: float, *, whole: bool) -> None:
        """So many bytes went from a tier to another in one ticket, and whether all of it arrived."""
        if Tier.DISK in way:
            upward = way[1] < way[0]
            (self.latencies.disk_read if upward else self.latencies.disk_write).observe(seconds)
        elif way[0] == REMOTE:
            self.latencies.remote_read.observe(seconds)
        if whole and way[1] < way[0]:
            self.observe_load(way[0], num_bytes, seconds)

    def observe_load(self, tier: int, num_bytes: int, seconds: float) -> None:
        """So many bytes came up from `tier` in one go, and this is how long their reader waited."""
        if num_bytes > 0 and seconds > 0:
            with self._lock:
                line, _ = self._lines.setdefault(tier, (Line(), 0.0))
                line.add(num_bytes, seconds)
                self._lines[tier] = line, self._clock()

    def observe_prefill(self, num_tokens: ArrayLike, seconds: float, context: ArrayLike = 0) -> None:
        """So many tokens, after `context` others, were computed in this time.

        Arrays for the sequences of one batch.

        Raises
        ------
        WrongType, InvalidArgument
        """
        if np.ndim(num_tokens) == 0:
            num_tokens = whole_number(num_tokens, "num_tokens", 1, 2**40)
        seconds = positive(seconds, "seconds")
        work = float(np.sum(self._work_of(np.asarray(num_tokens, np.float64), np.asarray(context, np.float64))))
        with self._lock:
            self._seconds, self._work = DECAY * self._seconds + seconds, DECAY * self._work + work

    def rates(self) -> dict[str, float]:
        """The measured rates.

        ``prefill_tokens_per_s`` at a prompt's start, and per tier ``load_bytes_per_s_<tier>`` and
        ``load_latency_s_<tier>``.
        """
        with self._lock:
            known = {"prefill_tokens_per_s": self._work / self._seconds} if self._work else {}
            for tier, (line, _) in self._lines.items():
                latency, slope = line.fit() or (0.0, math.inf)
                known |= {f"load_latency_s_{tier}": latency, f"load_bytes_per_s_{tier}": 1 / slope}
        return known

    def worth_loading(self, tiers: NDArray[np.uint8], *slow: int) -> int:
        """How many leading blocks of a match to bring up, given the tier of each.

        Parameters
        ----------
        tiers : uint8 [n]
        slow : the tiers whose loads are weighed; those of other tiers, or at an unknown rate, count as free.

        Returns
        -------
        int
            The prefix that saves most time. It ends at the end of the match or where a run of slow blocks begins.
        """
        cost = None
        for tier in slow:
            weighed = tiers == int(tier)  # NumPy drops an interrupt while it looks at a Tier
            if not weighed.any() or (known := self._known(tier)) is None:
                continue
            per_token, latency, per_block = known
            cost = per_block * weighed if cost is None else cost + per_block * weighed
            cost[np.argmax(weighed)] += latency
        if cost is None:
            return len(tiers)
        saved = per_token * self._block_work(np.arange(len(tiers))) - cost
        total = np.concatenate(([0.0], np.cumsum(saved)))
        return len(tiers) - int(np.argmax(total[::-1]))  # of equals the longest

    def worth_loading_bytes(self, num_bytes: int, num_blocks: int, tier: int) -> bool:
        """Whether loading so many bytes from `tier` beats computing a prompt's first blocks.

        True while one of the rates is not known.
        """
        if (known := self._known(tier)) is None:
            return True
        per_token, latency, per_block = known
        return latency + per_block * num_bytes / self._block_bytes <= per_token * self.work(0, num_blocks)

    def worth_writing(self, depth: int, num_blocks: int, tier: int) -> bool:
        """Whether loading a prompt's blocks from `tier` can ever beat computing them.

        The blocks are ``[depth, depth + num_blocks)``.

        The latency is left out: a longer load may share it.
        """
        if (known := self._known(tier)) is None:
            return True
        per_token, _, per_block = known
        return per_block * num_blocks <= per_token * self.work(depth, num_blocks)

    def work(self, depth: int, num_blocks: int) -> float:
        """Cost of computing a prompt's blocks, in tokens at a prompt's start.

        The blocks are ``[depth, depth + num_blocks)``.
        """
        return float(np.sum(self._block_work(depth + np.arange(num_blocks))))

    def load_work(self, num_blocks: int, tier: int) -> float | None:
        """Cost of loading so many blocks from `tier`, without its latency.

        In tokens that could be computed at a prompt's start meanwhile; None while one of the rates is not known.
        """
        if (known := self._known(tier)) is None:
            return None
        per_token, _, per_block = known
        return per_block * num_blocks / per_token

    def compute_s(self, num_tokens: int, context: int = 0) -> float | None:
        """Seconds to compute so many tokens after `context` others.

        None while no prefill was measured.
        """
        with self._lock:
            if not self._work:
                return None
            return float(self._work_of(num_tokens, context)) * self._seconds / self._work

    def load_s(self, num_blocks: int, tier: int) -> float | None:
        """Seconds to bring so many blocks up from `tier`.

        None while no load was measured, or not of late.
        """
        with self._lock:
            line, seen = self._lines.get(tier, (None, 0.0))
            if line is None or self._clock() - seen > FRESH_S:
                return None
            latency, slope = line.fit() or (0.0, 0.0)
            return latency + slope * num_blocks * self._block_bytes

    def _known(self, tier: int) -> tuple[float, float, float] | None:
        """Seconds per token at the start, latency and seconds per block of a tier.

        None if one of them is not known.
        """
        with self._lock:
            line, seen = self._lines.get(tier, (None, 0.0))
            if line is None or not self._work or self._clock() - seen > FRESH_S:
                return None
            latency, slope = line.fit() or (0.0, 0.0)
            return self._seconds / self._work, latency, slope * self._block_bytes

    def _block_work(self, blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Work of computing whole blocks by their position, in tokens at the start of a prompt."""
        work: NDArray[np.float64] = self._work_of(float(self._block_size), blocks * float(self._block_size))
        return work

    def _work_of(self, num_tokens: Any, context: Any) -> Any:
        return num_tokens * (1 + (context + num_tokens / 2) / self._cost_tokens)


def positive(value: Any, what: str) -> float:
    """`value` as a float.

    Raises
    ------
    WrongType, InvalidArgument
        It is no finite number above 0.
    """
    check_plain(value, what)
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise WrongType(f"{what} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise InvalidArgument(f"{what} must be a finite number above 0, not {value!s:.40}")
    return number
