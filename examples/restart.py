"""A restart that costs no prefill.

One process fills a cache and is killed, the next serves its prefixes from disk.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import pagedkv as pk

SPEC = pk.KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float16", block_size=4, model="toy@1")
PROMPTS = [np.arange(100 * i, 100 * i + 25) for i in range(6)]  # six whole blocks and a token each


def kv_of(tokens: np.ndarray) -> np.ndarray:
    """Stands for a model.

    KV [num_layers, num_tokens, num_kv_heads, head_dim] that follows from the tokens.
    """
    return np.broadcast_to(tokens[None, :, None, None] % 1000, (2, len(tokens), 2, 8)).astype(np.float16)


def serve(cache: pk.KVCache, prompt: np.ndarray) -> dict[str, int]:
    """Verify what is cached, compute the rest; hit tokens by tier."""
    with cache.sequence(prompt) as seq:
        k, v = seq.gather()
        assert (k == kv_of(prompt)[:, : seq.num_computed]).all()
        assert (v == -k).all()
        rest = kv_of(prompt)[:, seq.num_computed :]
        seq.scatter(rest, -rest)
        return {tier: count for tier, count in seq.hit_tokens.items() if count}


def open_cache(folder: str) -> pk.KVCache:
    """Room for one and a half prompts on the device, half a prompt on the host.

    The rest goes to disk.
    """
    disk = pk.Disk(str(Path(folder, "kv")), size=pk.Blocks(64), admission="all")  # however fast this toy computes
    return pk.KVCache(SPEC, device_memory=pk.Blocks(9), host_memory=pk.Blocks(3), disk=disk, demotion="oldest_first")


def fill(folder: str) -> None:
    """The first life: serve every prompt, then die without a word."""
    cache = open_cache(folder)
    for prompt in PROMPTS:
        serve(cache, prompt)
    print(f"the first process served {len(PROMPTS)} prompts", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def restart() -> None:
    """The second life."""
    with tempfile.TemporaryDirectory() as folder:
        first = subprocess.run([sys.executable, __file__, folder], check=False)
        print(f"the first process ended with signal {-first.returncode}")
        assert first.returncode == -signal.SIGKILL
        with open_cache(folder) as cache:
            for number, prompt in enumerate(PROMPTS):
                hits = serve(cache, prompt)
                print(f"prompt {number}: hit tokens {hits or 'none: it had not reached the disk'}, verified")
            served = cache.stats().hit_tokens["disk"]
            print(f"served from disk after kill -9: {served} of {cache.stats().prompt_tokens} prompt tokens")
            assert served >= 24 * 3


if __name__ == "__main__":
    fill(sys.argv[1]) if len(sys.argv) > 1 else restart()
