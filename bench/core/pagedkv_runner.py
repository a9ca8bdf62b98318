"""pagedkv's core on workloads a to f, through its public Python calls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.core import workloads
from bench.core.figures import Figure, run, timed
from bench.core.pagedkv_replay import replay_trace
from bench.core.workloads import BLOCK_SIZE, RUN_BLOCKS, SPLIT_TOKENS, Scale
from bench.timing import measure, measure_each, rss_bytes
from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree

Tokens = NDArray[np.int32]
Rows = NDArray[np.int64]


class Cache:
    """A pool, a tree and a placement of one tier, and the calls that make one request."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(BLOCK_SIZE)
        self.placement = Placement(self.tree, [self.pool])

    def insert(self, tokens: Tokens | list[int], num_blocks: int) -> None:
        """A request of new tokens: own what is cached, make room, allocate, insert, release."""
        owner, _ = self.placement.acquire(tokens)
        self.placement.insert(owner, tokens, self.placement.allocate(num_blocks))
        self.placement.release(owner)

    def hit(self, tokens: Tokens | list[int]) -> None:
        """A request that is cached whole: own it, read its block ids, release it."""
        owner, _ = self.placement.acquire(tokens)
        self.placement.blocks_of(owner)
        self.placement.release(owner)


def random_buffer(rng: np.random.Generator, num_blocks: int) -> Tokens:
    """int32 [num_blocks * BLOCK_SIZE], uniform over the vocabulary."""
    return rng.integers(0, workloads.VOCABULARY, num_blocks * BLOCK_SIZE, dtype=np.int32)


def allocate_and_free(scale: Scale) -> Iterator[Figure]:
    pool = BlockPool(scale.pool_blocks)
    for size in scale.batch_sizes:

        def allocate_free(size: int = size) -> None:
            pool.free(pool.alloc(size))

        inner = max(100, 16_384 // size)
        sample = measure(allocate_free, inner=inner, rounds=scale.rounds, warmup=scale.warmup)
        yield timed("a", f"allocate_free_{size}", sample, "ns/block", per=size)


def decode(scale: Scale) -> Iterator[Figure]:
    for count in scale.decode_sequences:
        cache = Cache(count * (1024 // BLOCK_SIZE))
        table = BlockTable(cache.placement, count)
        handles = [table.open(workloads.decode_prompt(i))[0] for i in range(count)]
        rows = np.array(handles, np.int64)
        table.step(rows)
        table.commit(rows)
        sampled = np.full(count, 7, np.int32)

        def step(_: int, table: BlockTable = table, rows: Rows = rows, sampled: Tokens = sampled) -> None:
            table.append(rows, sampled)
            table.step(rows)
            table.commit(rows)

        sample = measure_each(step, range(scale.decode_steps), warmup=scale.decode_warmup)
        yield timed("b", f"decode_step_{count}", sample, "us")


def hit_and_insert(scale: Scale) -> Iterator[Figure]:
    for length in scale.hit_lengths:
        yield from _hit(scale, length)
    yield from _insert(scale)


def _hit(scale: Scale, length: int) -> Iterator[Figure]:
    prompt = workloads.random_tokens(length, length)
    buffer = np.array(prompt, np.int32)
    cache = Cache(length // BLOCK_SIZE + 64)
    cache.insert(buffer, length // BLOCK_SIZE)
    inner = workloads.calls_per_round(length)
    time_hit = partial(measure, inner=inner, rounds=scale.rounds, warmup=scale.warmup)

    def take_figures(suffix: str) -> Iterator[Figure]:
        sample = time_hit(lambda: cache.placement.match(buffer))
        yield timed("c", f"hit_buffer{suffix}_{length}", sample, "us")
        sample = time_hit(lambda: cache.hit(buffer))
        yield timed("c", f"hit_buffer_refs{suffix}_{length}", sample, "us")
        sample = time_hit(lambda: cache.placement.match(prompt))
        yield timed("c", f"hit_list{suffix}_{length}", sample, "us")
        sample = time_hit(lambda: cache.hit(prompt))
        yield timed("c", f"hit_list_refs{suffix}_{length}", sample, "us")

    yield from take_figures("")
    cuts = range(SPLIT_TOKENS, length, SPLIT_TOKENS)
    owners = [cache.placement.acquire(buffer[:cut])[0] for cut in cuts]  # owning part of a run splits it
    for owner in owners:
        cache.placement.release(owner)
    num_runs = len(cuts) + 1
    if cache.tree.num_nodes < num_runs:
        raise RuntimeError(f"the prompt lies in {cache.tree.num_nodes} nodes, not in {num_runs}")
    yield from take_figures("_split64")


def _insert(scale: Scale) -> Iterator[Figure]:
    num_blocks = scale.insert_tokens // BLOCK_SIZE
    lists = workloads.insert_prompts(scale)
    half = len(lists) // 2
    cache = Cache(scale.insert_prompts * num_blocks + 64)

    def insert(tokens: Tokens | list[int]) -> None:
        cache.insert(tokens, num_blocks)

    warmup = min(scale.insert_warmup, half - 1)
    sample = measure_each(insert, lists[:half], warmup=warmup)
    yield timed("c", f"insert_list_{scale.insert_tokens}", sample, "us")
    buffers = [np.array(prompt, np.int32) for prompt in lists[half:]]
    sample = measure_each(insert, buffers, warmup=warmup)
    yield timed("c", f"insert_buffer_{scale.insert_tokens}", sample, "us")


def evict(scale: Scale) -> Iterator[Figure]:
    for num_blocks in scale.evict_pools:
        rng = np.random.default_rng(1)
        cache = Cache(num_blocks // RUN_BLOCKS * RUN_BLOCKS)
        for _ in range(num_blocks // RUN_BLOCKS):
            cache.insert(random_buffer(rng, RUN_BLOCKS), RUN_BLOCKS)
        buffers = [random_buffer(rng, RUN_BLOCKS) for _ in range(scale.evict_requests)]
        lists = [random_buffer(rng, RUN_BLOCKS).tolist() for _ in range(scale.evict_requests)]

        def evict_insert(tokens: Tokens | list[int], cache: Cache = cache) -> None:
            cache.insert(tokens, RUN_BLOCKS)

        def evict_only(_: int, cache: Cache = cache) -> None:
            cache.placement.reserve(RUN_BLOCKS)

        sample = measure_each(evict_insert, buffers, warmup=scale.evict_warmup)
        yield timed("d", f"evict_insert_{num_blocks}", sample, "ns/block", per=RUN_BLOCKS)
        sample = measure_each(evict_insert, lists, warmup=scale.evict_warmup)
        yield timed("d", f"evict_insert_list_{num_blocks}", sample, "ns/block", per=RUN_BLOCKS)
        steps = range(min(scale.evict_requests, num_blocks // RUN_BLOCKS - 8))
        taken = partial(_take_free, cache)
        sample = measure_each(evict_only, steps, warmup=scale.evict_warmup, teardown=taken)
        yield timed("d", f"evict_only_{num_blocks}", sample, "ns/block", per=RUN_BLOCKS)


def _take_free(cache: Cache, _: int) -> None:
    """Take what an eviction freed, so that the next one must evict again."""
    cache.pool.alloc(cache.pool.num_free)


def memory(scale: Scale) -> Iterator[Figure]:
    gc.collect()
    kept = []  # a freed cache would give its memory to the next one
    for num_blocks, per_run in ((scale.memory_blocks, RUN_BLOCKS), (scale.memory_single_blocks, 1)):
        rng = np.random.default_rng(1)
        before = rss_bytes()
        cache = Cache(num_blocks)
        if per_run == RUN_BLOCKS:
            yield Figure("e", "memory_pool", "", (rss_bytes() - before) / num_blocks, "B/block")
        for _ in range(num_blocks // per_run):
            cache.insert(random_buffer(rng, per_run), per_run)
        per_block = (rss_bytes() - before) / num_blocks
        yield Figure("e", f"memory_runs_of_{per_run}", "", per_block, "B/block")
        kept.append(cache)


def replay(scale: Scale) -> Iterator[Figure]:
    trace = workloads.make_trace(scale.trace_requests)
    null_s, _ = replay_trace(trace, scale, cached=False)
    full_s, hit_ratio = replay_trace(trace, scale)
    yield Figure("f", "replay", "", (full_s - null_s) * 1e6 / len(trace), "us/request")
    yield Figure("f", "replay_hit_ratio", "", hit_ratio, "ratio")


if __name__ == "__main__":
    run(
        {
            "a": allocate_and_free,
            "b": decode,
            "c": hit_and_insert,
            "d": evict,
            "e": memory,
            "f": replay,
        }
    )
