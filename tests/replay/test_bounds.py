"""MIN, MIN-bypass, infinite and the reference LRU.

They agree with published counts, brute force, and each other.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.lab.replay import References, Trace, bounds, load_trace

TRACES = ("mooncake_conversation_dev", "weka_dev_b512")


@pytest.mark.parametrize("name", TRACES)
def test_every_published_count_is_met_exactly(name: str, shared_traces: Path, golden: dict[str, Any]) -> None:
    trace = load_trace(shared_traces / f"{name}.npz")
    expected = golden["traces"][name]
    assert (trace.num_requests, trace.num_accesses) == (expected["requests"], expected["block_accesses"])
    assert trace.num_unique == expected["unique_blocks"]
    references = References(trace)
    assert references.total("infinite", 1) == expected["infinite"]
    for row in expected["capacities"]:
        found = {bound: references.total(bound, row["blocks"]) for bound in ("lru", "min", "min-bypass")}
        assert found == {bound: row[bound] for bound in found}, row["label"]


def test_the_jsonl_and_the_npz_form_of_a_trace_are_the_same_trace(shared_traces: Path) -> None:
    pytest.importorskip("zstandard")
    a = load_trace(shared_traces / "mooncake_conversation_dev.npz")
    b = load_trace(shared_traces / "mooncake_conversation_dev.jsonl.zst")
    for name in ("t_ms", "input_tokens", "output_tokens", "offsets", "paths", "parents", "depths"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("seed", range(30))
def test_more_foresight_and_more_room_never_hit_less(
    seed: int, make_trace: Callable[..., Trace], random_paths: Callable[..., list[list[int]]]
) -> None:
    references = References(make_trace(random_paths(seed)))
    before = 0
    for capacity in range(1, 20):
        lru, best, bypass, infinite = (
            references.total(name, capacity) for name in ("lru", "min", "min-bypass", "infinite")
        )
        assert lru <= best <= bypass <= infinite
        assert bypass >= before
        before = bypass


@pytest.mark.parametrize("seed", range(40))
def test_bounds_equal_the_best_of_all_eviction_choices_on_tiny_traces(
    seed: int, make_trace: Callable[..., Trace], random_paths: Callable[..., list[list[int]]]
) -> None:
    paths = random_paths(seed, requests=6, branches=2, depth=3)
    references = References(make_trace(paths))
    for capacity in (1, 2, 3, 4):
        assert references.total("min", capacity) == best_of_all(paths, capacity, must_admit=True)
        assert references.total("min-bypass", capacity) == best_of_all(paths, capacity, must_admit=False)


@pytest.mark.parametrize("seed", range(30))
def test_lru_equals_a_plain_python_lru(
    seed: int, make_trace: Callable[..., Trace], random_paths: Callable[..., list[list[int]]]
) -> None:
    paths = random_paths(seed, requests=60)
    trace = make_trace(paths)
    for capacity in (1, 2, 3, 5, 8, 13):
        assert References(trace).hits("lru", capacity).tolist() == plain_lru(paths, capacity)


def test_arrays_that_do_not_describe_a_trace_are_refused() -> None:
    paths, offsets, parents = (
        np.array([0, 1], np.int32),
        np.array([0, 2], np.int64),
        np.array([-1, 0], np.int32),
    )
    uses = bounds.next_uses(paths, offsets, 2)
    assert uses.tolist() == [bounds.NEVER, bounds.NEVER]
    with pytest.raises(ValueError, match="describe"):
        bounds.next_uses(paths, offsets, 1)
    with pytest.raises(ValueError, match="describe"):
        bounds.next_uses(paths, np.array([0, 3], np.int64), 2)
    with pytest.raises(ValueError, match="next_use"):
        bounds.min_hits(paths, offsets, parents, uses[:1], 1)
    with pytest.raises(ValueError, match="capacity"):
        bounds.lru_hits(paths, offsets, parents, 0)


def leading(path: list[int], cached: frozenset[int]) -> int:
    hit = 0
    while hit < len(path) and path[hit] in cached:
        hit += 1
    return hit


def best_of_all(paths: list[list[int]], capacity: int, *, must_admit: bool) -> int:
    """Most hits over every sequence of cache contents that demand filling can reach."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for path in paths:
        following: dict[frozenset[int], int] = {}
        for cached, hits in states.items():
            total = hits + leading(path, cached)
            kept = frozenset(path[:capacity]) if must_admit else frozenset()
            pool = sorted((cached | frozenset(path)) - kept) if not must_admit else sorted(cached - kept)
            for n in range(min(len(pool), capacity - len(kept)) + 1):
                for extra in combinations(pool, n):
                    state = kept | frozenset(extra)
                    following[state] = max(following.get(state, 0), total)
        states = following
    return max(states.values())


def plain_lru(paths: list[list[int]], capacity: int) -> list[int]:
    """Leaf-first LRU in one dict: block -> (last use, -depth).

    The least childless block off the path goes.
    """
    last: dict[int, tuple[int, int]] = {}
    parent: dict[int, int] = {}
    result = []
    for i, path in enumerate(paths):
        parent |= {b: a for a, b in pairwise(path)}
        result.append(leading(path, frozenset(last)))
        kept = path[:capacity]
        missing = [b for b in kept if b not in last]
        while len(last) + len(missing) > capacity:
            inner = {parent[b] for b in last if b in parent}
            del last[min((key, b) for b, key in last.items() if b not in inner and b not in kept)[1]]
        for depth, b in enumerate(kept):
            last[b] = (i, -depth)
    return result
