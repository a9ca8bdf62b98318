"""A decode loop on a GPU with CuPy and pagedkv's CUDA kernels.

Nothing waits for the device until the result is read.

Needs a CUDA GPU and ``pip install -e '.[cuda12]'`` (or ``'.[cuda13]'``). Without one it says so and ends.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import pagedkv as pk

SPEC = pk.KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16", block_size=16)
NUM_QO_HEADS = 8


def forward(cupy: Any, cache: pk.KVCache, seqs: list[pk.Sequence], weights: Any, stream: Any) -> Any:
    """One step of a model without weights worth the name.

    Q, k and v are looked up by token, on the device.
    """
    with cache.step(seqs) as step, stream:
        qkv = weights[cupy.asarray(step.tokens)]
        q, k, v = (cupy.ascontiguousarray(part) for part in cupy.split(qkv, [NUM_QO_HEADS, NUM_QO_HEADS + 2], axis=1))
        for layer in range(SPEC.num_layers):
            step.write(layer, k, v, stream=stream)
            q = step.attend(layer, q, stream=stream)
    return q


def main() -> int:
    """Two requests with a common prefix; prints where the second one's prefix came from."""
    try:
        import cupy

        num_gpus = cupy.cuda.runtime.getDeviceCount()
    except Exception as problem:  # no CuPy, or no driver: CuPy raises its own kinds
        print(f"no GPU to run this on: {problem}", file=sys.stderr)
        return 0
    if not num_gpus:
        print("no GPU to run this on", file=sys.stderr)
        return 0
    rng = np.random.default_rng(0)
    weights = cupy.asarray(rng.standard_normal((1000, NUM_QO_HEADS + 4, SPEC.head_dim)).astype(np.float16))
    stream = cupy.cuda.Stream(non_blocking=True)
    prompt = list(range(100))
    with pk.KVCache(SPEC, device_memory="64MiB", host_memory="256MiB", device="cuda:0") as cache:
        for _ in range(2):
            with cache.sequence(prompt) as seq:
                print(f"{seq.num_computed} of {len(prompt)} tokens came from the cache")
                for _ in range(4):
                    out = forward(cupy, cache, [seq], weights, stream)
                    stream.synchronize()
                    seq.append(int(abs(float(out[-1].sum()))) % 1000)
    return 0


if __name__ == "__main__":
    sys.exit(main())
