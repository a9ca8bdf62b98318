"""Hits of every policy on both synthetic traces, as exact integers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.core import POLICIES
from pagedkv.lab.replay import load_trace, replay
from pagedkv.lab.replay.capacity import resolve

GOLDEN: dict[str, dict[str, dict[str, list[int]]]] = json.loads(
    (Path(__file__).parent / "policy_hits.json").read_text()
)
SIZES = {"2%": {"device": "2%"}, "10%": {"device": "10%"}, "tiers": {"device": "1%", "host": "4%", "disk": "10%"}}


@pytest.mark.parametrize("trace", GOLDEN)
@pytest.mark.parametrize("size", SIZES)
def test_every_policy_hits_what_it_always_hit(trace: str, size: str) -> None:
    requests = load_trace(trace)
    found = replay(requests, list(POLICIES), resolve(requests, **SIZES[size]))
    hits = {one.policy: [one.hit_blocks[tier] for tier in ("device", "host", "disk")] for one in found}
    assert hits == GOLDEN[trace][size]
