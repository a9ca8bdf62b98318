"""Every eviction policy agrees, hit for hit and block for block, with a slow model.

The model handles single blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from pagedkv.core import BlockPool, Placement, RadixTree, policy_needs_chain
from tests.core.helpers import cache, cached_prefixes, single
from tests.core.policy_models import Arc, LeafFirst, S3Fifo

MODELS: dict[str, Callable[[int], LeafFirst]] = {
    "lru": LeafFirst,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "hazard": LeafFirst,  # with nothing learned, LRU
}


def trace(rng: Random, num_requests: int) -> list[list[int]]:
    """Return requests that branch off earlier ones, return to hot ones, or share nothing."""
    requests: list[list[int]] = []
    for i in range(num_requests):
        draw = rng.random()
        if not requests or draw < 0.2:
            stem: list[int] = []
        else:
            earlier = rng.choice(requests[-12:] if draw < 0.7 else requests[:5])
            stem = earlier[: rng.randint(0, len(earlier))]
        requests.append(stem + [rng.choice([0, 1, 2, 1000 + i]) for _ in range(rng.randint(0, 5))])
    return requests


def replay(policy: str, requests: list[list[int]], capacity: int, max_run: int) -> None:
    tree = RadixTree(1, max_run=max_run, keep_chain=policy_needs_chain(policy))
    placement = Placement(tree, [BlockPool(capacity)], policy=policy)
    model = MODELS[policy](capacity)
    for i, request in enumerate(requests):
        path = request[:capacity]
        owner, hits = placement.acquire(path)
        assert hits == model.request(request), f"request {i}: {request}"
        assert placement.reserve(len(path) - hits) == 0
        blocks = placement.pools[0].alloc(len(path) - hits)
        placement.insert(owner, np.array(path[hits:], np.int32), blocks)
        placement.release(owner)
        assert cached_prefixes(tree) == model.cached, f"after request {i}: {request}"
    placement.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "hazard"])
@pytest.mark.parametrize("seed", range(12))
def test_a_policy_over_runs_is_the_policy_over_single_blocks(policy: str, seed: int) -> None:
    rng = Random(f"{policy}{seed}")
    replay(policy, trace(rng, 90), capacity=rng.choice([1, 2, 5, 10, 20, 33]), max_run=rng.choice([1, 3, 256]))


def test_arc_does_not_let_a_scan_push_out_what_was_used_twice() -> None:
    tree, _, placement = single(1, 8, policy="arc")
    for _ in range(2):
        for token in range(4):
            cache(placement, [token])
    for token in range(100, 140):
        cache(placement, [token])
    assert {(token,) for token in range(4)} <= cached_prefixes(tree)
    placement.check_integrity()


def test_s3fifo_does_not_let_a_scan_push_out_what_was_used_before() -> None:
    tree, _, placement = single(1, 20, policy="s3fifo")
    for _ in range(3):
        for token in range(10):
            cache(placement, [token])
    for token in range(100, 160):
        cache(placement, [token])
    assert {(token,) for token in range(10)} <= cached_prefixes(tree)
    placement.check_integrity()


def test_lru_lets_the_same_scan_push_everything_out() -> None:
    tree, _, placement = single(1, 8)
    for _ in range(2):
        for token in range(4):
            cache(placement, [token])
    for token in range(100, 108):
        cache(placement, [token])
    assert cached_prefixes(tree) == {(token,) for token in range(100, 108)}
