"""The sim engine.

LRU's published counts through the real core, bounds above every policy, nothing lost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.lab.replay import POLICIES, Capacity, Options, References, Trace, load_trace, replay
from pagedkv.lab.replay.engine_sim import SimCache
from pagedkv.spec.sizes import Blocks


@pytest.mark.parametrize("name", ["mooncake_conversation_dev", "weka_dev_b512"])
def test_lru_at_one_tier_meets_every_published_count(name: str, shared_traces: Path, golden: dict[str, Any]) -> None:
    trace = load_trace(shared_traces / f"{name}.npz")
    rows = golden["traces"][name]["capacities"]
    results = replay(trace, ["lru"], [Blocks(row["blocks"]) for row in rows])
    assert [r.hit_blocks["total"] for r in results] == [row["lru"] for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_lru_agrees_with_the_reference_on_every_request(
    seed: int, make_trace: Callable[..., Trace], random_paths: Callable[..., list[list[int]]]
) -> None:
    trace = make_trace(random_paths(seed, requests=120))
    references = References(trace)
    for capacity in (1, 2, 3, 5, 8, 13, 21):
        (result,) = replay(trace, ["lru"], Blocks(capacity), references=references)
        assert result.hits_per_request.tolist() == references.hits("lru", capacity).tolist()


@pytest.mark.parametrize("demotion", ["leaf_first", "oldest_first"])
@pytest.mark.parametrize("inclusive", [(), ("disk",), ("host", "disk")])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_passes_min_bypass_on_any_tiers(
    policy: str,
    inclusive: tuple[str, ...],
    demotion: str,
    make_trace: Callable[..., Trace],
    random_paths: Callable[..., list[list[int]]],
) -> None:
    options = Options(demotion=demotion, inclusive=inclusive)
    for seed in range(4):
        trace = make_trace(random_paths(seed, requests=150, depth=8))
        references = References(trace)
        for capacity in (
            Capacity(3),
            Capacity(3, 4),
            Capacity(4, 0, 9),
            Capacity(3, 5, 11),
            Capacity(30, 1, 1),
        ):
            (result,) = replay(trace, [policy], capacity, options=options, references=references)
            (bound,) = replay(trace, ["min-bypass"], capacity, references=references)
            hits, best = result.hit_blocks, bound.hit_blocks
            assert hits["device"] + hits["host"] + hits["disk"] == hits["total"]
            assert hits["total"] <= best["total"]
            assert hits["device"] <= best["device"]
            assert (capacity.host > 0) or hits["host"] == 0
            assert (capacity.disk > 0) or hits["disk"] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_core_is_consistent_after_every_request(
    policy: str, make_trace: Callable[..., Trace], random_paths: Callable[..., list[list[int]]]
) -> None:
    trace = make_trace(random_paths(1, requests=80, depth=7))
    cache = SimCache((4, 5, 9), policy)
    for i in range(trace.num_requests):
        hit, by_tier = cache.request(trace.path(i))
        assert by_tier.sum() == hit
        cache.placement.check_integrity()


def test_what_is_promoted_came_from_below_and_is_counted_in_bytes() -> None:
    a, b = [1, 2, 3], [4, 5, 6]
    trace = _trace_of([a, b, a])
    (result,) = replay(trace, ["lru"], Capacity(3, 6), options=Options(bytes_per_token=2))
    block = 512 * 2
    assert result.hit_blocks == {"device": 0, "host": 3, "disk": 0, "total": 3}
    assert result.bytes["host_to_device"] == 3 * block
    assert result.bytes["device_to_host"] == 6 * block
    assert result.bytes["disk_to_device"] == 0


def test_a_request_longer_than_the_device_keeps_its_first_blocks() -> None:
    trace = _trace_of([[1, 2, 3, 4], [1, 2, 3, 4]])
    (result,) = replay(trace, ["lru"], Blocks(2))
    assert result.hits_per_request.tolist() == [0, 2]
    (result,) = replay(trace, ["lru"], Capacity(2, 100))
    assert result.hits_per_request.tolist() == [0, 2]


def test_more_room_than_blocks_is_an_infinite_cache() -> None:
    trace = load_trace("synthetic:agent:2:100")
    for policy in POLICIES:
        (result,) = replay(trace, [policy], Blocks(2**31 - 1))
        assert np.array_equal(result.hits_per_request, trace.seen_before())


def test_a_replay_is_the_same_every_time() -> None:
    trace = load_trace("synthetic:chat:5:300")
    for policy in POLICIES:
        first, second = replay(trace, [policy], [Capacity(40, 80, 200)] * 2)
        assert first.hits_per_request.tolist() == second.hits_per_request.tolist()
        assert first.bytes == second.bytes


def _trace_of(paths: list[list[int]]) -> Trace:
    from pagedkv.lab.replay.trace import from_segments

    assert paths  # each path is new, or the same as an earlier one
    ref = [paths.index(p) if paths.index(p) < i else -1 for i, p in enumerate(paths)]
    lengths = np.array([len(p) for p in paths], np.int64)
    refs = np.array(ref, np.int64)
    tokens = (512 * lengths).astype(np.int32)
    lcp = np.where(refs >= 0, lengths, 0)
    return from_segments("made", "", 512, np.zeros(len(paths), np.int64), tokens, tokens, refs, lcp, lengths)
