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
SYSTEM = np.arange(12)  # three whole blocks, with which every chat begins
PROMPTS = [np.r_[SYSTEM, np.arange(100 * i, 100 * i + 13)] for i in range(1, 7)]  # and three more, and a token


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
    """Room for two chats in memory.

    The disk has what a second chat uses, and what leaves memory. The system prompt is always in use and never leaves
    memory, so the disk gets a copy of it.
    """
    disk = pk.Disk(str(Path(folder, "kv")), size=pk.Blocks(64), admission="all")  # however fast this toy computes
    return pk.KVCache(SPEC, device_memory=pk.Blocks(9), host_memory=pk.Blocks(8), disk=disk)


def fill(folder: str) -> None:
    """The first life: serve every prompt, then die without a word."""
    cache = open_cache(folder)
    for number, prompt in enumerate(PROMPTS):
        serve(cache, prompt)
        if number == 3:
            cache.checkpoint()  # now and then: these four are on the disk, and stay in memory
    print(f"the first process served {len(PROMPTS)} chats over one system prompt", flush=True)
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
                print(f"chat {number}: hit tokens {hits or 'none: it had not reached the disk'}, verified")
                assert number > 3 or sum(hits.values()) == 24
            stats = cache.stats()
            print(f"found again after kill -9: {sum(stats.hit_tokens.values())} of {stats.prompt_tokens} prompt tokens")


if __name__ == "__main__":
    fill(sys.argv[1]) if len(sys.argv) > 1 else restart()
