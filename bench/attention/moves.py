"""Throughput of the kernels that move KV.

Writing new tokens, copying blocks, gathering sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.attention.arena import Arena
from bench.attention.device import Device
from bench.attention.problems import Problem
from bench.attention.shapes import Shape
from bench.attention.systems import Entry, Group, Prepared
from pagedkv.kernels.block_ops import copy_blocks
from pagedkv.kernels.gather_kv import gather_kv
from pagedkv.kernels.layer_kv import LayerKv
from pagedkv.kernels.write_kv import write_kv

SYSTEM = "pagedkv"


def groups(
    device: Device, arena: Arena, shape: Shape, problem_of: Callable[[Shape], Problem], new_tokens: int
) -> tuple[Group, ...]:
    """Entries over the pool of a shape.

    Half of its blocks copied over the other half, all gathered, tokens written.
    """
    moved = shape.pool_bytes  # half of all K is read, and written to the other half
    tokens = min(new_tokens, sum(shape.kv_lens))
    written = 2 * 2 * tokens * shape.token_elements * 2
    plans: dict[str, tuple[Callable[[], Prepared], int]] = {
        "copy_blocks": (lambda: _copy_blocks(device, arena, problem_of(shape)), moved // 2),
        "gather_kv": (lambda: _gather(device, problem_of(shape)), 2 * shape.kv_bytes),
        "write_kv": (lambda: _write(device, arena, problem_of(shape), tokens), written),
    }
    return tuple(Group((Entry(case, SYSTEM, *plan, own=True),)) for case, plan in plans.items())


def _copy_blocks(device: Device, arena: Arena, problem: Problem) -> Prepared:
    k, _ = problem.kv(0)
    order = np.random.default_rng(4).permutation(problem.shape.num_blocks)
    half = len(order) // 2
    pairs = np.stack([order[:half], order[half : 2 * half]], axis=1).astype(np.int32)
    on_device = device.array(pairs)

    def error() -> float:
        picked = pairs[:: max(1, half // 16)]
        found = np.stack([device.host(k[int(to)]) for _, to in picked])
        wanted = np.stack([device.host(k[int(source)]) for source, _ in picked])
        arena.forget()
        return float(not np.array_equal(found, wanted))

    def poison() -> None:
        for to in pairs[:: max(1, half // 16), 1]:
            device.fill(k[int(to)], 0xFF)

    def call(copy: int) -> None:
        copy_blocks(device.backend, k, on_device, stream=device.stream)

    return Prepared(call, 1, poison, error, bound=0.0)


def _gather(device: Device, problem: Problem) -> Prepared:
    shape, model = problem.shape, problem.shape.model
    k_out, v_out = (device.empty((sum(shape.kv_lens), model.num_kv_heads, model.head_dim), np.uint16) for _ in range(2))
    views = [LayerKv(device.backend, *problem.kv(copy), dtype="bfloat16") for copy in range(problem.copies)]

    def call(copy: int) -> None:
        gather_kv(views[copy], problem.block_tables, problem.kv_indptr, k_out, v_out, stream=device.stream)

    def error() -> float:
        token = shape.kv_lens[0] - 1
        assert problem.host_tables is not None
        block = int(problem.host_tables[0, token // shape.block_size])
        found = [device.host(out[token]) for out in (k_out, v_out)]
        wanted = [device.host(side[block, token % shape.block_size]) for side in problem.kv(0)]
        return float(not np.array_equal(found, wanted))

    def poison() -> None:
        for out in (k_out, v_out):
            device.fill(out, 0xFF)

    return Prepared(call, problem.copies, poison, error, bound=0.0)


def _write(device: Device, arena: Arena, problem: Problem, tokens: int) -> Prepared:
    shape, model = problem.shape, problem.shape.model
    new = np.random.default_rng(5).integers(0, 2**14, (2, tokens, model.num_kv_heads, model.head_dim), np.uint16)
    k, v = device.array(new[0]), device.array(new[1])
    host_slots: NDArray[np.int64] = np.random.default_rng(6).permutation(shape.num_blocks * shape.block_size)[:tokens]
    slots = device.array(host_slots.astype(np.int64))
    caches: list[Any] = [LayerKv(device.backend, *problem.kv(copy), dtype="bfloat16") for copy in range(problem.copies)]

    def error() -> float:
        slot = int(host_slots[tokens // 2])
        found = [device.host(side[slot // shape.block_size, slot % shape.block_size]) for side in problem.kv(0)]
        arena.forget()
        return float(not np.array_equal(found, new[:, tokens // 2]))

    def poison() -> None:
        for side in problem.kv(0):
            device.fill(side[int(host_slots[tokens // 2]) // shape.block_size], 0xFF)

    def call(copy: int) -> None:
        write_kv(caches[copy], slots, k, v, stream=device.stream)

    return Prepared(call, problem.copies, poison, error, bound=0.0)
