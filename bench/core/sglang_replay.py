"""Workload f on SGLang.

What its scheduler asks of the tree and the allocator, request by request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.core.sglang_tree import Tree
from bench.core.workloads import BLOCK_SIZE, MAX_PROMPT, Scale
from bench.timing import CPU, gc_off

TREE_CALLS = ("match", "slots", "insert", "lock", "unlock", "evict", "key")
ALLOCATOR_CALLS = ("alloc", "free_segment", "free", "free_page_ids", "alloc_decode")


@dataclass(slots=True)
class Running:
    """One admitted request.

    Its row of slots, what it will decode, and what the tree holds for it.
    """

    row: int
    prompt: list[int]
    output: list[int]
    length: int  # tokens so far; the last one has no KV yet
    num_cached: int = 0
    lock: tuple[Any, Any] | None = None


class Batch:
    """The running requests over one tree.

    Match, lock, allocate, insert after prefill and at the end.
    """

    def __init__(self, tree: Tree, num_rows: int) -> None:
        self.tree = tree
        self.rows = torch.zeros(num_rows, MAX_PROMPT + 512, dtype=torch.int64)
        self.num_hit = 0

    def admit(self, request: Running) -> None:
        tree, row, length = self.tree, self.rows[request.row], request.length
        key = tree.key(request.prompt)
        num_hit, node = tree.match(key[: length - 1])
        lock = tree.lock(node)
        row[:num_hit] = tree.slots(node)
        fresh = tree.allocate(-(-(length - num_hit) // BLOCK_SIZE) * BLOCK_SIZE)
        row[num_hit:length] = fresh[: length - num_hit]
        whole = length // BLOCK_SIZE * BLOCK_SIZE
        _, node = tree.insert(key, row[:whole].clone(), num_hit)  # frees the duplicates itself
        if node is None:
            _, node = tree.match(key[:whole])
        row[num_hit:whole] = tree.slots(node)[num_hit:]
        request.num_cached = whole
        request.lock = tree.lock(node)
        tree.unlock(lock)
        self.num_hit += num_hit

    def step(self, running: list[Running]) -> None:
        tree = self.tree
        lens = torch.tensor([request.length for request in running])
        rows = torch.tensor([request.row for request in running])
        last = self.rows[rows, lens - 1]
        missing = int((lens % BLOCK_SIZE == 0).sum()) * BLOCK_SIZE - tree.allocator.available_size()
        if missing > 0:
            tree.evict(missing)
        self.rows[rows, lens] = tree.allocator.alloc_decode(lens + 1, lens + 1, last)

    def finish(self, request: Running) -> None:
        tree, length = self.tree, request.length - 1
        key = tree.key(request.prompt + request.output[:-1])
        whole = length // BLOCK_SIZE * BLOCK_SIZE
        row = self.rows[request.row, : length + 1].clone()
        tree.insert(key, row[:whole], request.num_cached)
        tail = row[whole:]
        if len(tail):
            tree.allocator.free_page_ids(torch.unique(tail // BLOCK_SIZE))
        if request.lock is not None:
            tree.unlock(request.lock)


class TreeClock:
    """Adds up the CPU time of the tree's calls, without the allocator calls they make inside."""

    def __init__(self, tree: Tree) -> None:
        self.total_s = 0.0
        self._inner: list[float] = []
        for name in TREE_CALLS:
            setattr(tree, name, self._wrap(getattr(tree, name), True))
        for name in ALLOCATOR_CALLS:
            setattr(tree.allocator, name, self._wrap(getattr(tree.allocator, name), False))

    def _wrap(self, call: Callable[..., Any], counted: bool) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = CPU()
            try:
                return call(*args, **kwargs)
            finally:
                elapsed = CPU() - start
                own = elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed
                if counted:
                    self.total_s += own

        return timed_call


def replay_trace(
    trace: list[tuple[list[int], list[int]]], scale: Scale, *, cached: bool = True, timed_tree: bool = False
) -> tuple[float, float, float]:
    """CPU seconds, token hit ratio and CPU seconds in the tree's calls (0 unless `timed_tree`).

    With `cached` False the same loop runs without tree and allocator: the time that is the bench's own.
    """
    tree = Tree(scale.pool_blocks * BLOCK_SIZE)
    clock = TreeClock(tree) if timed_tree else None
    batch = Batch(tree, scale.running)
    free_rows = list(range(scale.running))
    running: list[Running] = []
    next_idx = num_prompt = 0
    with gc_off():
        start = CPU()
        while next_idx < len(trace) or running:
            while next_idx < len(trace) and len(running) < scale.running:
                prompt, output = trace[next_idx]
                next_idx += 1
                request = Running(free_rows.pop(), prompt, output, len(prompt))
                if cached:
                    batch.admit(request)
                    num_prompt += len(prompt)
                running.append(request)
            if cached:
                batch.step(running)
            still = []
            for request in running:
                request.length += 1
                if request.length < len(request.prompt) + len(request.output):
                    still.append(request)
                    continue
                free_rows.append(request.row)
                if cached:
                    batch.finish(request)
            running = still
        elapsed = CPU() - start
    if cached and tree.allocator.available_size() + tree.evictable() != scale.pool_blocks * BLOCK_SIZE:
        raise RuntimeError("SGLang's pages do not add up after the replay: the bench drives it wrongly")
    return elapsed, batch.num_hit / max(1, num_prompt), clock.total_s if clock else 0.0
