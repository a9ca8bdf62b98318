"""Workload f on pagedkv: open, step, commit, append, release, as a scheduler calls them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    """The running requests over one table; a prompt is computed in the step of everybody's next token."""

    def __init__(self, scale: Scale) -> None:
        self.pool = BlockPool(scale.pool_blocks)
        self.placement = Placement(RadixTree(BLOCK_SIZE), [self.pool])
        self.table = BlockTable(self.placement, scale.running)
        self.num_hit = 0

    def admit(self, prompt: list[int]) -> int:
        row, num_cached = self.table.open(prompt)
        self.num_hit += num_cached
        return row

    def step(self, handles: list[int], sampled: list[int]) -> None:
        """One step: room, the arrays, the commit of what it wrote, and the tokens it sampled."""
        rows = np.array(handles, np.int64)
        missing = self.table.blocks_needed(rows)
        if missing and self.placement.reserve(missing):
            raise RuntimeError(f"the pool cannot give {missing} blocks: the trace does not fit this scale")
        self.table.step(rows)
        self.table.commit(rows)
        self.table.append(rows, sampled)


def replay_trace(
    trace: list[tuple[list[int], list[int]]], scale: Scale, *, cached: bool = True
) -> tuple[float, float]:
    """CPU seconds and token hit ratio of the trace; without `cached`, the same loop without the table."""
    batch = Batch(scale)
    running: list[Running] = []
    next_idx = num_prompt = 0
    with gc_off():
        start = CPU()
        while next_idx < len(trace) or running:
            while next_idx < len(trace) and len(running) < scale.running:
                prompt, output = trace[next_idx]
                next_idx += 1
                num_prompt += len(prompt)
                running.append(Running(batch.admit(prompt) if cached else 0, output))
            handles = [request.row for request in running]
            sampled = [request.output[request.num_sampled] for request in running]
            if cached:
                batch.step(handles, sampled)
            still = []
            for request in running:
                request.num_sampled += 1
                if request.num_sampled < len(request.output):
                    still.append(request)
                elif cached:
                    batch.table.release(request.row)
            running = still
        elapsed = CPU() - start
    if cached and batch.pool.num_free + batch.placement.stats()["cached_blocks"] != scale.pool_blocks:
        raise RuntimeError("blocks do not add up after the replay: the bench drives the table wrongly")
    return elapsed, batch.num_hit / max(1, num_prompt)
