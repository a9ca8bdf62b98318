"""Runs to record, with KV that is its own token.

So a test can compare what a picture says of a block with the block's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.lab.recording import Recording
from pagedkv.lab.show.demo import record
from tests.in_blocks import cache_options

BLOCK = 4
SPEC = pk.KVSpec(1, 1, 2, "float32", BLOCK, model="its own token")


def compute(cache: pk.KVCache, *seqs: pk.Sequence, q_lens: Any = None) -> None:
    """One step, in which the KV of a token is the token."""
    with cache.step(seqs, q_lens=q_lens) as step:
        kv = np.broadcast_to(step.tokens[:, None, None], (len(step.tokens), 1, 2)).astype(np.float32)
        step.write(0, kv, kv)


def serve(cache: pk.KVCache, tokens: list[int]) -> None:
    """A whole request."""
    with cache.sequence(tokens) as seq:
        compute(cache, seq)


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Callable[..., pk.KVCache]]:
    """Opens caches of `SPEC`; ``disk=n`` is a disk of n blocks."""
    opened: list[pk.KVCache] = []

    def open_it(device: int = 8, disk: int | None = None, **options: Any) -> pk.KVCache:
        where = None if disk is None else pk.Disk(str(tmp_path / f"kv{len(opened)}"), pk.Blocks(disk))
        opened.append(pk.KVCache(SPEC, **cache_options(device=device, disk=where, **options)))
        return opened[-1]

    yield open_it
    for cache in opened:
        cache.check_integrity()
        cache.close()


@pytest.fixture(scope="session")
def demo() -> Recording:
    """The built-in run."""
    return record()


@pytest.fixture(scope="session")
def demo_of_groups() -> Recording:
    """The built-in run over groups of layers."""
    return record("groups")
