"""vLLM's KV bookkeeping on workloads a to f.

``vllm/v1/core`` of the wheel at ``PEER_VLLM``.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.core import stubs, workloads
from bench.core.figures import Figure, run, timed
from bench.core.workloads import BLOCK_SIZE, RUN_BLOCKS, Scale
from bench.timing import CPU, gc_off, measure, measure_each, rss_bytes, summarise

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
sys.path.insert(0, os.environ["PEER_VLLM"])
stubs.install("xgrammar", "llguidance", "outlines_core", "lmformatenforcer", "torchvision", "triton")

import torch  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils import hashing  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

SAMPLING = SamplingParams(max_tokens=4096)
HASHES = {"sha256": hashing.sha256, "xxhash": hashing.xxhash}
Hasher = Callable[..., Any]


def make_manager(num_blocks: int, caching: bool = True) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config,
        max_model_len=262_144,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=caching,
        log_stats=False,
    )


def make_hasher(name: str) -> Hasher:
    init_none_hash(HASHES[name])
    hasher: Hasher = get_request_block_hasher(BLOCK_SIZE, HASHES[name])
    return hasher


def make_request(request_id: int, prompt: list[int], hasher: Hasher | None) -> Request:
    return Request(str(request_id), prompt, SAMPLING, None, block_hasher=hasher, arrival_time=0.0)


def allocate_and_free(scale: Scale) -> Iterator[Figure]:
    for caching in (True, False):
        pool = BlockPool(scale.pool_blocks, caching, BLOCK_SIZE)
        for size in scale.batch_sizes:

            def allocate_free(pool: Any = pool, size: int = size) -> None:
                pool.free_blocks(pool.get_new_blocks(size))

            inner = max(1, 4096 // size)
            sample = measure(allocate_free, inner=inner, rounds=scale.rounds, warmup=scale.warmup)
            variant = "caching on" if caching else "caching off"
            yield timed("a", f"allocate_free_{size}", sample, "ns/block", per=size, variant=variant)


def decode(scale: Scale) -> Iterator[Figure]:
    count = scale.decode_sequences[0]
    for name, caching in (("sha256", True), ("xxhash", True), ("sha256", False)):
        hasher = make_hasher(name)
        manager = make_manager(scale.pool_blocks, caching)
        running = []
        for i in range(count):
            request = make_request(i, workloads.decode_prompt(i), hasher if caching else None)
            request.status = RequestStatus.RUNNING
            manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
            running.append(request)

        def step(_: int, manager: KVCacheManager = manager, running: list[Request] = running) -> None:
            for request in running:
                request.append_output_token_ids(7)
            for request in running:
                manager.allocate_slots(request, 1)

        def advance(_: int, running: list[Request] = running) -> None:
            for request in running:
                request.num_computed_tokens += 1

        sample = measure_each(step, range(scale.decode_steps), warmup=scale.decode_warmup, teardown=advance)
        variant = name if caching else "caching off"
        yield timed("b", f"decode_step_{count}", sample, "us", variant=variant)


def hit_and_insert(scale: Scale) -> Iterator[Figure]:
    for name in HASHES:
        hasher = make_hasher(name)
        for length in scale.hit_lengths:
            yield from _hit(scale, name, hasher, length)
        yield from _insert(scale, name, hasher)


def _hit(scale: Scale, name: str, hasher: Hasher, length: int) -> Iterator[Figure]:
    prompt = workloads.random_tokens(length, length)
    manager = make_manager(length // BLOCK_SIZE * 2 + 64)
    first = make_request(0, prompt, hasher)
    manager.allocate_slots(first, length)
    manager.free(first)
    longer = [*prompt, 5]  # a hit is capped at num_tokens - 1: one more token lets the whole prompt hit
    request = make_request(1, longer, hasher)
    num_hit = manager.get_computed_blocks(request)[1]
    if num_hit != length:
        raise RuntimeError(f"vLLM hits {num_hit} of {length} tokens: the workload is not what it says")

    def take_and_release() -> None:
        blocks, num_computed, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, 1, num_computed, blocks)
        manager.free(request)

    inner = workloads.calls_per_round(length)
    time_hit = partial(measure, inner=inner, rounds=scale.rounds, warmup=scale.warmup)
    hashed = time_hit(lambda: make_request(2, longer, hasher))
    unhashed = time_hit(lambda: make_request(2, longer, None))
    lookup = time_hit(lambda: manager.get_computed_blocks(request))
    references = time_hit(take_and_release)
    hash_us = hashed.us() - unhashed.us()
    yield timed("c", f"hit_buffer_{length}", lookup, "us", variant=f"{name}, hashes ready")
    yield timed("c", f"hit_buffer_refs_{length}", references, "us", variant=f"{name}, hashes ready")
    yield Figure("c", f"hit_list_{length}", name, hash_us + lookup.us(), "us")
    yield Figure("c", f"hit_list_refs_{length}", name, hash_us + references.us(), "us")


def _insert(scale: Scale, name: str, hasher: Hasher) -> Iterator[Figure]:
    manager = make_manager(scale.insert_prompts * scale.insert_tokens // BLOCK_SIZE + 64)
    requests: list[Request] = []

    def insert(prompt: list[int]) -> None:
        request = make_request(len(requests), prompt, hasher)
        manager.get_computed_blocks(request)
        manager.allocate_slots(request, len(prompt))
        requests.append(request)

    sample = measure_each(
        insert,
        workloads.insert_prompts(scale),
        warmup=scale.insert_warmup,
        teardown=lambda _: manager.free(requests[-1]),
    )
    yield timed("c", f"insert_list_{scale.insert_tokens}", sample, "us", variant=name)


def evict(scale: Scale) -> Iterator[Figure]:
    hasher = make_hasher("sha256")
    num_blocks = scale.evict_pools[0]
    manager = make_manager(num_blocks)
    num_tokens = RUN_BLOCKS * BLOCK_SIZE
    seeds = iter(range(10**9))

    def fresh_request() -> Request:
        seed = next(seeds)
        return make_request(seed, workloads.random_tokens(num_tokens, seed), hasher)

    for _ in range(num_blocks // RUN_BLOCKS):
        request = fresh_request()
        manager.allocate_slots(request, num_tokens)
        manager.free(request)
    sample = measure_each(
        lambda request: manager.allocate_slots(request, num_tokens),
        (fresh_request() for _ in range(scale.evict_requests)),
        warmup=scale.evict_warmup,
        teardown=manager.free,
    )
    variant = "sha256, hashes ready"
    yield timed("d", f"evict_insert_{num_blocks}", sample, "ns/block", per=RUN_BLOCKS, variant=variant)
    taken = measure_each(
        lambda _: manager.block_pool.get_new_blocks(RUN_BLOCKS),
        range(min(scale.evict_requests, num_blocks // RUN_BLOCKS - 8)),
        warmup=scale.evict_warmup,
    )
    yield timed("d", f"evict_only_{num_blocks}", taken, "ns/block", per=RUN_BLOCKS, variant=variant)


def memory(scale: Scale) -> Iterator[Figure]:
    count = scale.memory_blocks
    gc.collect()
    before = rss_bytes()
    pool = BlockPool(count, True, BLOCK_SIZE)
    gc.collect()
    yield Figure("e", "memory_pool", "", (rss_bytes() - before) / count, "B/block")
    for i in range(1, count):
        key = hashlib.sha256(i.to_bytes(8, "little")).digest() + b"\0\0\0\0"
        pool._insert_block_hash(key, pool.blocks[i], num_tokens=BLOCK_SIZE)
    gc.collect()
    per_block = (rss_bytes() - before) / count
    yield Figure("e", "memory_runs_of_64", "hash per block", per_block, "B/block")
    yield Figure("e", "memory_runs_of_1", "hash per block", per_block, "B/block")
    start = CPU()
    gc.collect()
    yield Figure("e", "full_gc", "", (CPU() - start) * 1e3, "ms")


def replay(scale: Scale) -> Iterator[Figure]:
    trace = workloads.make_trace(scale.trace_requests)
    for name in HASHES:
        hasher = make_hasher(name)
        null_s, _ = _replay(trace, scale, None)
        full_s, hit_ratio = _replay(trace, scale, hasher)
        sample = summarise([full_s - null_s])
        yield timed("f", "replay", sample, "us/request", per=len(trace), variant=name)
        yield Figure("f", "replay_hit_ratio", name, hit_ratio, "ratio")


def _replay(
    trace: list[tuple[list[int], list[int]]], scale: Scale, hasher: Hasher | None
) -> tuple[float, float]:
    """CPU seconds and token hit ratio of the trace.

    Without `hasher`, the same loop without the manager.
    """
    manager = make_manager(scale.pool_blocks)
    running: list[tuple[Request, Iterator[int]]] = []
    next_idx = num_hit = num_prompt = 0
    with gc_off():
        start = CPU()
        while next_idx < len(trace) or running:
            while next_idx < len(trace) and len(running) < scale.running:
                prompt, output = trace[next_idx]
                request = make_request(next_idx, prompt, hasher)
                if hasher is not None:
                    blocks, num_computed, _ = manager.get_computed_blocks(request)
                    if (
                        manager.allocate_slots(request, len(prompt) - num_computed, num_computed, blocks)
                        is None
                    ):
                        break
                    num_hit += num_computed
                    num_prompt += len(prompt)
                request.status = RequestStatus.RUNNING
                request.num_computed_tokens = len(prompt)
                running.append((request, iter(output)))
                next_idx += 1
            still = []
            for request, output_tokens in running:
                token = next(output_tokens, None)
                if token is None:
                    if hasher is not None:
                        manager.free(request)
                    continue
                request.append_output_token_ids(token)
                if hasher is not None:
                    manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
                still.append((request, output_tokens))
            running = still
        elapsed = CPU() - start
    return elapsed, num_hit / max(1, num_prompt)


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
