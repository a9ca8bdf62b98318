"""The core bench runs end to end at its smallest sizes. What it measures is not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.results import ROOT, read_results
from bench.table import render_table

PEER_VARIABLES = ("PEER_VLLM", "PEER_SGLANG", "PEER_PYTHON")


def test_core_bench_runs_one_workload_and_says_which_peers_are_absent(tmp_path: Path) -> None:
    out = tmp_path / "core.json"
    command = [sys.executable, "-m", "bench.core", "--quick", "--only", "a", "--json", str(out)]
    alone = {name: value for name, value in os.environ.items() if name not in PEER_VARIABLES}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = read_results(out)
    by_system = {row["system"]: row for row in document["rows"]}
    assert set(by_system) == {"pagedkv", "vLLM", "SGLang"}
    assert by_system["pagedkv"]["value"] > 0
    assert "absent" in by_system["vLLM"]["variant"]
    assert str(tmp_path) not in json.dumps(document["environment"])


def test_core_bench_refuses_a_workload_that_does_not_exist() -> None:
    command = [sys.executable, "-m", "bench.core", "--only", "z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--only" in done.stderr


def test_table_shows_a_missing_value_as_a_dash_and_escapes_bars_in_markdown() -> None:
    rows = [{"name": "a|b", "value": 1234.5}, {"name": "c"}]
    assert render_table(rows, markdown=True).splitlines()[2:] == ["| a\\|b | 1,234 |", "| c | - |"]
