"""The bench of hooks runs end to end at a small size. What it measures is not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.results import ROOT, read_results


@pytest.mark.slow
def test_the_bench_of_hooks_has_a_row_for_each_work_and_kind(tmp_path: Path) -> None:
    out = tmp_path / "hooks.json"
    command = [sys.executable, "-m", "bench.hooks", "--sequences", "2", "--recorder", "--trace", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = read_results(out)["rows"]
    kinds = ("none", "idle", "recorder", "trace")
    assert sorted((row["work"], row["hooks"]) for row in rows) == sorted(
        (work, kind) for work in ("request", "step of 2") for kind in kinds
    )
    assert all(row["us"] > 0 for row in rows)
