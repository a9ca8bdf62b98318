"""Hits of every policy as exact integers: on the synthetic traces and the shared ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.replay.hits import TABLES, hits_of, recorded, source

SYNTHETIC, SHARED = TABLES


@pytest.mark.parametrize("trace", TABLES[SYNTHETIC][0])
@pytest.mark.parametrize("size", TABLES[SYNTHETIC][1])
def test_every_policy_hits_what_it_always_hit(trace: str, size: str) -> None:
    assert hits_of(trace, size) == recorded(SYNTHETIC)[trace][size]


@pytest.mark.slow
@pytest.mark.parametrize("trace", TABLES[SHARED][0])
@pytest.mark.parametrize("size", TABLES[SHARED][1])
def test_every_policy_hits_what_it_always_hit_on_a_shared_trace(trace: str, size: str) -> None:
    if not Path(source(trace)).exists():
        pytest.skip(f"{trace} is not here: set PAGEDKV_SHARED to the folder that holds traces/")
    assert hits_of(trace, size) == recorded(SHARED)[trace][size]


def test_the_table_of_the_shared_traces_has_112_replays() -> None:
    table = recorded(SHARED)
    assert {trace: tuple(rows) for trace, rows in table.items()} == dict.fromkeys(*TABLES[SHARED])
    assert sum(len(hits) for rows in table.values() for hits in rows.values()) == 112


@pytest.mark.checkout
def test_the_policy_bench_counted_the_same_hits() -> None:
    """bench/results/policies.json is from another run, by other code, of an older commit."""
    results = json.loads((Path(__file__).parents[2] / "bench" / "results" / "policies.json").read_text())
    names = {one["file"].removesuffix(".npz"): name for name, one in results["traces"].items()}
    counted = {
        (row["trace"], row["capacity"], row["policy"]): row["hit_blocks"]
        for row in results["rows"]
        if row["source"] == "run"
    }
    compared = 0
    for trace, rows in recorded(SHARED).items():
        if trace not in names:
            continue  # a format of a trace that the bench replays in another one
        for size, hits in rows.items():
            for policy, by_tier in hits.items():
                known = counted.get((names[trace], size, policy))
                if known is not None:
                    assert by_tier == [known, 0, 0], (trace, size, policy)
                    compared += 1
    assert compared == 72
