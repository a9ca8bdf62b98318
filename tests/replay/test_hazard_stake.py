"""``--hazard-stake``: how far the policy hazard may leave LRU in a replay."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.cli import main
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.replay import Capacity, Options, load_trace, replay


def hits(stake: float | None) -> int:
    trace = load_trace("synthetic:chat:0:1500")
    (result,) = replay(trace, ["hazard"], "2%", options=Options(hazard_stake=stake))
    return result.hit_blocks["total"]


def test_the_strict_bound_is_another_replay_than_the_default_and_stake_one_the_same() -> None:
    assert hits(None) == hits(1)
    assert len({hits(0), hits(1), hits(math.inf)}) > 1


def test_the_report_says_the_stake_and_stays_json(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [
        "replay",
        "synthetic:chat:0:300",
        "--policy",
        "lru,hazard",
        "--device-memory",
        "2%",
        "--json",
        str(out),
        "--quiet",
    ]
    assert main([*command, "--hazard-stake", "inf"]) == 0
    report = json.loads(out.read_text(), parse_constant=pytest.fail)
    lru, hazard = (result["parameters"] for result in report["results"])
    assert hazard["hazard_stake"] == "inf"
    assert "hazard_stake" not in lru


def test_a_stake_without_the_policy_is_refused() -> None:
    trace = load_trace("synthetic:chat:0:50")
    with pytest.raises(InvalidArgument, match="not among lru, min: add"):
        replay(trace, ["lru", "min"], "2%", options=Options(hazard_stake=0.0))


def test_the_table_says_the_stake(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", "synthetic:chat:0:50", "--policy", "lru,hazard", "--device-memory", "2%"]
    assert main([*command, "--hazard-stake", "0"]) == 0
    assert "hazard with stake 0" in " ".join(capsys.readouterr().out.split())
    assert main(command) == 0
    assert "stake" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"hazard_stake": -0.1}, InvalidArgument, "not 0 or more"),
        ({"hazard_stake": math.nan}, InvalidArgument, "not 0 or more"),
        ({"hazard_stake": True}, WrongType, "not bool"),
        ({"hazard_stake": "1"}, WrongType, "not str"),
        ({"hazard_stake": 0.0, "engine": "real"}, InvalidArgument, "take the engine 'sim'"),
    ],
)
def test_a_stake_that_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Options(**options)


def test_the_policy_is_told_the_sessions_of_a_trace() -> None:
    trace = load_trace("synthetic:agent:3:300")
    assert len(set(trace.sessions.tolist())) > 3
    nameless = replace(trace, sessions=np.full_like(trace.sessions, -1))
    room = Capacity(trace.num_unique // 10)
    for engine in ("sim", "real"):
        options = Options(engine=engine, block_bytes=4096)
        told, untold = (replay(each, ["hazard"], room, options=options)[0].counters for each in (trace, nameless))
        assert told["hazard.left_behind"] > 0 == untold["hazard.left_behind"]
