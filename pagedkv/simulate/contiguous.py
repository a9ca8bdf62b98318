"""The same workload with one contiguous region of KV per request, as servers had it before paging.

A region is taken first-fit when a request begins and given back when it ends; it is as long as the longest request
(``max``), as the request's final length rounded up to a power of two (``pow2``), or exactly that (``exact``, which
nobody can know beforehand). Requests begin in the order they came, as soon as there is a hole for them. Steps are
filled as the scheduler fills them: a token for everyone who decodes, then chunks of prompts.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass

import numpy as np

from pagedkv.replay.progress import Progress
from pagedkv.simulate.hardware import Hardware
from pagedkv.simulate.result import Log, SimResult, summarise
from pagedkv.simulate.systems import System
from pagedkv.simulate.workload import Workload

PROGRESS_EVERY = 64  # requests


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
    """A request with a region: where it begins, tokens computed, of the prompt, and still to generate."""

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


def run_contiguous(
    workload: Workload,
    system: System,
    hardware: Hardware,
    longest: int,
    max_running: int,
    max_batch_tokens: int,
    progress: Progress,
) -> SimResult:
    """Serve everything; requests whose region no empty device could take, or is too short, are refused."""
    began = time.perf_counter()
    slots = hardware.kv_bytes // hardware.model.kv_bytes_per_token
    regions, arrivals, count = Regions(slots), workload.arrivals_s, len(workload)
    log, now, steps, refused, computed_tokens, arrived = Log(arrivals), 0.0, 0, 0, 0, 0
    lengths = np.array([workload.num_tokens(i) for i in range(count)], np.int64)
    waiting: list[int] = []
    running: list[Running] = []
    head = done = 0
    while arrived < count or head < len(waiting) or running:
        while arrived < count and arrivals[arrived] <= now:
            prompt, output = lengths[arrived].tolist()
            length = region_length(system.reserve, prompt, output, longest)
            if length > slots or prompt + output > length:
                refused += 1
            else:
                waiting.append(arrived)
            arrived += 1
        while head < len(waiting) and len(running) < max_running:
            i = waiting[head]
            prompt, output = lengths[i].tolist()
            start = regions.take(region_length(system.reserve, prompt, output, longest))
            if start < 0:
                break
            running.append(Running(i, start, 0, prompt, output))
            head += 1
        if not running:
            if arrived < count:
                now = max(now, float(arrivals[arrived]))
            continue
        q_lens, budget = [], max_batch_tokens - sum(r.computed >= r.prompt for r in running)
        for r in running:
            take = 1 if r.computed >= r.prompt else min(r.prompt - r.computed, budget)
            budget -= take if r.computed < r.prompt else 0
            r.computed += take
            q_lens.append(take)
        q, seqs = np.array(q_lens, np.int32), np.array([r.computed for r in running], np.int32)
        seconds = hardware.step_s(q[q > 0], seqs[q > 0])
        now, steps, computed_tokens = now + seconds, steps + 1, computed_tokens + int(q.sum())
        log.sample(seconds, int(seqs.sum()), regions.held, len(running))
        for r in running:
            if r.computed >= r.prompt:
                if np.isnan(log.first_s[r.i]):
                    log.first_s[r.i] = now
                r.left -= 1
                if not r.left:
                    log.ended_s[r.i] = now
                    regions.give_back(r.start)
                    done += 1
                    if done % PROGRESS_EVERY == 0:
                        progress.advance(PROGRESS_EVERY)
        running = [r for r in running if r.left]
    progress.advance(count - done // PROGRESS_EVERY * PROGRESS_EVERY)
    return summarise(
        system.name, log, lengths[:, 1], lengths[:, 0], slots, refused,
        hit_rate={"total": 0.0}, preemptions={"swap": 0, "recompute": 0}, computed_tokens=computed_tokens,
        moved_bytes={}, steps=steps, wall_s=round(time.perf_counter() - began, 3),
        parameters={"slots": slots, "longest": longest},
    )  # fmt: skip
