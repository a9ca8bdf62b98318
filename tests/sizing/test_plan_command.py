"""``pagedkv plan`` as a command.

A table to read, JSON to compute with, one line for bad input.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from shlex import split
from typing import Any

import pytest

from pagedkv.cli import main
from pagedkv.lab.sizing import GPUS, MODELS, Machines, Users, find_model, plan, token_bytes
from tests.slices import one_in

Capture = pytest.CaptureFixture[str]


def output(capsys: Capture, *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def as_json(capsys: Capture, *argv: str) -> Any:
    return json.loads(output(capsys, *argv, "--json"))


def failing(capsys: Capture, *argv: str) -> str:
    """Run a command that must fail on its input; its one line on stderr."""
    try:
        code = main(["plan", *argv])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    assert "Traceback" not in captured.err
    return captured.err


def test_without_arguments_a_million_users_are_planned_on_a_thousand_gpus(capsys: Capture) -> None:
    text = output(capsys)
    assert "1,000 h100 in 125 servers: 250 replicas of 4; 1,000,000 users, 10,000 of them active" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line[:4] in ("devi", "host", "disk", "none")}
    assert set(rows) == {"device", "host", "disk", "none"}
    found = plan(find_model("llama-3.1-70b"), Machines(GPUS["h100"], 1000), Users(1_000_000, 512))
    for tier in found.tiers:
        assert f"{tier.users:,}" in rows[tier.tier]
    assert "NOT ALL FIT" not in text
    assert "TOO" not in text


def test_json_is_the_library_s_plan(capsys: Capture) -> None:
    found = plan(find_model("llama-3.1-70b"), Machines(GPUS["h100"], 1000), Users(1_000_000, 512))
    assert as_json(capsys) == json.loads(json.dumps(found.to_dict()))


def test_the_text_s_million_in_one_command(capsys: Capture) -> None:
    """docs/sizing.md quotes it."""
    argv = [
        "gpt3-175b",
        "--kv-share",
        "0.7",
        "--link",
        "16GB",
        "--step-ms",
        "5",
        "--host-memory",
        "2TB",
        "--disk",
        "10TB",
    ]
    found = as_json(capsys, *argv)
    assert [tier["users"] for tier in found["tiers"]] == [22_940, 103_375, 517_375, 356_310]
    text = output(capsys, *argv)
    assert "NOT ALL FIT: 356,310 users are computed again" in text
    assert "idle: 8 GPUs" in text
    assert "computing again could be faster than a cold start" in text


def test_every_model_and_gpu_known_by_name_is_listed(capsys: Capture) -> None:
    text = output(capsys, "--models")
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == list(MODELS)
    assert all(name in text.splitlines()[-1] for name in GPUS)
    found = as_json(capsys, "--models")
    assert set(found) == {"models", "gpus"}
    assert found["models"]["llama-2-7b"]["kv_bytes_per_token"] == 524_288
    assert all(one["source"] for one in found["models"].values())


def test_a_model_by_its_numbers_is_the_model_by_its_name(capsys: Capture) -> None:
    numbers = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--params", "8,030,261,248"]
    common = ["--max-tokens", "8192", "--gpus", "8", "--users", "1k"]
    by_name, by_numbers = as_json(capsys, "llama-3.1-8b", *common), as_json(capsys, *numbers, *common)
    assert by_numbers["model"] != by_name["model"]
    assert {key: value for key, value in by_numbers.items() if key != "model"} == {
        key: value for key, value in by_name.items() if key != "model"
    }


def test_a_latent_model_by_its_numbers(capsys: Capture) -> None:
    argv = split("--layers 61 --latent 512+64 --params 671B --active-params 37.6B --max-tokens 4k")
    found = as_json(capsys, *argv, "--weight-bits", "8")
    assert found["token_bytes"] == token_bytes(find_model("deepseek-v3").groups)
    assert found["model"]["active_params"] == 37_600_000_000
    assert "61 layers of one latent x 576" in output(capsys, *argv)


def test_a_window_and_another_width_of_v_by_numbers(capsys: Capture) -> None:
    argv = split("--layers 2 --kv-heads 1 --head-dim 64 --v-head-dim 32 --window 100 --params 1M")
    argv += split("--tokens 1024 --max-tokens 1024 --users 10 --gpus 1")
    found = as_json(capsys, *argv)
    assert found["token_bytes"] == 2 * (64 + 32) * 2
    assert found["session_bytes"] == 7 * 16 * found["token_bytes"]  # 100 tokens that end a block touch seven
    text = output(capsys, *argv)
    assert "2 layers of 1 KV heads x 64 (V 32), window 100" in text
    assert "--keep-window" in text
    kept = as_json(capsys, *argv, "--keep-window")
    assert kept["session_bytes"] == 1024 * found["token_bytes"]
    assert "--keep-window" not in output(capsys, *argv, "--keep-window")


def test_quantised_kv_with_scales(capsys: Capture) -> None:
    common = ["llama-3.1-8b", "--gpus", "8", "--users", "1k", "--max-tokens", "4096"]
    plain = as_json(capsys, *common)["token_bytes"]
    assert as_json(capsys, *common, "--kv-dtype", "fp8")["token_bytes"] == plain // 2
    scaled = as_json(capsys, *common, "--kv-dtype", "int8", "--scale-group", "128", "--scale-bits", "32")
    assert scaled["token_bytes"] == plain // 2 + 32 * 2 * 8 * 4


def test_numbers_are_written_as_people_write_them(capsys: Capture) -> None:
    common = ["llama-3.1-8b", "--max-tokens", "4096"]
    forms = [as_json(capsys, *common, "--users", text)["users"]["count"] for text in ("2500000", "2,500,000", "2.5M")]
    assert forms == [2_500_000] * 3
    shares = [as_json(capsys, *common, "--active", text)["users"]["active"] for text in ("0.05", "5%", " 5% ")]
    assert shares == [0.05] * 3


def test_other_machines_than_those_with_a_name(capsys: Capture) -> None:
    argv = split("llama-3.1-8b --max-tokens 4096 --gpus 3 --gpus-per-server 2 --gpu-memory 48GiB --gpu-read 1TB")
    argv += split("--gpu-tflops 100 --link 20GB --disk-read 3GB --host-memory 0B --disk 0B")
    found = as_json(capsys, *argv, "--tensor-parallel", "1", "--memory-share", "80%")
    assert found["machines"]["gpu"] == {
        "name": "modified h100",
        "memory_bytes": 48 * 2**30,
        "read_bytes_per_s": 1e12,
        "flops_per_s": 1e14,
        "link_bytes_per_s": 2e10,
    }
    assert found["num_servers"] == 2
    assert [tier["capacity"] for tier in found["tiers"][1:]] == [0, 0, 0]
    assert found["tiers"][0]["kv_bytes"] == 3 * (int(48 * 2**30 * 0.8) - 2 * 8_030_261_248)
    text = output(capsys, *argv)
    assert "cold start" not in text  # there is no tier that could be slower


def test_too_few_gpus_and_too_slow_disks_are_said(capsys: Capture) -> None:
    argv = ["llama-3.1-70b", "--gpus", "8", "--users", "100k", "--tokens", "4096", "--turns-per-hour", "60"]
    text = output(capsys, *argv)
    assert "TOO FEW GPUS: 1,000 users are active at once and the device holds" in text
    assert "TOO SLOW: users who come back ask more of the disk tier than it can give" in text
    assert "read per server" in text


def test_a_prefix_that_all_share_is_said(capsys: Capture) -> None:
    text = output(capsys, "llama-3.1-8b", "--shared-prefix", "256", "--max-tokens", "4096")
    assert "32.0 MiB per session of 512 tokens beside 32.0 MiB that all share" in text


def test_heads_that_are_kept_twice_are_said(capsys: Capture) -> None:
    text = output(capsys, "deepseek-v3", "--gpu", "h200", "--gpus", "8", "--weight-bits", "8", "--users", "1")
    assert "1 replica of 8; 1 user, 1 of them active" in text
    assert "on the device a session takes 274 MiB, for GPUs of a replica keep the same heads" in text
    assert "keep the same heads" not in output(capsys)


@pytest.mark.checkout
def test_the_docs_quote_what_the_command_prints(capsys: Capture) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^```bash\npagedkv plan ?([^\n]*)\n```\n\n```text\n(.*?)```$", page, re.MULTILINE | re.DOTALL)
    assert len(quoted) == 2
    for argv, text in quoted:
        assert output(capsys, *split(argv)) == text
    for argv in re.findall(r"^pagedkv plan ?(.*)$", page, re.MULTILINE):
        output(capsys, *split(argv))


def test_help_names_the_defaults(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "llama-3.1-70b" in text
    assert "%%" not in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["llama-9"], "no model 'llama-9' here"),
        (["llama-2-7b", "--layers", "3"], "give MODEL or its numbers, not both (--layers)"),
        (["--layers", "3"], "a model by its numbers needs --kv-heads too"),
        (["--layers", "3", "--kv-heads", "1", "--head-dim", "64"], "needs --params too"),
        (["--layers", "3", "--latent", "5", "--kv-heads", "1", "--params", "1"], "takes the place of --kv-heads"),
        (["--layers", "3", "--latent", "512+64+3", "--params", "1"], "--latent: '512+64+3' is not written as 512+64"),
        (["--layers", "3", "--latent", "-5", "--params", "1"], "--latent"),
        (["--layers", "0", "--latent", "5", "--params", "1"], "--layers must be in 1.."),
        (["--users", "0"], "--users must be in 1.."),
        (["--users", "many"], "--users: 'many' is not a number"),
        (["--users", "-5"], "--users"),
        (["--users", "1,5M"], "--users: '1,5M' is not a number"),
        (["--users", "1.5"], "--users: 1.5 is not a whole number"),
        (["--users", "1e6"], "--users"),
        (["--users", "\u0661"], "--users"),
        (["--users", "9" * 400], "--users"),
        (["--active", "101%"], "--active: '101%' is no share"),
        (["--active", "2"], "--active: '2' is no share"),
        (["--active", "nan"], "--active"),
        (["--tokens", "200k"], "sessions of 200000 tokens do not fit into a context of 131072"),
        (["--shared-prefix", "1000"], "--shared-prefix must be in 0..512"),
        (["--gpu", "abacus"], "no GPU 'abacus' here"),
        (["--gpus", "0"], "--gpus must be in 1.."),
        (["--tokens", "0"], "--tokens must be in 1.."),
        (["--gpus-per-server", "2000"], "--gpus-per-server must be in 1..1024, got 2000"),
        (["--scale-bits", "0"], "--scale-bits must be in 1..128"),
        (["--layers", "0", "--kv-heads", "1", "--head-dim", "64", "--params", "1"], "--layers must be in 1.."),
        (["--layers", "3", "--latent", "0+4", "--params", "1"], "--latent must be in 1.."),
        (["--gpu-memory", "0B"], "--gpu-memory must be in 1.."),
        (["--gpus", "1"], "fit on no power of two up to 1 GPUs"),
        (["--tensor-parallel", "1"], "131 GiB of weights leave nothing for KV on 1 GPUs"),
        (["--tensor-parallel", "1001"], "--tensor-parallel must be in 1..1000"),
        (["--gpu-memory", "80"], "--gpu-memory: '80' is not a size"),
        (["--host-memory", "-1GB"], "--host-memory"),
        (["--host-memory", "5"], "--host-memory: '5' is not a size: write a number, 0 or more, and a unit"),
        (["--disk", "5"], "--disk: '5' is not a size"),
        (["--disk-read", "0B"], "--disk-read must be above 0"),
        (["--gpu-tflops", "0"], "--gpu-tflops must be above 0"),
        (["--kv-dtype", "int3"], "KV format must be one of"),
        (["--block-size", "257"], "--block-size must be in 1..256"),
        (["--weight-bits", "0"], "--weight-bits must be in 1..64"),
        (["--step-ms", "slow"], "--step-ms"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option (see pagedkv plan --help)"),
        (["llama-2-7b", "llama-2-7b"], "unrecognized arguments"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(capsys: Capture, argv: list[str], words: str) -> None:
    assert words in failing(capsys, *argv)


ODD = ("", " ", *split("-1 0 1 1.5 1e9 nan inf 1B 999999999999999B 1% 100% 0B 1GB 8191PiB"))
OPTIONS = split(
    "users tokens max-tokens active shared-prefix turns-per-hour gpus gpu gpu-memory gpu-read gpu-tflops link "
    "gpus-per-server tensor-parallel memory-share kv-share host-memory disk disk-read step-ms weight-bits kv-dtype "
    "scale-group scale-bits block-size layers kv-heads head-dim v-head-dim window params active-params latent"
)


@pytest.mark.parametrize("option", one_in(3, OPTIONS))
def test_no_value_of_an_option_makes_a_traceback(capsys: Capture, option: str) -> None:
    numbers = {"layers": "2", "kv-heads": "2", "head-dim": "8", "params": "1M", "max-tokens": "4k"}
    if option == "latent":
        del numbers["kv-heads"], numbers["head-dim"]
    for value in (*ODD, "\0", "\N{COLLISION SYMBOL}", "x" * 10_000):
        given = numbers | {option: value}
        argv = [f"--{name}={text}" for name, text in given.items()]
        code = main(["plan", *argv])
        captured = capsys.readouterr()
        assert code in (0, 2)
        if code == 2:
            assert captured.out == ""
            assert captured.err.count("\n") == 1
            assert len(captured.err) < 1000
        else:
            assert "room for KV" in captured.out
            assert captured.err == ""
