"""The bench of the server runs end to end at a small size.

What it measures is not looked at.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.results import ROOT, read_results

pytest.importorskip("httpx", reason="the server's client is not installed")
pytest.importorskip("uvicorn", reason="the server extra is not installed")


@pytest.mark.slow
def test_the_bench_of_the_server_has_a_row_with_the_cache_and_one_without(tmp_path: Path) -> None:
    out = tmp_path / "server.json"
    small = ["--clients", "3", "--chats", "1", "--turns", "2", "--answer-tokens", "3", "--toy-token-us", "0"]
    command = [sys.executable, "-m", "bench.server", *small, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in read_results(out)["rows"]}
    assert {case: row["requests"] for case, row in rows.items()} == {"no cache": 6, "cache": 6}
    assert rows["no cache"]["cached_share"] == 0 < rows["cache"]["cached_share"]
