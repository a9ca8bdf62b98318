"""``pagedkv.lab.replay.replay`` and its Results.

It returns what is asked for, and refuses nonsense first.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import InvalidArgument, TraceFormatError, WrongType
from pagedkv.lab.replay import KNOWN, Capacity, Options, Trace, load_trace, replay
from pagedkv.spec.sizes import Blocks


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("synthetic:agent:0:150")


def test_one_result_per_capacity_and_policy_in_the_order_asked(trace: Trace) -> None:
    results = replay(trace, ["min", "lru"], ["5%", "40 blocks"])
    assert [(r.policy, r.capacity.device) for r in results] == [
        (policy, capacity) for capacity in (trace.num_unique // 20, 40) for policy in ("min", "lru")
    ]


def test_every_policy_has_the_same_keys_and_they_can_be_written_as_json(trace: Trace) -> None:
    results = replay(trace, KNOWN, Capacity(20, 30, 40))
    written = [json.loads(json.dumps(r.to_json())) for r in results]
    assert len({tuple(w) for w in written}) == 1
    for w in written:
        hits = w["hit_blocks"]
        assert hits["device"] + hits["host"] + hits["disk"] == hits["total"]
        assert w["capacity_blocks"] == {"device": 20, "host": 30, "disk": 40}
        assert w["block_accesses"] == trace.num_accesses
        assert 0 <= w["token_hit_rate"] <= 1
        assert 0 <= w["flop_weighted_hit_rate"] <= 1
        assert w["wrong_bytes"] == 0


def test_the_gap_closed_is_none_of_it_for_lru_and_all_of_it_for_min(trace: Trace) -> None:
    lru, best = replay(trace, ["lru", "min"], Blocks(60))
    assert (lru.gap_to_min_closed, best.gap_to_min_closed) == (0.0, 1.0)
    (arc,) = replay(trace, ["arc"], Blocks(60))
    hits = [r.hit_blocks["total"] for r in (lru, arc, best)]
    assert math.isclose(arc.gap_to_min_closed or 0.0, (hits[1] - hits[0]) / (hits[2] - hits[0]))


def test_there_is_no_gap_where_everything_fits(trace: Trace) -> None:
    (result,) = replay(trace, ["lru"], "100%")
    assert result.gap_to_min_closed is None


def test_a_trace_can_be_named() -> None:
    assert replay("synthetic:chat:0:50", ["infinite"], Blocks(10))[0].engine == "bound"


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"policies": ["lru", "belady"]},
        InvalidArgument,
        "belady.*known: lru, arc, s3fifo, hazard.*infinite, min",
    ),
    ({"policies": []}, InvalidArgument, "at least one policy"),
    ({"policies": "lru"}, WrongType, "list of names"),
    ({"policies": [3]}, WrongType, "list of names"),
    ({"capacities": 64}, WrongType, "64 has no unit"),
    ({"capacities": []}, InvalidArgument, "at least one capacity"),
    ({"capacities": "0 blocks"}, InvalidArgument, "less than one block"),
    ({"capacities": ["5%", "x"]}, InvalidArgument, "'x' is not a size"),
    ({"capacities": Blocks(2**31)}, InvalidArgument, "absurd"),
    ({"trace": 5}, WrongType, "Trace or the name"),
    ({"trace": "/absent.npz"}, TraceFormatError, "no such file"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD)
def test_nonsense_is_refused_before_anything_runs(
    change: dict[str, Any], kind: type[Exception], message: str, trace: Trace
) -> None:
    arguments = {"trace": trace, "policies": ["lru"], "capacities": "5%"} | change
    with pytest.raises(kind, match=message):
        replay(**arguments)


@pytest.mark.parametrize(
    "change",
    [{"engine": "magic"}, {"demotion": "random"}, {"inclusive": ("device",)}, {"inclusive": ("tape",)}],
)
def test_options_check_themselves(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Options(**change)


def test_the_committed_traces_are_one_trace_in_four_forms(data: Path) -> None:
    pytest.importorskip("zstandard")
    forms = [load_trace(data / name) for name in ("chat.npz", "chat.jsonl", "chat.jsonl.gz", "chat.jsonl.zst")]
    hits = [[r.hit_blocks for r in replay(form, KNOWN, Blocks(30))] for form in forms]
    assert hits[0] == hits[1] == hits[2] == hits[3]
