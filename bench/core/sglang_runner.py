"""SGLang's UnifiedRadixCache with its Rust core on workloads a to f, pages of 16 tokens."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from functools import partial

import torch

from bench.core import workloads
from bench.core.figures import Figure, run, timed
from bench.core.sglang_replay import replay_trace
from bench.core.sglang_tree import VARIANT, Tree, make_allocator
from bench.core.workloads import BLOCK_SIZE, RUN_BLOCKS, SPLIT_TOKENS, Scale
from bench.timing import measure, measure_each, rss_bytes


def allocate_and_free(scale: Scale) -> Iterator[Figure]:
    allocator = make_allocator(scale.pool_blocks * BLOCK_SIZE)
    for size in scale.batch_sizes:

        def allocate_free(size: int = size) -> None:
            allocator.free_segment(allocator.alloc(size * BLOCK_SIZE), start_pos=0)

        sample = measure(allocate_free, inner=50, rounds=scale.rounds, warmup=scale.warmup)
        yield timed("a", f"allocate_free_{size}", sample, "ns/block", per=size, variant="torch CPU")


def decode(scale: Scale) -> Iterator[Figure]:
    count = scale.decode_sequences[0]
    allocator = make_allocator(count * 2048 * 2)
    lens = torch.tensor([len(workloads.decode_prompt(i)) for i in range(count)], dtype=torch.int64)
    last = torch.stack([allocator.alloc(1024)[length - 1] for length in lens.tolist()])
    rows = torch.zeros(count, 2048, dtype=torch.int64)
    row_idx = torch.arange(count)

    def step(_: int) -> None:
        nonlocal lens, last
        lens = lens + 1
        last = allocator.alloc_decode(lens, lens, last)
        rows[row_idx, lens - 1] = last

    sample = measure_each(step, range(scale.decode_steps), warmup=scale.decode_warmup)
    yield timed("b", f"decode_step_{count}", sample, "us", variant="torch CPU")


def hit_and_insert(scale: Scale) -> Iterator[Figure]:
    for length in scale.hit_lengths:
        yield from _hit(scale, length)
    yield from _insert(scale)


def _hit(scale: Scale, length: int) -> Iterator[Figure]:
    tree = Tree(length * 2)
    prompt = workloads.random_tokens(length, length)
    key = tree.key(prompt)
    tree.insert(key, tree.allocator.alloc(length))
    if tree.match(key)[0] != length:
        raise RuntimeError("SGLang does not hit the whole prompt: the workload is not what it says")

    def take_and_release(key: array[int]) -> None:
        _, node = tree.match(key)
        tree.slots(node)
        tree.unlock(tree.lock(node))

    inner = workloads.calls_per_round(length)
    time_hit = partial(measure, inner=inner, rounds=scale.rounds, warmup=scale.warmup)

    def take_figures(suffix: str) -> Iterator[Figure]:
        sample = time_hit(lambda: tree.match(key))
        yield timed("c", f"hit_buffer{suffix}_{length}", sample, "us", variant=VARIANT)
        sample = time_hit(lambda: take_and_release(key))
        yield timed("c", f"hit_buffer_refs{suffix}_{length}", sample, "us", variant=VARIANT)
        sample = time_hit(lambda: tree.match(tree.key(prompt)))
        yield timed("c", f"hit_list{suffix}_{length}", sample, "us", variant=VARIANT)
        sample = time_hit(lambda: take_and_release(tree.key(prompt)))
        yield timed("c", f"hit_list_refs{suffix}_{length}", sample, "us", variant=VARIANT)

    yield from take_figures("")
    for cut in range(SPLIT_TOKENS, length, SPLIT_TOKENS):
        tree.match(tree.key(prompt[:cut]))  # matching inside a node splits it
    yield from take_figures("_split64")


def _insert(scale: Scale) -> Iterator[Figure]:
    tree = Tree(scale.insert_prompts * scale.insert_tokens)
    prompts = workloads.insert_prompts(scale)
    half = len(prompts) // 2
    slots = [tree.allocator.alloc(scale.insert_tokens) for _ in prompts]

    def insert(prompt_idx: int) -> None:
        key = tree.key(prompts[prompt_idx])
        tree.match(key)
        tree.insert(key, slots[prompt_idx])

    sample = measure_each(insert, range(half), warmup=min(scale.insert_warmup, half - 1))
    yield timed("c", f"insert_list_{scale.insert_tokens}", sample, "us", variant=VARIANT)
    keys = [tree.key(prompt) for prompt in prompts]

    def insert_key(prompt_idx: int) -> None:
        tree.match(keys[prompt_idx])
        tree.insert(keys[prompt_idx], slots[prompt_idx])

    sample = measure_each(insert_key, range(half, len(prompts)), warmup=1)
    yield timed("c", f"insert_buffer_{scale.insert_tokens}", sample, "us", variant=VARIANT)


def evict(scale: Scale) -> Iterator[Figure]:
    num_blocks = scale.evict_pools[0]
    num_tokens = RUN_BLOCKS * BLOCK_SIZE
    tree = Tree(num_blocks * BLOCK_SIZE)
    seeds = iter(range(10**9))

    def fresh_prompt() -> list[int]:
        return workloads.random_tokens(num_tokens, next(seeds))

    for _ in range(num_blocks // RUN_BLOCKS):
        tree.insert(tree.key(fresh_prompt()), tree.allocator.alloc(num_tokens))
    while tree.allocator.available_size() >= BLOCK_SIZE:  # what is left of the pool stays out of the way
        tree.allocator.alloc(BLOCK_SIZE)

    def evict_insert(key: array[int]) -> None:
        tree.evict(num_tokens)
        tree.insert(key, tree.allocator.alloc(num_tokens))

    sample = measure_each(
        evict_insert,
        (tree.key(fresh_prompt()) for _ in range(scale.evict_requests)),
        warmup=scale.evict_warmup,
    )
    yield timed("d", f"evict_insert_{num_blocks}", sample, "ns/block", per=RUN_BLOCKS, variant=VARIANT)
    sample = measure_each(
        lambda prompt: evict_insert(tree.key(prompt)),
        (fresh_prompt() for _ in range(scale.evict_requests)),
        warmup=scale.evict_warmup,
    )
    yield timed("d", f"evict_insert_list_{num_blocks}", sample, "ns/block", per=RUN_BLOCKS, variant=VARIANT)
    sample = measure_each(
        lambda _: tree.evict(num_tokens),
        range(min(scale.evict_requests, num_blocks // RUN_BLOCKS)),
        warmup=scale.evict_warmup,
    )
    yield timed("d", f"evict_only_{num_blocks}", sample, "ns/block", per=RUN_BLOCKS, variant=VARIANT)


def memory(scale: Scale) -> Iterator[Figure]:
    generator = torch.Generator().manual_seed(1)
    kept = []  # a freed tree would give its memory to the next one
    for num_blocks, per_run in ((scale.memory_blocks, RUN_BLOCKS), (scale.memory_single_blocks, 1)):
        num_tokens = per_run * BLOCK_SIZE
        gc.collect()
        tree = Tree(num_blocks * BLOCK_SIZE + BLOCK_SIZE)
        gc.collect()
        before = rss_bytes()
        for run_idx in range(num_blocks // per_run):
            tokens = torch.randint(workloads.VOCABULARY, (num_tokens,), generator=generator)
            slots = torch.arange(run_idx * num_tokens, (run_idx + 1) * num_tokens)
            tree.insert(array("q", tokens.numpy().tobytes()), slots)
        gc.collect()
        per_block = (rss_bytes() - before) / num_blocks
        yield Figure("e", f"memory_runs_of_{per_run}", VARIANT, per_block, "B/block")
        kept.append(tree)


def replay(scale: Scale) -> Iterator[Figure]:
    trace = workloads.make_trace(scale.trace_requests)
    null_s, _, _ = replay_trace(trace, scale, cached=False)
    full_s, hit_ratio, _ = replay_trace(trace, scale)
    _, _, tree_s = replay_trace(trace, scale, timed_tree=True)
    per_request = 1e6 / len(trace)
    yield Figure("f", "replay", VARIANT, (full_s - null_s) * per_request, "us/request")
    yield Figure("f", "replay", f"{VARIANT}, tree only", tree_s * per_request, "us/request")
    yield Figure("f", "replay_hit_ratio", VARIANT, hit_ratio, "ratio")


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
