"""The bench of calls runs end to end in few rounds. What it measures is not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.results import ROOT, read_results


@pytest.mark.checkout
def test_the_bench_of_calls_has_a_control_beside_each_call(tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    command = [sys.executable, "-m", "bench.calls", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = read_results(out)["rows"]
    assert [(row["call"], row["case"].startswith("control")) for row in rows] == [
        *(("match", control) for control in (False, True)),
        *(("gather", control) for control in (True, False, False, False)),
    ]
    assert all(row["value"] > 0 for row in rows)
