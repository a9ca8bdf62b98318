"""``pagedkv replay`` as a command.

Clean output, one-line errors with exit code 2, no tracebacks.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.cli import main
from pagedkv.lab.replay import KNOWN, POLICIES
from tests.spec.published import CONFIGS

Capture = pytest.CaptureFixture[str]


def failing(capsys: Capture, *argv: str) -> str:
    """Run a command that must fail on its input; its one line on stderr."""
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    assert "Traceback" not in captured.err
    return captured.err


def test_the_report_has_the_keys_of_the_contract(data: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "report.json"
    argv = ["replay", str(data / "chat.npz"), "--device-memory", "5%", "--host-memory", "64 blocks", "--json", str(out)]
    assert main([*argv, *(f"--policy={name}" for name in KNOWN)]) == 0
    report = json.loads(out.read_text())
    assert report["trace"] == "chat.npz"
    assert (report["requests"], report["block_size"], report["unique_blocks"]) == (60, 512, 1144)
    assert len(report["sha256"]) == 64
    assert report["command"].startswith("pagedkv replay ")
    assert report["not_modelled"]
    assert [r["policy"] for r in report["results"]] == list(KNOWN)
    for result in report["results"]:
        assert set(result) >= {
            "policy",
            "engine",
            "capacity_blocks",
            "block_accesses",
            "hit_blocks",
            "token_hit_rate",
            "flop_weighted_hit_rate",
            "gap_to_min_closed",
            "bytes",
            "bookkeeping_us_per_request",
            "wrong_bytes",
        }
        assert result["capacity_blocks"] == {"device": 57, "host": 64, "disk": 0}
        assert set(result["hit_blocks"]) == {"device", "host", "disk", "total"}
        assert set(result["bytes"]) >= {"host_to_device", "device_to_host", "host_to_disk", "disk_to_device"}
    assert "hit blocks" in capsys.readouterr().out


@pytest.mark.slow
def test_the_layers_of_a_model_keep_only_tokens_that_they_can_still_read(tmp_path: Path, capsys: Capture) -> None:
    config, out = tmp_path / "config.json", tmp_path / "report.json"
    config.write_text(json.dumps(CONFIGS["gpt-oss-120b"]), encoding="utf-8")
    argv = ["replay", "--config", str(config), "--device-memory", "256GiB", "--json", str(out)]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "18.0 MiB of each block for layers that see everything; 4.50 MiB of the last 1" in " ".join(shown.split())
    assert "Layers: with the tokens that each can still read 24.2 % of the blocks are hit" in " ".join(shown.split())
    report = json.loads(out.read_text())
    by_group, *bounds = report["results"]
    assert (by_group["policy"], by_group["hit_blocks"]["total"]) == ("lru", 46_207)
    assert [bound["engine"] for bound in bounds] == ["bound"] * 3
    assert by_group["parameters"]["memory_bytes"] == [256 << 30, 0, 0]
    assert by_group["parameters"]["groups"][1] == {"page_bytes": 4_718_592, "window_blocks": 1, "chunk_blocks": None}
    assert by_group["counters"]["points"] > 0
    assert "last tail" in report["not_modelled"][-1]

    assert main([*argv, "--keep-window", "--policy", "lru,arc", "--table-only"]) == 0
    kept = json.loads(out.read_text())["results"]
    assert [one["policy"] for one in kept] == ["lru", "arc"]
    assert kept[0]["hit_blocks"]["total"] == by_group["lru_hit_blocks"] < 46_207


def test_a_model_of_windows_alone_is_said_to_keep_all_tokens(data: Path, tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["Mistral-7B-v0.1"]))
    asked = ["replay", str(data / "chat.jsonl"), "--config", str(config), "--device-memory", "64GiB", "--table-only"]
    assert main([*asked, "--json", "-"]) == 0
    said = capsys.readouterr().err
    assert "mistral: no layer sees everything, so a cache keeps all tokens of every layer" in said
    assert main([*asked, "--json", "-", "--keep-window"]) == 0
    assert "no layer sees" not in capsys.readouterr().err


def test_options_are_written_out(data: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(data / "chat.jsonl"), "--device", "8GiB"])
    assert ended.value.code == 2
    assert "--device" in capsys.readouterr().err


def test_json_on_stdout_is_json_alone(data: Path, capsys: Capture) -> None:
    argv = ["replay", str(data / "chat.jsonl"), "--device-memory", "50 blocks", "--policy", "lru", "--json", "-"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["results"][0]["policy"] == "lru"
    assert "hit blocks" in captured.err


def test_without_arguments_the_real_trace_of_the_package_is_replayed_and_summed_up(capsys: Capture) -> None:
    assert main(["replay", "--requests", "400"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mooncake:conversation: 400 requests")
    assert "tiers: device " in out
    assert "128 KiB of KV per token" in out
    assert all(f"\n{policy} " in out for policy in POLICIES)
    assert [line.split()[0] for line in out.rpartition("\n\n")[2].splitlines() if line[0] != " "] == [
        "Policy:", "Size:", "Enough:",
    ]  # fmt: skip
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_the_command_without_any_option_hits_the_published_counts(capsys: Capture) -> None:
    assert main(["replay", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["block_accesses"], report["unique_blocks"]) == (7_689, 190_600, 123_815)
    assert [r["hit_blocks"]["total"] for r in report["results"] if r["engine"] == "bound"] == [66_785] * 3
    assert len(report["advice"]["sentences"]) == 3
    assert len(report["advice"]["replays"]) >= 4


@pytest.mark.parametrize(
    "sizes", [[], ["--sweep"], ["--device-memory", "9 blocks"], ["--sweep", "--host-memory", "20 blocks"]]
)
@pytest.mark.parametrize("options", [[], ["--generating", "20"], ["--policy", "lru,min", "--engine", "real"]])
def test_every_line_fits_80_columns_unless_it_may_be_wide(
    options: list[str], sizes: list[str], data: Path, capsys: Capture
) -> None:
    argv = ["replay", str(data / "chat.npz"), *options, *sizes]
    assert main(argv) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    assert main([*argv, "--wide", "--table-only"]) == 0
    wide = capsys.readouterr().out
    assert all(column in wide for column in ("engine", "hit blocks", "flops %", "moved", "us/request"))
    assert "Policy: " not in wide


def test_several_policies_may_be_named_in_one_option(data: Path, capsys: Capture) -> None:
    argv = ["replay", str(data / "chat.npz"), "--policy", "lru,arc", "--policy", "min"]
    assert main([*argv, "--device-memory", "9 blocks"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[5:8]] == ["lru", "arc", "min"]


def test_only_the_first_requests_can_be_replayed(data: Path, capsys: Capture) -> None:
    argv = ["replay", str(data / "chat.npz"), "--requests", "10", "--device-memory", "9 blocks", "--json", "-"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 10


def test_a_sweep_has_a_row_per_capacity_and_policy(data: Path, capsys: Capture) -> None:
    argv = ["replay", str(data / "chat.npz"), "--policy", "lru", "--policy", "min"]
    for options, rows in ((["1%,5%,200 blocks"], 6), ([], 12)):
        assert main([*argv, "--wide", "--table-only", "--sweep", *options]) == 0
        first = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert [word for word in first if word in KNOWN] == ["lru", "min"] * (rows // 2)


def test_progress_is_plain_lines_on_stderr_when_asked_for(data: Path, capsys: Capture) -> None:
    argv = ["replay", str(data / "chat.npz"), "--policy", "lru", "--device-memory", "9 blocks"]
    assert main([*argv, "--progress", "--table-only"]) == 0
    assert capsys.readouterr().err == "lru 9: 60 requests\n"
    assert main(argv) == 0
    assert capsys.readouterr().err == ""


BAD: list[tuple[list[str], str]] = [
    (
        ["--policy", "belady"],
        "unknown policy 'belady'; known: lru, arc, s3fifo, hazard",
    ),
    (["--policy", ""], "unknown policy ''"),
    (["--device-memory", "0 blocks"], "--device-memory: 0 blocks is less than one block"),
    (["--device-memory", "-5 blocks"], "--device-memory: '-5 blocks' is not a size"),
    (["--device-memory", "-5%"], "expected one argument"),
    (["--device-memory", "5000"], "--device-memory: '5000' has no unit: write '5000 blocks'"),
    (["--device-memory", "5%", "--host-memory", "64"], "--host-memory: '64' has no unit"),
    (["--device-memory", "5%", "--disk", "64:/tmp"], "--disk: '64' has no unit"),
    (["--sweep", "5%,64"], "--sweep: '64' has no unit"),
    (["--device-memory", "5%", "--block-bytes", "4096"], "--block-bytes: '4096' is not a size"),
    (["--device-memory", "nan"], "--device-memory: 'nan' is not a size"),
    (["--device-memory", "5 blocks", "--host-memory", "0 blocks"], "--host-memory: 0 blocks"),
    (["--device-memory", "5 blocks", "--disk", "0 blocks:/tmp"], "--disk: 0 blocks"),
    (["--device-memory", "9999999999999 blocks"], "absurd"),
    (["--host-memory", "5 blocks"], "--device-memory: --host-memory and --disk need it"),
    (["--device-memory", "5 blocks", "--bytes-per-token", "0"], "bytes per token must be in"),
    (["--device-memory", "5 blocks", "--bytes-per-token", "many"], "--bytes-per-token"),
    (["--device-memory", "5 blocks", "--block-bytes", "x"], "--block-bytes: 'x' is not a size"),
    (["--engine", "magic"], "unknown engine 'magic'; known: sim, real"),
    (["--demotion", "magic"], "unknown demotion order"),
    (["--inclusive", "tape"], "inclusive: 'tape'"),
    (["--generating", "0"], "generating: 0.0 milliseconds per output token are not in"),
    (["--generating", "nan"], "generating: nan milliseconds"),
    (["--generating", "slow"], "--generating"),
    (["--generating", "20", "--engine", "real"], "generating: the engine 'real' runs one request at a time"),
    (["--requests", "0"], "asked for the first 0 requests"),
    (["--requests", "61"], "the trace has 60"),
    (["--block-size", "16"], "--block-size is for .jsonl traces"),
    (["--sweep", "5%,x"], "--sweep: 'x' is not a size"),
    (["--sweep", "5%,", "--policy", "min"], "--sweep: '' is not a size"),
    (["--sweep", "--device-memory", "5 blocks"], "not both"),
    (["--json", "/no/such/folder/out.json"], "--json: there is no folder"),
    (["--plot", "/no/such/folder/out.png"], "--plot: there is no folder"),
    (["--model", "nope"], "--model: no model 'nope' here; give --config, or one of"),
    (["--config", "/no/such/config.json"], "--config: "),
    (["--model", "gemma-2-9b", "--config", "config.json"], "--model, --config: give one of them"),
    (["--keep-window"], "--keep-window: give --model or --config"),
    (["--model", "gemma-2-9b", "--bytes-per-token", "5"], "--bytes-per-token: the model says it"),
    (["--model", "gemma-2-9b", "--policy", "lru,arc"], "gemma-2-9b: layers that keep only tokens"),
    (["--model", "gemma-2-9b", "--generating", "20"], "leave generating (--generating) out, or keep all tokens"),
    (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    (["--progress", "--quiet"], "not allowed with"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_bad_option_is_one_line_and_exit_code_2(
    options: list[str], message: str, data: Path, capsys: Capture
) -> None:
    assert message in failing(capsys, "replay", str(data / "chat.npz"), *options)


def test_a_bad_trace_is_one_line_that_names_file_and_place(
    write_jsonl: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    assert "absent.npz: there is no such file" in failing(capsys, "replay", str(tmp_path / "absent.npz"))
    path = write_jsonl([[1, 2], [3, 2]], name="odd.jsonl")
    assert "odd.jsonl: line 2, field hash_ids[1]: id 2" in failing(capsys, "replay", str(path))
    assert "unknown synthetic trace 'poetry'; known: agent, chat" in failing(capsys, "replay", "synthetic:poetry")
    assert "there is no such file" in failing(capsys, "replay", "bad\nname")


def test_no_command_and_unknown_commands_are_one_line(capsys: Capture) -> None:
    assert "required: COMMAND" in failing(capsys)
    assert "invalid choice: 'dance'" in failing(capsys, "dance")


def test_plots_are_written(data: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    argv = ["replay", str(data / "chat.npz"), "--policy", "lru", "--policy", "min"]
    for options in (["--device-memory", "5%", "--host-memory", "10%"], ["--sweep"]):
        out = tmp_path / f"plot{len(options)}.png"
        assert main([*argv, *options, "--plot", str(out)]) == 0
        assert out.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert "must end in one of" in failing(capsys, *argv, "--plot", str(tmp_path / "plot.xyz"))


@pytest.mark.parametrize("policies", [["lru"], ["lru", "arc", "s3fifo", "hazard"]], ids=len)
def test_bars_are_thin_and_nothing_lies_over_the_axis_name(
    policies: list[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    asked = [part for policy in policies for part in ("--policy", policy)]
    assert main(["replay", str(data / "chat.npz"), *asked, "--plot", str(tmp_path / "plot.png")]) == 0
    monkeypatch.undo()
    (figure,) = drawn
    figure.draw_without_rendering()
    (axes,) = figure.axes
    bars = [patch.get_window_extent() for patch in axes.patches]
    assert len({bar.y0 for bar in bars}) == len(policies)
    assert max(bar.height for bar in bars) / figure.dpi < 0.25  # inches
    legend, name = axes.get_legend().get_window_extent(), axes.xaxis.label.get_window_extent()
    assert legend.y1 < name.y0
    pyplot.close(figure)


def test_an_odd_name_is_printed_and_drawn_as_it_is(data: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    odd = tmp_path / "$\\frac{<b>$_\x1b[31m.npz"
    odd.write_bytes((data / "chat.npz").read_bytes())
    for command in (["replay", str(odd), "--policy", "lru"], ["simulate", str(odd), "--systems", "paged"]):
        assert main([*command, "--plot", str(tmp_path / "odd.svg")]) == 0
        assert "<b>" not in (tmp_path / "odd.svg").read_text()
        assert "\x1b" not in capsys.readouterr().out
    assert "\x1b" not in failing(capsys, "replay", "\x1b[31mabsent")


def test_a_plot_without_matplotlib_is_an_error_that_names_the_extra(
    data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    message = failing(capsys, "replay", str(data / "chat.npz"), "--plot", str(tmp_path / "plot.png"))
    assert "pip install 'matplotlib>=3.8'" in message
    assert "extra [bench]" in message


def test_python_m_pagedkv_is_the_command(data: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "pagedkv",
        "replay",
        str(data / "chat.npz"),
        "--policy",
        "lru",
        "--device-memory",
        "9 blocks",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nlru " in done.stdout
    assert main.__module__ == "pagedkv.cli"


def test_a_reader_that_leaves_is_no_traceback(data: Path) -> None:
    command = f'"{sys.executable}" -m pagedkv replay "{data / "chat.npz"}" --json - | head -c 5'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=os.environ)
    assert "Traceback" not in done.stderr
