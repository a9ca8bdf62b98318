"""Workload f on pagedkv: open, step, advance, commit, release, as a scheduler calls them."""

from __future__ import annotations

from dataclasses import dataclass

from bench.core.workloads import BLOCK_SIZE, Scale
from bench.timing import CPU, gc_off
from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree


@dataclass(slots=True)
class Running:
    """One admitted request: its row, what it will decode, and how much of that is sampled."""

    row: int
    output: list[int]
    num_sampled: int = 0


class Batch:
    """The running requests over one table.

    A prompt is computed in the step that computes the others' next token.
    """

    def __init__(self, scale: Scale) -> None:
        self.pool = BlockPool(scale.pool_blocks)
        self.placement = Placement(RadixTree(BLOCK_SIZE), [self.pool])
        self.table = BlockTable(self.placement, scale.running)
        self.num_hit = 0

    def admit(self, prompt: list[int]) -> int:
        row, num_cached = self.table.open(prompt)
        self.num_hit += num_cached
        return row

    def step(self, decoding: list[int], sampled: list[int], admitted: list[Running]) -> None:
        """One step's arrays: one token per decoding request, the whole prompt of each new one."""
        if decoding:
            self.table.commit(decoding)
            self.table.append(decoding, sampled)
            self.table.step(decoding)
        if admitted:
            self.table.step([request.row for request in admitted])

    def finish(self, finished: list[Running]) -> None:
        """Commit what the last step wrote for these requests, and release them."""
        if finished:
            self.table.commit([request.row for request in finished])
        for request in finished:
            self.table.release(request.row)


def replay_trace(
    trace: list[tuple[list[int], list[int]]], scale: Scale, *, cached: bool = True
) -> tuple[float, float]:
    """CPU seconds and token hit ratio of the trace.

    Without `cached`, the same loop without the table.
    """
    batch = Batch(scale)
    running: list[Running] = []
    next_idx = num_prompt = 0
    with gc_off():
        start = CPU()
        while next_idx < len(trace) or running:
            admitted = []
            while next_idx < len(trace) and len(running) + len(admitted) < scale.running:
                prompt, output = trace[next_idx]
                next_idx += 1
                num_prompt += len(prompt)
                admitted.append(Running(batch.admit(prompt) if cached else 0, output))
            handles = [request.row for request in running]
            sampled = [request.output[request.num_sampled - 1] for request in running]
            if cached:
                batch.step(handles, sampled, admitted)
            finished, still = [], []
            for request in running + admitted:
                request.num_sampled += 1
                (still if request.num_sampled < len(request.output) else finished).append(request)
            if cached:
                batch.finish(finished)
            running = still
        elapsed = CPU() - start
    if cached and batch.pool.num_free + batch.placement.stats()["cached_blocks"] != scale.pool_blocks:
        raise RuntimeError("blocks do not add up after the replay: the bench drives the table wrongly")
    return elapsed, batch.num_hit / max(1, num_prompt)
