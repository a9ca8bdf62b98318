"""The same workload with one contiguous KV region per request.

As servers had it before paging.

A region is taken first-fit when a request begins and given back when it ends; it is as long as the longest request
(``max``), as the request's final length rounded up to a power of two (``pow2``), or exactly that (``exact``, which
no server can know beforehand). Requests begin in the order they came, as soon as there is a hole for them. Steps are
filled as the scheduler fills them: a token for everyone who decodes, then chunks of prompts.

Steps that differ only in their lengths are reckoned together: as long as no request comes, ends, or is done with its
prompt, all get as many tokens in each of them. The sums are those of one step after the other, to the last bit.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from pagedkv.lab.replay.progress import Progress
from pagedkv.lab.simulate.hardware import Hardware
from pagedkv.lab.simulate.result import Log, SimResult, clock, summarise
from pagedkv.lab.simulate.systems import System
from pagedkv.lab.simulate.workload import Workload

PROGRESS_EVERY = 64  # requests
MOST_TOGETHER = 1024  # steps


class Regions:
    """A line of `size` token slots, and the regions taken of it: first fit."""

    def __init__(self, size: int) -> None:
        self.size, self.held = size, 0
        self._taken: list[tuple[int, int]] = []  # start and end, in order

    def take(self, length: int) -> int:
        """Where a region of this length begins; -1 if no hole is long enough."""
        start = 0
        for i, (taken, end) in enumerate(self._taken):
            if taken - start >= length:
                self._taken.insert(i, (start, start + length))
                self.held += length
                return start
            start = end
        if self.size - start < length:
            return -1
        self._taken.append((start, start + length))
        self.held += length
        return start

    def give_back(self, start: int) -> None:
        """The region that begins there is free."""
        at = bisect.bisect_left(self._taken, (start, 0))
        self.held -= self._taken[at][1] - start
        del self._taken[at]


@dataclass(slots=True)
class Running:
    """A request with a region.

    Where it begins, tokens computed, of the prompt, and still to generate.
    """

    i: int
    start: int
    computed: int
    prompt: int
    left: int


def region_length(reserve: str, prompt: int, output: int, longest: int) -> int:
    """Slots that are reserved for a request."""
    if reserve == "max":
        return longest
    return prompt + output if reserve == "exact" else 1 << (prompt + output - 1).bit_length()


class ContiguousServer:
    """One run; requests whose region no empty device could take, or is too short, are refused.

    Parameters
    ----------
    workload, system, hardware, progress
    longest : tokens of the regions of the system that reserves the longest.
    max_running, max_batch_tokens : of a step.
    together : False reckons every step by itself, for tests.
    """

    def __init__(
        self,
        workload: Workload,
        system: System,
        hardware: Hardware,
        longest: int,
        max_running: int,
        max_batch_tokens: int,
        progress: Progress,
        together: bool = True,
    ) -> None:
        self.system, self.longest, self.progress, self.together = system, longest, progress, together
        self.max_running, self.max_batch_tokens = max_running, max_batch_tokens
        self.roofline = hardware.roofline()
        self.slots = hardware.kv_bytes // hardware.model.kv_bytes_per_token
        self.regions, self.arrivals = Regions(self.slots), workload.arrivals_s
        self.lengths = [workload.num_tokens(i) for i in range(len(workload))]
        self.log = Log(self.arrivals)
        self.waiting: deque[int] = deque()
        self.running: list[Running] = []
        self.now = 0.0
        self.steps = self.refused = self.computed_tokens = self.arrived = self.done = 0

    def run(self) -> SimResult:
        """Serve everything."""
        began, count = time.perf_counter(), len(self.lengths)
        while self.arrived < count or self.waiting or self.running:
            while self.arrived < count and self.arrivals[self.arrived] <= self.now:
                self._arrive()
            self._begin()
            if self.running:
                self._step()
            elif self.arrived < count:
                self.now = max(self.now, float(self.arrivals[self.arrived]))
        self.progress.advance(count - self.done // PROGRESS_EVERY * PROGRESS_EVERY)
        lengths = np.array(self.lengths, np.int64)
        return summarise(
            self.system.name, self.log, lengths[:, 1], lengths[:, 0], self.slots, self.refused,
            hit_rate={"total": 0.0}, preemptions={"swap": 0, "recompute": 0}, computed_tokens=self.computed_tokens,
            moved_bytes={}, steps=self.steps, wall_s=round(time.perf_counter() - began, 3),
            parameters={"slots": self.slots, "longest": self.longest},
        )  # fmt: skip

    def _region(self, i: int) -> int:
        return region_length(self.system.reserve, *self.lengths[i], self.longest)

    def _arrive(self) -> None:
        i, self.arrived = self.arrived, self.arrived + 1
        if sum(self.lengths[i]) <= self._region(i) <= self.slots:
            self.waiting.append(i)
        else:
            self.refused += 1

    def _begin(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            i = self.waiting[0]
            start = self.regions.take(self._region(i))
            if start < 0:
                return
            self.running.append(Running(self.waiting.popleft(), start, 0, *self.lengths[i]))

    def _step(self) -> None:
        """One step, and those after it that are the same but for their lengths."""
        takes, most = self._takes()
        q, before = np.array(takes, np.int64), np.array([r.computed for r in self.running], np.int64)
        tokens, context = sum(takes), before + q
        j = np.arange(most if self.together else 1, dtype=np.float64)
        keys = (int(q @ (2 * context - q + 1)) + 2 * int(q @ q) * j) / 2
        read = int(context[q > 0].sum()) + tokens * j
        short = self.roofline.short_work(q, context + q * np.arange(len(j))[:, None]) if self.roofline.short else ()
        seconds = self.roofline.run_s(tokens, keys, read, *short)
        times = clock(self.now, seconds)
        if self.arrived < len(self.arrivals):  # who comes meanwhile may begin in the next step
            seconds = seconds[: int(np.searchsorted(times, self.arrivals[self.arrived])) + 1]
        count = len(seconds)
        used = int(before.sum()) + tokens * (j[:count] + 1)
        self.log.sample_run(seconds, used, self.regions.held, len(self.running))
        self.steps, self.computed_tokens = self.steps + count, self.computed_tokens + count * tokens
        self.now = float(times[count - 1])
        self._advance(takes, count)

    def _takes(self) -> tuple[list[int], int]:
        """Tokens of each in the next step, and for how many steps that stays so."""
        decoding = sum(r.computed >= r.prompt for r in self.running)
        budget, takes, most = self.max_batch_tokens - decoding, [], MOST_TOGETHER
        for r in self.running:
            if r.computed >= r.prompt:
                takes.append(1)
                most = min(most, r.left)
            else:
                take = min(r.prompt - r.computed, budget)
                budget -= take
                takes.append(take)
                if take:
                    most = min(most, (r.prompt - r.computed) // take)
        return takes, most

    def _advance(self, takes: list[int], count: int) -> None:
        """Give all so many tokens more, `count` times.

        With the last of them, some may begin to decode or end.
        """
        for r, take in zip(self.running, takes, strict=True):
            decoded = r.computed >= r.prompt
            r.computed += count * take
            if r.computed < r.prompt:
                continue
            if np.isnan(self.log.first_s[r.i]):
                self.log.first_s[r.i] = self.now
            r.left -= count if decoded else 1
            if not r.left:
                self._end(r)
        self.running = [r for r in self.running if r.left]

    def _end(self, r: Running) -> None:
        self.log.ended_s[r.i] = self.now
        self.regions.give_back(r.start)
        self.done += 1
        if self.done % PROGRESS_EVERY == 0:
            self.progress.advance(PROGRESS_EVERY)
