"""The measured process: prints CPU microseconds of each call as JSON.

PYTHONPATH names the pagedkv that it measures. It runs as a script, so that the same file measures another version, and
imports only its neighbour.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import stand_in

LAYERS, SEQS, HEADS, GROUP, DIM, BLOCK, BLOCKS, TABLE = 32, 32, 8, 4, 128, 16, 1024, 256
PROMPT = 20  # tokens of each sequence
CACHE_KERNELS = ("decode_mma", "decode_tma", "prefill_mma", "prefill_wgmma")
LATENT, VALUE = 576, 512  # numbers of a latent (MLA), and those of them that are V
QO_HEADS = {"decode_mla": 16, "decode_mla_wgmma": 64}  # over latents, by kernel
WARMUP = 20
capturing = [False]


def main() -> None:
    """Measure every case in turns."""
    cupy = stand_in.install(capturing)
    backend = make_backend()
    calls = {**kernel_calls(cupy, backend), **latent_calls(cupy, backend), **cache_calls(cupy)}
    print(json.dumps(measured(calls, int(sys.argv[1]))))


def make_backend() -> Any:
    """The CuPy backend over the stand-in, with a compiler and a driver that do nothing."""
    from pagedkv.kernels import tensor_map
    from pagedkv.kernels.cupy_backend import CupyBackend
    from pagedkv.kernels.jit import Binary

    driver = SimpleNamespace(cuTensorMapEncodeTiled=lambda *arguments: 0)
    tensor_map.load_driver = lambda: driver  # type: ignore[assignment,return-value]
    binary = Binary(b"", Path(__file__), "", "disk")
    cache = SimpleNamespace(
        get=lambda *arguments: binary, precompile=lambda *arguments, **options: [],
        nvrtc=SimpleNamespace(supports=lambda architecture: True, version=(12, 8)),
    )  # fmt: skip
    backend = CupyBackend(0, cache)  # type: ignore[arg-type]
    backend.has_tensor_maps = True
    backend._architecture = lambda variant: "sm_90a"  # type: ignore[method-assign]
    return backend


def kernel_calls(cupy: Any, backend: Any) -> dict[str, Callable[[int], object]]:
    """``plan``, ``run`` of each kernel and ``write_kv``; a call takes the number of its layer."""
    from pagedkv.attention import PagedAttention
    from pagedkv.kernels.layer_kv import LayerKv
    from pagedkv.kernels.write_kv import write_kv

    shape = (BLOCKS, BLOCK, HEADS, DIM)
    pools = [tuple(cupy.empty(shape, np.float16) for _ in "kv") for _ in range(LAYERS)]
    layers = [LayerKv(backend, k, v) for k, v in pools]
    tables, lens = cupy.empty((SEQS, TABLE), np.int32), cupy.empty((SEQS,), np.int32)
    q, out = (cupy.empty((SEQS, HEADS * GROUP, DIM), np.float16) for _ in "qo")
    k_new, v_new = (cupy.empty((SEQS, HEADS, DIM), np.float16) for _ in "kv")
    slots = cupy.empty((SEQS,), np.int64)
    calls: dict[str, Callable[[int], object]] = {}
    for kernel in ("decode_mma", "decode_tma", "prefill_mma", "prefill_wgmma"):
        attention = PagedAttention(
            num_qo_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM, block_size=BLOCK, max_sequences=SEQS,
            kernel=kernel, device=backend,
        )  # fmt: skip
        attention.plan(tables, lens)
        calls[f"run {kernel}"] = lambda layer, attention=attention: attention.run(q, *pools[layer], out=out)
        if kernel == "decode_mma":
            calls["plan"] = lambda layer, attention=attention: attention.plan(tables, lens)
    calls["write_kv"] = lambda layer: write_kv(layers[layer], slots, k_new, v_new)
    return calls


def latent_calls(cupy: Any, backend: Any) -> dict[str, Callable[[int], object]]:
    """``run`` of the kernels for latents that this version has."""
    from pagedkv.attention import PagedAttention
    from pagedkv.kernels.select import KERNELS

    pools = [cupy.empty((BLOCKS, BLOCK, 1, LATENT), np.float16) for _ in range(LAYERS)]
    tables, lens = cupy.empty((SEQS, TABLE), np.int32), cupy.empty((SEQS,), np.int32)
    calls: dict[str, Callable[[int], object]] = {}
    for kernel in (one.name for one in KERNELS if one.name in QO_HEADS):
        heads = QO_HEADS[kernel]
        attention = PagedAttention(
            num_qo_heads=heads, num_kv_heads=1, head_dim=LATENT, head_dim_v=VALUE, v_in_k=True, block_size=BLOCK,
            max_sequences=SEQS, kernel=kernel, device=backend, softmax_scale=192**-0.5,
        )  # fmt: skip
        attention.plan(tables, lens)
        q, out = (cupy.empty((SEQS, heads, dim), np.float16) for dim in (LATENT, VALUE))
        calls[f"run {kernel}"] = lambda layer, run=attention.run, q=q, out=out: run(q, pools[layer], out=out)
    return calls


def cache_calls(cupy: Any) -> dict[str, Callable[[int], object]]:
    """``write`` and ``attend`` of steps of a KVCache, eager and while the stream is captured."""
    calls: dict[str, Callable[[int], object]] = {}
    for kernel in CACHE_KERNELS:
        tokens = 1 if kernel.startswith("decode") else PROMPT
        backend = make_backend()
        step = next_step(cupy, backend, tokens)
        q, out = (cupy.empty((tokens * SEQS, HEADS * GROUP, DIM), np.float16) for _ in "qo")
        k, v = (cupy.empty((tokens * SEQS, HEADS, DIM), np.float16) for _ in "kv")
        for layer in range(LAYERS):
            step.write(layer, k, v)
        with preferred(kernel):  # as after a trial that it won
            step.attend(0, q, out=out)
        launched = {variant.kernel for variant in backend._kernels}
        assert launched & set(CACHE_KERNELS) == {kernel}, launched
        for suffix in ("", ", captured") if tokens == 1 else ("",):
            if kernel == "decode_mma":
                calls[f"step.write{suffix}"] = functools.partial(step.write, k=k, v=v)
            calls[f"step.attend {kernel}{suffix}"] = functools.partial(step.attend, q=q, out=out)
        if kernel == "decode_mma":
            sinks = cupy.empty((HEADS * GROUP,), np.float32)
            others = {"a window": {"window": 128}, "sinks": {"sinks": sinks}, "a new output": {"out": None}}
            for name, given in others.items():
                calls[f"step.attend {kernel}, {name}"] = functools.partial(step.attend, q=q, **{"out": out, **given})
    return calls


def next_step(cupy: Any, backend: Any, tokens: int) -> Any:
    """A step of so many tokens of each sequence: of a prompt, or the one behind it."""
    import pagedkv as pk

    spec = pk.KVSpec(LAYERS, HEADS, DIM, "float16", BLOCK)
    cache = pk.KVCache(spec, pk.Blocks(SEQS * 3), device="cuda", backend=backend)
    seqs = [cache.sequence(range(1000 * n, 1000 * n + PROMPT)) for n in range(SEQS)]
    if tokens == PROMPT:
        return cache.step(seqs, q_lens=[PROMPT] * SEQS).__enter__()
    k, v = (cupy.empty((PROMPT * SEQS, HEADS, DIM), np.float16) for _ in "kv")
    with cache.step(seqs, q_lens=[PROMPT] * SEQS) as step:
        for layer in range(LAYERS):
            step.write(layer, k, v)
    for seq in seqs:
        seq.append([7])
    return cache.step(seqs).__enter__()


@contextlib.contextmanager
def preferred(kernel: str) -> Iterator[None]:
    """Let "auto" take a kernel."""
    from pagedkv.kernels import select

    kernels = select.KERNELS
    select.KERNELS = sorted(kernels, key=lambda one: one.name != kernel)
    yield
    select.KERNELS = kernels


def measured(calls: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of a call, over rounds of one call per layer, all cases in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for number in range(WARMUP + rounds):
        for name, call in calls.items():
            capturing[0] = name.endswith("captured") and number > 0  # by then the step's arrays are on the device
            begin = time.thread_time()
            for layer in range(LAYERS):
                call(layer)
            taken = time.thread_time() - begin
            if number >= WARMUP:
                times[name].append(1e6 * taken / LAYERS)
    return {name: statistics.median(taken) for name, taken in times.items()}


if __name__ == "__main__":
    main()
