"""Serves a workload with the real Scheduler over a virtual cache, on a virtual clock."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pagedkv.errors import PagedKVError, RequestTooLarge
from pagedkv.lab.replay.progress import Progress
from pagedkv.lab.simulate.found import PLACES, by_place, bytes_by_group, place_of
from pagedkv.lab.simulate.hardware import Hardware
from pagedkv.lab.simulate.links import TIERS
from pagedkv.lab.simulate.result import Log, SimResult, summarise
from pagedkv.lab.simulate.systems import System
from pagedkv.lab.simulate.virtual import VirtualGroupCarrier, virtual_cache
from pagedkv.lab.simulate.workload import Workload, own_token
from pagedkv.scheduler import Branch, Plan, Request, Scheduler, SchedulerOptions

SAMPLE_EVERY = 16  # steps, between looks at the memory
FEW = 8  # requests: then every step is sampled, and a short run has samples at all
PROGRESS_EVERY = 64  # requests


class PagedServer:
    """One run.

    The clock: a step takes what the hardware says; demotions run beside it, so that the longer of the two counts.
    Promotions run beside steps, each on its link; where a call of the scheduler waits for one, so does everything.
    """

    def __init__(
        self,
        workload: Workload,
        system: System,
        hardware: Hardware,
        block_size: int,
        max_running: int,
        max_batch_tokens: int,
        progress: Progress,
    ) -> None:
        self.workload = replace(workload, shared=system.shared)
        self.system, self.hardware, self.progress = system, hardware, progress
        blocks = hardware.blocks(block_size)
        if not system.tiered:
            blocks = [blocks[0], 0, 0]
        self.blocks = blocks
        self.cache, self.carrier = virtual_cache(
            blocks, block_size, hardware, max_running + 8, by_group=system.by_group
        )  # fmt: skip
        self.roofline = hardware.roofline()
        self.now = 0.0
        options = SchedulerOptions(
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            admission="prompt" if system.preempts else "worst_case",
            preemption=system.preemption,
            loading_share=SchedulerOptions().loading_share if system.loads_beside else 0.0,
            share=system.share,
        )
        self.scheduler = Scheduler(self.cache, options, clock=lambda: self.now)
        self.arrivals = self.workload.arrivals_s
        self.log = Log(self.arrivals)
        self.index: dict[Request, int] = {}
        self.live: set[Request] = set()
        self.lanes: Sequence[Branch] = ()
        self.own = np.empty(0, np.int32)  # what each of these lanes generates
        self.refused = self.steps = self.arrived = self.done = self.unsampled = 0
        self.since_sample = self.stalled_s = 0.0
        self.found = np.zeros((len(self.arrivals), len(PLACES)), np.int64)

    def run(self) -> SimResult:
        """Serve everything."""
        start = time.perf_counter()
        count = len(self.workload)
        while self.arrived < count or self.scheduler.has_work:
            while self.arrived < count and self.arrivals[self.arrived] <= self.now:
                self._arrive()
            if not self.scheduler.has_work:
                if self.arrived < count:
                    self.now = max(self.now, float(self.arrivals[self.arrived]))
                continue
            self._step()
        self.progress.advance(self.done % PROGRESS_EVERY)
        result = self._result(time.perf_counter() - start)
        self.cache.close()
        return result

    def _arrive(self) -> None:
        i = self.arrived
        self.arrived += 1
        _, output = self.workload.num_tokens(i)
        try:
            request = self.scheduler.submit(self.workload.prompt(i), output)
        except RequestTooLarge:
            self.refused += 1
            self._one_done()
            return
        self.index[request] = i
        self.live.add(request)

    def _step(self) -> None:
        began = self.carrier.now = self.now
        plan = self.scheduler.schedule()
        if not plan:
            self._wait(began)
            return
        with self.scheduler.step(plan) as step:
            for layer in range(self.cache.spec.num_layers):
                step.mark_written(layer)
            seq_lens = step.seq_lens
            compute_s = self.roofline.step_s(plan.q_lens, seq_lens)
        self._measure(plan, compute_s)
        self.stalled_s += self.carrier.now - began  # in calls that waited for a promotion
        self.now = self.carrier.now + max(compute_s, self.carrier.take_down_s())
        seconds = self.now - began
        self.steps += 1
        for branch in plan.lanes[plan.from_prompt :]:
            i = self.index[branch.request]
            if np.isnan(self.log.first_s[i]):
                self.log.first_s[i] = self.now
        self.since_sample += seconds
        self.unsampled += 1
        if self.unsampled == SAMPLE_EVERY or len(self.live) <= FEW:
            self._sample()
        if plan.lanes != self.lanes:  # in most steps they are the same as before
            self.lanes = plan.lanes
            self.own = np.array([own_token(self.index[branch.request]) for branch in plan.lanes], np.int32)
        for request in self.scheduler.report(plan, self.own):
            self._end(request)

    def _wait(self, began: float) -> None:
        """Nothing can run before a load is over or a request comes."""
        comes = float(self.arrivals[self.arrived]) if self.arrived < len(self.arrivals) else math.inf
        until = min(self.carrier.next_end(), comes)
        if math.isinf(until):
            raise PagedKVError(f"the simulated server stands still: {self.scheduler.stats()}")
        self.now = max(self.carrier.now, until)
        self.since_sample += self.now - began

    def _measure(self, plan: Plan, compute_s: float) -> None:
        """Tell the cache's cost model how long prompts take, as a server would."""
        chunks = len(plan.batch) - plan.from_prompt
        tokens = plan.num_tokens - plan.from_prompt
        if chunks and tokens >= 128:
            self.cache.observe_prefill(tokens, compute_s)

    def _sample(self) -> None:
        used = sum(
            branch.seq.num_computed
            for request in self.live
            if request.state == "running"
            for branch in request.branches
            if branch.seq is not None
        )
        held: float
        if isinstance(self.carrier, VirtualGroupCarrier):
            held = self.carrier.held_bytes(self.cache) / self.hardware.model.kv_bytes_per_token
        else:
            held = self.cache.stats().blocks["device"]["live"] * self.cache.spec.block_size
        self.log.sample(self.since_sample, used, held, self.scheduler.stats().sequences)
        self.since_sample, self.unsampled = 0.0, 0

    def _end(self, request: Request) -> None:
        i = self.index.pop(request)
        self.log.ended_s[i] = self.now
        self.live.discard(request)
        for tier, tokens in request.hit_tokens.items():
            self.found[i, place_of(tier)] += tokens
        self._one_done()

    def _one_done(self) -> None:
        self.done += 1
        if self.done % PROGRESS_EVERY == 0:
            self.progress.advance(PROGRESS_EVERY)

    def _result(self, wall_s: float) -> SimResult:
        lengths = np.array([self.workload.num_tokens(i) for i in range(len(self.workload))], np.int64)
        prompts, outputs = lengths[:, 0], lengths[:, 1]
        stats, cached = self.scheduler.stats(), self.cache.stats()
        served = ~np.isnan(self.log.ended_s)
        found = self.found.sum(axis=0)
        rates = dict(zip(PLACES, (found / max(1, int(prompts[served].sum()))).tolist(), strict=True))
        needed = int((prompts + outputs - 1)[served].sum() - found.sum()) - stats.shared_tokens
        again = sum(cached.hit_tokens.get(tier, 0) for tier in TIERS) - int(found[1:].sum())
        block_size = self.cache.spec.block_size
        parameters: dict[str, object] = {
            "blocks": {tier: count for tier, count in zip(PLACES, self.blocks, strict=True) if count}
        }
        num_bytes, lagging = self.found * self.hardware.model.kv_bytes_per_token, None
        if isinstance(self.carrier, VirtualGroupCarrier):
            layout, lagging = self.carrier.layout, cached.lagging_tokens
            num_bytes = bytes_by_group(self.found, layout.groups)
            parameters |= {"extent_bytes": layout.extent_bytes, "pages_per_extent": list(layout.per_extent)}
        return summarise(
            self.system.name, self.log, outputs, prompts, self.blocks[0] * block_size, self.refused,
            hit_rate={**rates, "total": sum(rates.values())},
            preemptions={"swap": stats.preempted_by_swap, "recompute": stats.preempted_by_recompute},
            computed_tokens=cached.computed_tokens,
            recomputed_tokens=cached.computed_tokens - needed,
            restored_blocks=again // block_size,
            moved_bytes=dict(cached.moved_bytes),
            found=by_place(
                self.found, prompts, self.log.first_s - self.log.arrived_s, self.hardware.tiers, num_bytes,
            ),
            steps=self.steps,
            stalled_s=self.stalled_s,
            wall_s=round(wall_s, 3),
            parameters=parameters,
            lagging_tokens=lagging,
        )  # fmt: skip
