"""The CPU bench runs, its systems agree, and its results say what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cpu_attention.problems import Problem, arrays, problems
from bench.cpu_attention.systems import SYSTEMS, installed

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_quick_run_measures_us_beside_the_peers_that_are_here(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    words = ["-m", "bench.attention", "--device", "cpu", "--quick", "--rounds", "1", "--json", str(out)]
    ran = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "differs" not in ran.stderr
    document = json.loads(out.read_text())
    ours = [row for row in document["rows"] if row["system"] == "pagedkv"]
    assert len(ours) == len(problems(quick=True))
    assert all(row["ms"] > 0 and row["ceiling"] > 0 for row in document["rows"])
    assert {row["system"] for row in document["rows"]} <= set(installed())
    assert set(document["missing"]) == {SYSTEMS[name][0] for name in set(SYSTEMS) - set(installed())}


def test_a_problem_says_what_it_moves_and_computes() -> None:
    decode, prefill = Problem("8B", "bfloat16", 8, 4096), Problem("8B", "float32", 1, 6, 3)
    assert decode.kv_bytes == 2 * 8 * 4096 * 8 * 128 * 2
    assert decode.flops == 4 * 8 * 4096 * 32 * 128
    assert prefill.flops == 4 * (4 + 5 + 6) * 32 * 128
    assert decode.layers * decode.kv_bytes >= 288 << 20


def test_contiguous_copies_hold_the_blocks_in_their_order() -> None:
    given = arrays(Problem("Smol", "float16", 2, 40, 3))
    k, v = given.contiguous(0, 1)
    assert k.shape == v.shape == (40, 3, 64)
    assert (k[16:32] == given.layers[0][0][given.tables[1, 1]]).all()
