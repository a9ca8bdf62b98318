"""``pagedkv simulate``: table, JSON, plot; and bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.cli import main
from pagedkv.lab.simulate import Hardware, load_workload, simulate
from pagedkv.lab.simulate.table import FOUND_LEGEND, LEGEND, narrowed, rows

TRACE = "synthetic:chat:3:30"


def test_the_table_has_a_line_for_each_system(capsys):
    assert main(["simulate", TRACE, "--systems", "contiguous,paged,tiered", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{TRACE}: 30 requests on 1xH100, llama-3-8b"
    assert [line.split()[0] for line in lines[3:]] == ["contiguous", "paged", "tiered"]
    assert "TTFT p50 s" in lines[1]


def test_the_json_says_what_was_run_and_what_is_not_modelled(tmp_path, capsys):
    out = tmp_path / "out.json"
    command = ["simulate", TRACE, "--systems", "shared", "--gpus", "2xa100", "--tiers", "host=1GiB@10GB/s"]
    command += ["--json", str(out)]
    assert main(command) == 0
    report = json.loads(out.read_text())
    assert report["requests"] == 30
    assert len(report["sha256"]) == 64
    assert report["command"] == "pagedkv " + " ".join(command)
    assert report["hardware"]["gpus"] == "2xA100-80GB"
    assert report["hardware"]["tiers"] == {"host": {"bytes": 2**30, "up_bytes_per_s": 1e10, "down_bytes_per_s": 1e10}}
    (result,) = report["results"]
    assert (result["system"], result["requests"]) == ("shared", 30)
    assert report["not_modelled"]
    capsys.readouterr()
    assert main(["simulate", TRACE, "--systems", "paged", "--json", "-", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["results"][0]["system"] == "paged"
    assert "paged" in shown.err


@pytest.mark.parametrize("study", [None, "waste", "prefix", "beams"])
def test_plots_are_written(tmp_path, capsys, study):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plot.png"
    trace = ["synthetic:short:1:50"]
    what = ["--systems", "paged,shared", "--requests", "20"] if study is None else ["--study", study]
    if study == "beams":
        what += ["--requests", "2"]
    assert main(["simulate", *trace, *what, "--plot", str(out), "--quiet"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


@pytest.mark.parametrize("what", ["--by-tier", "waste", "prefix", "beams", "concurrency"])
def test_lines_fit_80_characters_unless_they_may_be_wide(capsys, what):
    study = [what] if what == "--by-tier" else ["--study", what]
    few = ["--requests", "2"] if what == "beams" else []
    command = ["simulate", "synthetic:short:0:60", *study, *few, "--quiet"]
    assert main(command) == 0
    narrow = capsys.readouterr().out.splitlines()
    assert max(map(len, narrow)) <= 80
    assert main([*command, "--wide"]) == 0
    wide = capsys.readouterr().out.splitlines()
    assert set(narrow[1].split("  ")) <= set(wide[1].split("  "))
    assert len(narrow) == len(wide)


def test_columns_that_are_left_out_are_the_least_telling_and_one_that_is_needed_stays():
    line = dict.fromkeys(LEGEND, "1")
    assert list(narrowed([line], None)[0]) == list(LEGEND)
    (kept,) = narrowed([line], 80)
    assert {"system", "refused", "TTFT p50 s", "TTFT p99 s", "output tok/s", "hit %"} <= set(kept)
    assert "wall s" not in kept


def test_whole_blocks_are_an_option(capsys):
    results = []
    for more in ([], ["--whole-blocks"]):
        assert main(["simulate", TRACE, "--systems", "paged", "--json", "-", "--quiet", *more]) == 0
        results += json.loads(capsys.readouterr().out)["results"]
    assert results[1]["computed_tokens"] < results[0]["computed_tokens"]


def test_markdown_is_a_table(capsys):
    assert main(["simulate", "synthetic:short:1:60", "--study", "prefix", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| requests |")
    assert lines[1].startswith("| --- | ---: |")
    assert all(line.count("|") == lines[0].count("|") for line in lines)


@pytest.mark.parametrize(
    "wrong",
    [
        ["nowhere.npz"], ["--gpus", "H900"], ["--gpus", "0xH100"], ["--gpus", "9999xH100"], ["--model", "gpt-9"],
        ["--model", "llama-3-70b"], ["--tiers", "host"], ["--tiers", "tape=1TB@1GB/s"], ["--tiers", "host=1TB@fast/s"],
        ["--tiers", "host=0GB@1GB/s"], ["--tiers", "host=1GB@1GB/s,host=1GB@1GB/s"], ["--systems", "magic"],
        ["--disk-admission", "some"], ["--tiers", "none", "--systems", "paged,tiered"], ["synthetic:foo"],
        ["--disk-write", "some"], ["--disk-write-budget", "5"], ["--disk-write-budget", "0B"],
        ["--systems", ","], ["--requests", "0"], ["--speed", "-1"], ["--speed", "nan"], ["--block-size", "0"],
        ["--max-running", "0"], ["--max-batch-tokens", "5"], ["--study", "magic"], ["--json", "/nowhere/x.json"],
        ["--plot", "x.docx"], ["--study", "beams", "--beam-spread", "0"], ["--longest", "0"],
        ["--trace-block-size", "16"], ["--tiers", "host=1GiB"], ["--moves", "nowhere.json"], ["--moves", __file__],
        ["--memory-share", "0"], ["--memory-share", "1.1"], ["--memory-share", "0.1"], ["synthetic:users:1:2:3"],
        ["--study", "concurrency", "--longest", "9999999"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(wrong, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = wrong if not wrong[0].startswith("-") else [TRACE, *wrong]
    code = main(["simulate", *arguments])
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("pagedkv: error: ")
    assert list(Path().iterdir()) == []


def test_every_column_is_explained_in_the_help_and_in_the_docs(capsys):
    results = simulate(load_workload(TRACE, requests=3), Hardware(), ["paged"])
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    shown = capsys.readouterr().out
    assert set(rows(results)[0]) <= set(LEGEND)
    for name, what in (*LEGEND.items(), *FOUND_LEGEND.items()):
        assert f"{name}: {what}".replace(" ", "") in "".join(shown.split())


@pytest.mark.checkout
def test_the_docs_explain_every_column():
    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")
    for name, what in (*LEGEND.items(), *FOUND_LEGEND.items()):
        assert f"| {name} | {what} |" in page


def test_errors_say_what_there_is(capsys):
    for wrong, words in (
        (["synthetic:foo"], "known: agent, chat, short, users"),
        ([TRACE, "--model", "gpt-9"], "--model: no model 'gpt-9' here; of those whose widths are known, one of:"),
        ([TRACE, "--tiers", "none", "--systems", "paged,tiered"], "--systems tiered needs tiers under the device"),
    ):
        assert main(["simulate", *wrong]) == 2
        assert words in capsys.readouterr().err


def test_without_tiers_the_system_that_is_about_them_is_left_out(capsys):
    assert main(["simulate", TRACE, "--tiers", "none", "--quiet"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:]]
    assert "shared" in names
    assert "tiered" not in names


def test_a_run_of_one_short_request_is_measured_and_one_that_serves_nobody_has_no_times(tmp_path, capsys):
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n')
    assert main(["simulate", str(trace), "--systems", "paged", "--json", "-", "--quiet"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["most_running"] == 1
    assert result["tokens_per_slot"] == pytest.approx((10 + 11) / 2 / 16, abs=0.01)
    command = ["simulate", str(trace), "--systems", "contiguous", "--longest", "1", "--quiet"]
    assert main(command) == 0
    heading, _, line = capsys.readouterr().out.splitlines()[1:4]
    assert "0.00" not in line
    assert "TTFT p50 s" not in heading or "-" in line.split()


@pytest.mark.checkout
def test_measured_moves_and_times_by_tier(capsys):
    moves = str(Path(__file__).parents[2] / "bench" / "results" / "tiers.json")
    command = ["simulate", TRACE, "--systems", "contiguous,tiered", "--quiet", "--moves", moves, "--by-tier"]
    assert main([*command, "--tiers", "host=1GiB,disk=8GiB", "--json", "-"]) == 0
    shown = capsys.readouterr()
    hardware = json.loads(shown.out)["hardware"]
    assert hardware["moves"]["file"] == "tiers.json"
    assert hardware["tiers"]["disk"]["up_bytes_per_s"] < hardware["tiers"]["host"]["up_bytes_per_s"]
    _, second = shown.err.split("\n\n")
    title, heading, _, *lines = second.splitlines()
    assert title.startswith("Times to the first token")
    assert heading.split("  ")[0] == "system"
    assert {line.split()[0] for line in lines} == {"tiered"}
    assert main([*command, "--markdown"]) == 0
    _, second = capsys.readouterr().out.split("\n\n")
    assert second.startswith("| system | found |")


def test_requests_at_once_are_a_study(capsys):
    command = ["simulate", "synthetic:short:0:300:50:50", "--study", "concurrency", "--longest", "1024"]
    assert main([*command, "--gpus", "l4", "--memory-share", "0.7", "--quiet"]) == 0
    assert "served, times" in capsys.readouterr().out
