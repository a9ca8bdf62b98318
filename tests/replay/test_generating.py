"""Requests that take time.

Which request holds what until when, the engine that replays it, and its optimum.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pagedkv.cli import main
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.replay import POLICIES, Capacity, Options, References, Trace, bounds, load_trace
from pagedkv.lab.replay import replay as run_replay
from pagedkv.lab.replay.engine_sim import SimCache
from pagedkv.lab.replay.schedule import arrivals_and_ends
from pagedkv.spec.sizes import Blocks

TINY = [
    Capacity(1),
    Capacity(2),
    Capacity(3),
    Capacity(5),
    Capacity(2, 1),
    Capacity(1, 2),
    Capacity(3, 2),
    Capacity(4, 3),
]
TIERS = [Capacity(3), Capacity(8), Capacity(3, 4), Capacity(8, 3), Capacity(6, 0, 9), Capacity(8, 5, 11)]
CHAT = {1238: (8659, 19963), 2476: (10929, 43848), 6190: (27071, 64655), 12381: (44167, 66785)}  # LRU, MIN at 20 ms


@pytest.fixture
def timed(make_trace: Callable[..., Trace]) -> Callable[..., Trace]:
    """A trace of paths, arrivals in milliseconds and output lengths."""

    def make(paths: list[list[int]], t_ms: list[int], output_tokens: list[int]) -> Trace:
        trace = make_trace(paths)
        return replace(trace, t_ms=np.array(t_ms, np.int64), output_tokens=np.array(output_tokens, np.int32))

    return make


@pytest.fixture
def busy(timed: Callable[..., Trace], random_paths: Callable[..., list[list[int]]]) -> Callable[..., Trace]:
    """Random paths of which a few are running at any time, for 1 ms a token."""

    def make(seed: int, *, longest: int = 6, **shape: int) -> Trace:
        random, paths = Random(seed), random_paths(seed, **shape)
        t_ms = np.cumsum([random.randint(0, 2) for _ in paths]).tolist()
        return timed(paths, t_ms, [random.randint(0, longest) for _ in paths[:-1]] + [1])

    return make


def test_who_is_over_goes_before_who_arrives_in_order_of_the_ends_and_then_of_arrival(
    timed: Callable[..., Trace],
) -> None:
    trace = timed([[1]] * 5, [0, 0, 10, 30, 30], [3, 2, 1, 0, 5])
    assert arrivals_and_ends(trace, 10.0).tolist() == [0, 1, 2, ~1, ~2, ~0, 3, ~3, 4, ~4]


def test_a_time_stamp_below_an_earlier_one_counts_as_that_one(timed: Callable[..., Trace]) -> None:
    trace = timed([[1]] * 3, [50, 0, 60], [1, 1, 1])
    assert arrivals_and_ends(trace, 5.0).tolist() == [0, 1, ~0, ~1, 2, ~2]


def test_what_a_running_request_holds_is_not_evicted_and_the_next_keeps_what_fits(timed: Callable[..., Trace]) -> None:
    trace = timed([[1, 2, 3], [4, 5], [1, 2, 3], [4, 5]], [0, 10, 20, 200], [100, 1, 1, 1])
    for policy in POLICIES:
        (held,) = run_replay(trace, [policy], Blocks(4), options=Options(generating=1.0))
        assert held.hits_per_request.tolist() == [0, 0, 3, 1]
        assert held.counters["squeezed_requests"] == 1
    (plain,) = run_replay(trace, ["lru"], Blocks(4))
    assert plain.hits_per_request.tolist() == [0, 0, 2, 1]
    assert plain.counters["squeezed_requests"] == 0


def test_a_request_whose_cold_blocks_find_no_room_on_the_device_hits_those_that_do(
    timed: Callable[..., Trace],
) -> None:
    paths = [[1, 2, 3], [4, 5, 6], [7, 8], [1, 2, 3]]
    trace = timed(paths, [0, 10, 20, 30], [1, 1, 100, 1])
    (result,) = run_replay(trace, ["lru"], Capacity(4, 6), options=Options(generating=1.0))
    assert result.hits_per_request.tolist() == [0, 0, 0, 2]
    assert result.hit_blocks["host"] == 2


@pytest.mark.parametrize("seed", range(40))
def test_min_equals_the_best_of_all_eviction_choices_while_requests_run(seed: int, busy: Callable[..., Trace]) -> None:
    trace = busy(seed, requests=9, branches=2, depth=4)
    references = References(trace, 1.0)
    for capacity in TINY:
        best = best_of_all(trace, capacity)
        assert references.total("min", capacity) == references.total("min-bypass", capacity) == best


@pytest.mark.parametrize("seed", range(20))
def test_lru_equals_a_plain_python_lru_and_the_engine_on_every_request(seed: int, busy: Callable[..., Trace]) -> None:
    trace = busy(seed, requests=60)
    references = References(trace, 1.0)
    for capacity in (1, 2, 3, 5, 8, 13):
        expected = plain_lru(trace, capacity)
        assert references.hits("lru", capacity).tolist() == expected
        (result,) = run_replay(trace, ["lru"], Blocks(capacity), options=Options(generating=1.0), references=references)
        assert result.hits_per_request.tolist() == expected


@pytest.mark.parametrize("demotion", ["leaf_first", "oldest_first"])
@pytest.mark.parametrize("inclusive", [(), ("disk",), ("host", "disk")])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_passes_min_on_any_tiers_while_requests_run(
    policy: str, inclusive: tuple[str, ...], demotion: str, busy: Callable[..., Trace]
) -> None:
    options = Options(demotion=demotion, inclusive=inclusive, generating=1.0)
    for seed in range(3):
        trace = busy(seed, longest=(2, 6, 20)[seed], requests=100, depth=8)
        references = References(trace, 1.0)
        for capacity in TIERS:
            result, bound = run_replay(trace, [policy, "min"], capacity, options=options, references=references)
            assert result.hit_blocks["total"] <= bound.hit_blocks["total"]
            assert result.hit_blocks["device"] <= bound.hit_blocks["device"]
            assert result.counters["squeezed_requests"] >= bound.counters["squeezed_requests"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_held_follows_from_the_trace_and_the_device_alone(policy: str, busy: Callable[..., Trace]) -> None:
    trace = busy(5, longest=12, requests=80, depth=8)
    events = arrivals_and_ends(trace, 1.0)
    for capacity in TIERS:
        fits = bounds.held_prefixes(trace.paths, trace.offsets, trace.num_unique, events, capacity.device)
        assert fits.tolist() == held_by_hand(trace, capacity.device)
        cache = SimCache(capacity.blocks[: 3 if capacity.disk else 2], policy)  # type: ignore[arg-type]
        running: dict[int, Any] = {}
        for event in events.tolist():
            if event < 0:
                cache.finished(running.pop(~event), 0)
            else:
                running[event] = cache.open(trace.path(event))
                assert running[event].held == fits[event]
            cache.placement.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_where_nobody_runs_any_more_when_the_next_comes_all_is_as_without(
    seed: int, timed: Callable[..., Trace], random_paths: Callable[..., list[list[int]]]
) -> None:
    paths = random_paths(seed)
    trace = timed(paths, [1000 * i for i in range(len(paths))], [7] * len(paths))
    plain, generating = References(trace), References(trace, 20.0)
    for capacity in (1, 3, 8, 13):
        for name in ("lru", "min", "infinite"):
            assert generating.hits(name, capacity).tolist() == plain.hits(name, capacity).tolist()
        for policy in POLICIES:
            a, b = (
                run_replay(trace, [policy], Blocks(capacity), options=Options(generating=ms))
                for ms in (None, 20.0)
            )
            assert a[0].hits_per_request.tolist() == b[0].hits_per_request.tolist()


@pytest.mark.parametrize("seed", range(10))
def test_holding_blocks_never_gives_more_hits_than_foresight_without(seed: int, busy: Callable[..., Trace]) -> None:
    trace = busy(seed)
    plain, generating = References(trace), References(trace, 1.0)
    for capacity in (Capacity(2), Capacity(5), Capacity(5, 4), Capacity(9)):
        assert generating.total("min", capacity) <= plain.total("min-bypass", capacity)


def test_the_chat_trace_has_the_counts_of_the_documentation(shared_traces: Path) -> None:
    trace = load_trace(shared_traces / "mooncake_conversation_dev.npz")
    references = References(trace, 20.0)
    found = {c: (references.total("lru", c), references.total("min", c)) for c in CHAT}
    assert found == CHAT
    (result,) = run_replay(trace, ["lru"], Blocks(2476), options=Options(generating=20.0), references=references)
    assert result.hits_per_request.tolist() == references.hits("lru", 2476).tolist()


@pytest.mark.parametrize("token_ms", [0, -1.0, float("nan"), float("inf"), 1e7])
def test_a_token_takes_some_time_and_not_forever(token_ms: float) -> None:
    with pytest.raises(InvalidArgument, match="milliseconds per output token"):
        Options(generating=token_ms)
    with pytest.raises(WrongType, match="not bool"):
        Options(generating=True)


def test_what_cannot_be_replayed_so_is_refused(timed: Callable[..., Trace]) -> None:
    with pytest.raises(InvalidArgument, match="take the engine 'sim'"):
        Options(engine="real", generating=20.0)
    silent, speaking = timed([[1], [2]], [0, 1], [0, 0]), timed([[1], [2]], [0, 1], [0, 1])
    with pytest.raises(InvalidArgument, match="no output lengths"):
        run_replay(silent, ["lru"], Blocks(1), options=Options(generating=20.0))
    with pytest.raises(InvalidArgument, match="no output lengths"):
        References(silent, 20.0)
    with pytest.raises(InvalidArgument, match=r"References\(trace, options.generating\)"):
        run_replay(speaking, ["min"], Blocks(1), references=References(speaking, 5.0))


def test_events_that_are_none_of_the_trace_are_refused() -> None:
    paths, offsets, parents = np.array([0, 1], np.int32), np.array([0, 1, 2], np.int64), np.array([-1, -1], np.int32)
    for events in ([0, ~0], [0, ~0, ~1, 1], [0, ~0, 0, ~0], [0, 1, ~0, 2]):
        with pytest.raises(ValueError, match="comes and when it is over"):
            bounds.held_prefixes(paths, offsets, 2, np.array(events, np.int32), 1)
    both = np.array([0, 1, ~0, ~1], np.int32)
    with pytest.raises(ValueError, match="held_prefixes"):
        bounds.lru_hits(paths, offsets, parents, 1, both)
    with pytest.raises(ValueError, match="capacity"):
        bounds.held_prefixes(paths, offsets, 2, both, 0)


def test_the_report_says_how_long_requests_hold_their_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    argv = [
        "replay",
        "synthetic:chat:0:400",
        "--policy",
        "lru,min,min-bypass",
        "--device-memory",
        "20%",
        "--json",
        str(out),
    ]
    assert main([*argv, "--generating", "20"]) == 0
    shown = capsys.readouterr().out
    assert "held for 20 ms per output token, in lru, min and min-bypass too" in " ".join(shown.split())
    assert "squeezed" in shown
    report = json.loads(out.read_text())
    assert report["generating_ms"] == 20.0
    assert [r["parameters"]["generating_ms"] for r in report["results"]] == [20.0] * 3
    assert any("20 ms per output token" in line for line in report["not_modelled"])
    assert report["results"][1]["gap_to_min_closed"] == report["results"][2]["gap_to_min_closed"] == 1.0
    assert main(argv) == 0
    assert "squeezed" not in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["generating_ms"] is None
    assert any("queueing and batching play no part" in line for line in report["not_modelled"])


def leading(path: list[int], cached: frozenset[int]) -> int:
    hit = 0
    while hit < len(path) and path[hit] in cached:
        hit += 1
    return hit


def held_by_hand(trace: Trace, device: int) -> list[int]:
    """Return for each request the longest prefix that fits beside what others hold.

    Together they are no more than the device.
    """
    running: dict[int, set[int]] = {}
    lengths = [0] * trace.num_requests
    for event in arrivals_and_ends(trace, 1.0).tolist():
        if event < 0:
            del running[~event]
            continue
        path, others = trace.path(event).tolist(), set().union(*running.values())
        fits = max(n for n in range(len(path) + 1) if n == 0 or len(others | set(path[:n])) <= device)
        lengths[event], running[event] = fits, set(path[:fits])
    return lengths


def best_of_all(trace: Trace, capacity: Capacity) -> int:
    """Return the most hits over every sequence of cache contents.

    The contents have in them what is held, and only what was asked for.
    """
    fits = held_by_hand(trace, capacity.device)
    running: dict[int, frozenset[int]] = {}
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for event in arrivals_and_ends(trace, 1.0).tolist():
        if event < 0:
            del running[~event]
            continue
        path = trace.path(event).tolist()[: fits[event]]
        running[event] = frozenset(path)
        held = frozenset().union(*running.values())
        following: dict[frozenset[int], int] = {}
        for cached, hits in states.items():
            pool = sorted(cached - held)
            for n in range(min(len(pool), capacity.total - len(held)) + 1):
                for kept in combinations(pool, n):
                    state = held.union(kept)
                    following[state] = max(following.get(state, 0), hits + leading(path, cached))
        states = following
    return max(states.values())


def plain_lru(trace: Trace, capacity: int) -> list[int]:
    """Leaf-first LRU: block -> (when it was let go last, -depth).

    The least childless block that no request holds goes.
    """
    fits = held_by_hand(trace, capacity)
    last: dict[int, tuple[int, int]] = {}
    running: dict[int, list[int]] = {}
    parent: dict[int, int] = {}
    result = [0] * trace.num_requests
    for now, event in enumerate(arrivals_and_ends(trace, 1.0).tolist()):
        if event < 0:
            last |= {b: (now, -depth) for depth, b in enumerate(running.pop(~event))}
            continue
        path = trace.path(event).tolist()[: fits[event]]
        parent |= {b: a for a, b in pairwise(path)}
        result[event] = leading(path, frozenset(last))
        running[event] = path
        held = {b for blocks in running.values() for b in blocks}
        while len(last.keys() | set(path)) > capacity:
            inner = {parent[b] for b in last if b in parent}
            del last[min((key, b) for b, key in last.items() if b not in inner and b not in held)[1]]
        last |= {b: (now, -depth) for depth, b in enumerate(path)}
    return result
