"""Drives a KVCache with a trace: real blocks, real moves between real tiers.

Every byte served is checked.

A block id becomes a block of two equal tokens, and every prompt ends with one more token that continues nothing: an
engine always has to compute that one. So all of the trace's blocks can hit, and the extra token lies in a partly filled
block that never enters the tree. For it the device gets one block more.

The cache's clock is the trace's. A request is computed when it comes, releases its blocks at once, and is over as long
after that as its output takes; then the policy hazard is told how long that was, as in the sim engine.

Each block is filled with bytes that follow from its whole prefix (payload.py) when it is computed, and compared on the
device whenever it is served: after promotion, whatever tier it lay in. A wrong byte fails the run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pagedkv.cache.cache import KVCache
from pagedkv.core import requests_of
from pagedkv.errors import InvalidArgument, OutOfBlocks
from pagedkv.lab.replay.capacity import TIER_NAMES, Capacity
from pagedkv.lab.replay.engine_sim import PROGRESS_EVERY, all_counters
from pagedkv.lab.replay.payload import Payload
from pagedkv.lab.replay.progress import Progress
from pagedkv.lab.replay.result import Outcome
from pagedkv.lab.replay.schedule import TOKEN_MS, arrivals_and_ends
from pagedkv.lab.replay.trace import Int32, Int64, Trace
from pagedkv.spec.budgets import Disk
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.paths import nearest_existing
from pagedkv.spec.sizes import Blocks, format_size

TOKENS = 2  # per block: enough for a block to be partly filled
LAST_TOKEN = np.iinfo(np.int32).max
HEAD_DIM = 512
MEMORY_SHARE = 0.8  # of what is available, at most


class RealCache:
    """A KVCache, and the contents that its blocks should have.

    Attributes
    ----------
    wrong_bytes, verified_bytes : of the blocks served so far.
    bookkeeping_ns : CPU time of this thread inside the cache's calls; copying in other threads is not in it.
    squeezed : requests that the cache had no room for.
    """

    def __init__(self, cache: KVCache, payload: Payload, longest: int) -> None:
        self.cache, self._payload, self._longest = cache, payload, longest
        self._requests = requests_of(cache.table)
        self.wrong_bytes = self.verified_bytes = self.bookkeeping_ns = self.squeezed = 0

    def request(self, path: Int32, session: int = -1) -> tuple[int, Int64, int]:
        """Serve one request.

        Returns its hit blocks, how many of them lay in each tier (int64 [3]), and the handle under which the policy
        hazard is told its output (-1: it is not).
        """
        path = path[: self._longest]
        prompt = np.append(np.repeat(path, TOKENS), np.int32(LAST_TOKEN))
        clock = time.thread_time_ns
        start = clock()
        try:
            sequence = self.cache.sequence(prompt, session=None if session < 0 else session)
        except OutOfBlocks:
            self.squeezed += 1
            return 0, np.zeros(len(TIER_NAMES), np.int64), -1
        with sequence:
            hit = sequence.num_computed // TOKENS
            blocks = sequence.blocks
            self.bookkeeping_ns += clock() - start
            self._verify(path[:hit], blocks[:hit])
            start = clock()
            try:
                with self.cache.step([sequence]) as step:
                    blocks = step.block_tables[0]
                    self.bookkeeping_ns += clock() - start
                    self._payload.fill_path(path[hit:], self.cache.device_arena, blocks[hit : len(path)])
                    start = clock()
                    step.mark_written(0)
            except OutOfBlocks:
                self.squeezed += 1
            visit = -1 if self._requests is None else self._requests.depart(sequence.row)
        self.bookkeeping_ns += clock() - start
        tokens = sequence.hit_tokens
        return hit, np.array([tokens.get(name, 0) // TOKENS for name in TIER_NAMES], np.int64), visit

    def _verify(self, path: Int32, blocks: Int32) -> None:
        arena = self.cache.device_arena
        self.wrong_bytes += self._payload.wrong_in_path(path, arena, blocks)
        self.verified_bytes += len(path) * arena.shape[1]


def run_real(
    trace: Trace,
    policy: str,
    capacity: Capacity,
    *,
    demotion: str,
    inclusive: tuple[str, ...],
    block_bytes: int,
    cost_blocks: float,
    progress: Progress,
) -> Outcome:
    """Replay the trace from an empty cache with payloads of ``block_bytes``.

    Raises
    ------
    InvalidArgument : the tiers do not fit in this machine's memory or disk; nothing was allocated.
    """
    device, host, disk = (min(blocks, trace.num_unique) for blocks in capacity.blocks)
    _require_room(device + 1 + host, disk, block_bytes, capacity.disk_dir)
    spec = KVSpec(1, block_bytes // (4 * TOKENS * HEAD_DIM), HEAD_DIM, "float16", TOKENS, model="replay")
    hits = np.zeros(trace.num_requests, np.int32)
    tier_hits = np.zeros(len(TIER_NAMES), np.int64)
    outputs, arrivals = trace.output_tokens.tolist(), np.maximum.accumulate(trace.t_ms).tolist()
    now_ms = 0.0
    with (
        _folder(disk, capacity.disk_dir) as folder,
        KVCache(
            spec,
            Blocks(device + 1),
            Blocks(host) if host else None,
            Disk(folder, Blocks(disk)) if folder else None,
            policy=policy,
            demotion=demotion,
            inclusive=[name in inclusive for name in TIER_NAMES],
            partial_hits=False,
            max_sequences=1,
            cost_tokens=TOKENS * cost_blocks,
            clock=lambda: now_ms / 1000,
        ) as cache,
    ):
        real = RealCache(cache, Payload(trace, block_bytes), device)
        visits: dict[int, int] = {}
        hazard = cache.placement.hazard
        for event in arrivals_and_ends(trace, TOKEN_MS).tolist():
            i = max(event, ~event)
            if event < 0:
                now_ms = arrivals[i] + TOKEN_MS * outputs[i]
                visit = visits.pop(i)
                if visit >= 0 and hazard is not None:
                    hazard.report(visit, outputs[i])
                continue
            now_ms = arrivals[i]
            hits[i], by_tier, visits[i] = real.request(trace.path(i), int(trace.sessions[i]))
            tier_hits += by_tier
            if i % PROGRESS_EVERY == PROGRESS_EVERY - 1:
                progress.advance(PROGRESS_EVERY)
        progress.advance(trace.num_requests % PROGRESS_EVERY)
        stats, placed = cache.stats(), all_counters(cache.placement)
    counters = {"squeezed_requests": real.squeezed, "failed_moves": stats.failed_moves}
    return Outcome(
        hits,
        (int(tier_hits[0]), int(tier_hits[1]), int(tier_hits[2])),
        moved_bytes=dict(stats.moved_bytes),
        bookkeeping_ns=real.bookkeeping_ns,
        wrong_bytes=real.wrong_bytes,
        verified_bytes=real.verified_bytes,
        counters=placed | counters,
    )


def require_folder(capacity: Capacity) -> None:
    """Check that the disk tier's folder exists or can be made, but for permissions.

    Raises
    ------
    InvalidArgument
    """
    folder = capacity.disk_dir
    if folder is not None and not os.path.isdir(there := nearest_existing(folder)):
        raise InvalidArgument(f"disk: {there} is no folder; name another place for {folder}")


@contextmanager
def _folder(disk: int, parent: Path | None) -> Iterator[str | None]:
    """A new folder for the disk tier, removed at the end; None without a disk tier.

    Every replay starts cold. The folder `parent`, made where it is missing, stays.
    """
    if not disk:
        yield None
        return
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pagedkv-replay-", dir=parent) as folder:
        yield folder


def _require_room(ram_blocks: int, disk_blocks: int, block_bytes: int, folder: Path | None) -> None:
    needed, there = ram_blocks * block_bytes, _available_memory()
    if needed > MEMORY_SHARE * there:
        raise InvalidArgument(
            f"device and host: {ram_blocks} blocks of {format_size(block_bytes)} need {format_size(needed)}, "
            f"{format_size(there)} of memory are available; take smaller tiers or --block-bytes"
        )
    needed = disk_blocks * (block_bytes + 4096)
    if disk_blocks and needed > (there := shutil.disk_usage(nearest_existing(folder or tempfile.gettempdir())).free):
        raise InvalidArgument(
            f"disk: {disk_blocks} blocks need {format_size(needed)}, {format_size(there)} are free there; "
            f"take a smaller tier, another folder (--disk SIZE:DIR) or smaller --block-bytes"
        )


def _available_memory() -> int:
    """Bytes that can be used without swapping, as the kernel estimates them."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
