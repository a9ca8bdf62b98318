"""The bench of the C interface runs to its end; its figures are not looked at."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bench.results import ROOT, read_results


@pytest.mark.checkout
@pytest.mark.slow
def test_the_bench_of_the_c_interface_has_the_core_and_python_beside_it(tmp_path: Path) -> None:
    if shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is None:
        pytest.skip("no C compiler")
    out = tmp_path / "c_api.json"
    command = [sys.executable, "-m", "bench.c_api", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = read_results(out)["rows"]
    assert [row["by"] for row in rows] == [
        *("the core's functions, a mutex each", "pagedkv.h", "the core's functions, no mutex", "Python"),
        *("Python", "pagedkv.h"),
    ]
    assert all(row["value"] > 0 for row in rows)
