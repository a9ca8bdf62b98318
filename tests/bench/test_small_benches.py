"""Benches that are one file each run end to end at a small size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.launches import __main__ as launches
from bench.report import fill
from bench.results import ROOT, read_results
from tests.remote.servers import redis_server


def run(module: str, *options: str) -> None:
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_finer_scales_and_more_bits_have_smaller_errors(tmp_path: Path) -> None:
    out = tmp_path / "quantised.json"
    run("bench.quantised", "--no-model", "--json", str(out))
    found = {(row["dtype"], row["scales"]): row["relative_rms_error"] for row in read_results(out)["errors"]}
    assert len(found) == 12
    assert found["float32", "none"] < found["float16", "none"] < found["bfloat16", "none"]
    assert found["bfloat16", "none"] < found["int8", "token_head"] < found["int8", "head"] < found["int8", "tensor"]
    for scales in ("tensor", "head", "token_head"):
        assert found["int8", scales] < found["float8_e4m3", scales] < found["float8_e5m2", scales] < 0.1


@pytest.mark.slow
@pytest.mark.checkout
def test_the_bench_of_the_first_token_has_a_row_for_each_process(tmp_path: Path) -> None:
    from tests.realmodel import tiny

    redis_server()
    path, out = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_tensors()), tmp_path / "first_token.json"
    run("bench.first_token", "--model", str(path), "--tokens", "100", "--runs", "2", "--json", str(out))
    rows = read_results(out)["rows"]
    assert [row["tokens_from_store"] for row in rows] == [0, 0, 96, 96]
    assert rows[0]["share"] == 1
    assert all(row["first_token_s"] > 0 and row["worst_share"] >= row["share"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.checkout
def test_the_bench_of_waits_has_a_row_for_each_client_and_call(tmp_path: Path) -> None:
    redis_server()
    out = tmp_path / "waits.json"
    run("bench.remote_waits", "--runs", "1", "--json", str(out))
    rows = read_results(out)["rows"]
    calls = ["sequence", "load", "publish", "purge", "await"]
    assert [row["call"] for row in rows] == calls * (len(rows) // len(calls))
    assert rows[0]["client"] == "redis-py"


def test_the_bench_of_groups_has_a_row_for_each_system_and_model(tmp_path: Path) -> None:
    out = tmp_path / "groups.json"
    run(
        "bench.groups", "--rows", "4", "--lengths-of-rows", "64", "--prompts", "256", "--rounds", "2",
        "--memory-gib", "4", "--requests", "3", "--json", str(out),
    )  # fmt: skip
    found = read_results(out)
    assert [row["case"] for row in found["rows"][::3]] == ["decode 4 x 64", "match 256", "own and release 256"]
    assert all(row["us"] > 0 for row in found["rows"])
    assert [(row["lengths"], row["mean %"] <= row["most %"] < 100) for row in found["stranded"]] == (
        [("chat", True)] * 3 + [("code", True)] * 3
    )


@pytest.mark.checkout
def test_the_bench_of_launches_has_a_row_for_each_call(tmp_path: Path) -> None:
    out = tmp_path / "launches.json"
    run("bench.launches", "--runs", "1", "--rounds", "1", "--json", str(out))
    rows = read_results(out)["rows"]
    assert [row["call"] for row in rows] == [
        "run decode_mma", "plan", "run decode_tma", "run prefill_mma", "run prefill_wgmma", "write_kv",
        "run decode_mla", "run decode_mla_wgmma",
        "step.write", "step.attend decode_mma", "step.write, captured", "step.attend decode_mma, captured",
        "step.attend decode_mma, a window", "step.attend decode_mma, sinks", "step.attend decode_mma, a new output",
        "step.attend decode_tma", "step.attend decode_tma, captured",
        "step.attend prefill_mma", "step.attend prefill_wgmma",
    ]  # fmt: skip
    assert all(row["now_us"] >= row["least_us"] > 0 for row in rows)


@pytest.mark.checkout
def test_the_committed_launches_keep_to_the_bars_but_for_the_misses_that_the_page_names() -> None:
    """Times of the machine of an earlier run, on which the same version of before took 45.7 us."""
    rows = {row["call"]: row for row in read_results(ROOT / "bench/results/launches.json")["rows"]}
    assert len(rows) == 19
    slower = max(rows["run decode_mma"]["before_us"] / 45.7, 1.0)
    missed = {call for call, row in rows.items() if row["now_us"] / slower > row["bar_us"]}
    assert missed == {call for call in rows if call.endswith((", captured", ", a new output"))}
    for kernel, before_us in (("decode_mma", 58), ("decode_tma", 87)):  # of the issue that set the bars
        for call in (f"run {kernel}", f"step.attend {kernel}"):
            assert rows[call]["before_us"] / rows[call]["now_us"] > before_us / rows[call]["bar_us"], call


def test_a_kernel_that_the_version_before_lacks_has_no_figure_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, now = tmp_path / "launches.json", {"run decode_mma": 5.0, "run decode_mla": 6.0}
    monkeypatch.setattr(launches, "times", lambda tree, rounds: now if tree == ROOT else {"run decode_mma": 60.0})
    monkeypatch.setattr(launches, "commit", lambda tree: "1234567")
    monkeypatch.setattr(sys, "argv", ["bench.launches", "--before", str(tmp_path), "--json", str(out)])
    launches.main()
    assert [(row["before_us"], row["now_us"]) for row in read_results(out)["rows"]] == [(60.0, 5.0), (None, 6.0)]
    assert fill("<!-- table: launches.json rows -->\n<!-- end -->", tmp_path).count("| - |") == 1
