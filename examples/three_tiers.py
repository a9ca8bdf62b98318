"""Three tiers: evicted blocks move down, requested ones come up.

The disk can be opened again.
"""

import tempfile
from pathlib import Path

import numpy as np

import pagedkv as pk

spec = pk.KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float16", block_size=4, model="toy@1")


def kv_of(tokens: np.ndarray) -> np.ndarray:
    """Stands for a model.

    KV [num_layers, num_tokens, num_kv_heads, head_dim] that follows from the tokens.
    """
    return np.broadcast_to(tokens[None, :, None, None] % 1000, (2, len(tokens), 2, 8)).astype(np.float16)


def serve(cache: pk.KVCache, prompt: np.ndarray) -> None:
    """Open, compare what was cached with what was computed once, compute the rest."""
    with cache.sequence(prompt) as seq:
        k, v = seq.gather()
        assert (k == kv_of(prompt)[:, : seq.num_computed]).all()
        assert (v == -k).all()
        rest = kv_of(prompt)[:, seq.num_computed :]
        seq.scatter(rest, -rest)
        hits = {tier: count for tier, count in seq.hit_tokens.items() if count}
        print(f"prompt {prompt[0] // 100}: hit tokens {hits or 'none'}")


prompts = [np.arange(100 * i, 100 * i + 25) for i in range(8)]  # six whole blocks and a token each

with tempfile.TemporaryDirectory() as folder:
    disk = pk.Disk(str(Path(folder, "kv")), size=pk.Blocks(64))
    with pk.KVCache(
        spec, device_memory=pk.Blocks(10), host_memory=pk.Blocks(12), disk=disk, demotion="oldest_first"
    ) as cache:
        for prompt in prompts:
            serve(cache, prompt)
        for i in (0, 3, 6, 7):
            print(f"prompt {i}: {cache.explain(prompts[i])}")
        serve(cache, prompts[0])  # comes up from the disk
        serve(cache, prompts[7])  # and from the host
        stats = cache.stats()
        print(stats)
        print("bytes moved:", dict(stats.moved_bytes))
        assert stats.hit_tokens["disk"] > 0

    with pk.KVCache(
        spec, device_memory=pk.Blocks(10), host_memory=pk.Blocks(12), disk=disk
    ) as cache:  # as after a restart
        print("reopened:", cache.explain(prompts[1]))
        serve(cache, prompts[1])
        assert cache.stats().hit_tokens["disk"] > 0
