"""``pagedkv doctor --gpu``: the kernels of another GPU, and why others are not tried."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedkv.cli import main
from pagedkv.kernels.select import KERNELS
from pagedkv.tools.choice import CALLS, GPUS

Capture = pytest.CaptureFixture[str]
NAMES = {kernel.name for kernel in KERNELS}


def listed(gpu: str, capsys: Capture) -> dict[str, Any]:
    """The report in JSON, its kernels by kind of call."""
    assert main(["doctor", "--gpu", gpu, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {**report, "kernels": {one["call"]: one for one in report["kernels"]}}


def test_every_kernel_is_tried_for_a_call_or_it_is_said_why_not(capsys: Capture) -> None:
    for major, minor in GPUS:
        kernels = listed(f"{major}.{minor}", capsys)["kernels"]
        assert list(kernels) == list(CALLS)
        for choice in kernels.values():
            assert choice["tried"]
            assert {*choice["tried"], *choice["not_tried"]} == NAMES
            assert not {*choice["tried"]} & {*choice["not_tried"]}
            assert all(choice["not_tried"].values())


def test_the_kernels_and_reasons_are_those_of_the_named_gpu(capsys: Capture) -> None:
    h100, a100 = listed("9.0", capsys), listed("8.0", capsys)
    assert (h100["gpu"], h100["gpus"], a100["gpus"]) == ("9.0", ["H100", "H200", "GH200"], ["A100"])
    call = "decode, up to 16 rows"
    assert h100["kernels"][call]["tried"] == ["decode_mma", "decode_tma"]
    assert a100["kernels"][call]["tried"] == ["decode_mma"]
    assert a100["kernels"][call]["not_tried"]["decode_tma"].startswith("compute capability 8.0: ")
    assert h100["kernels"][call]["not_tried"]["prefill_mma"] == "4 rows of a sequence: kernels for few rows are tried"
    assert h100["kernels"]["prefill"]["not_tried"]["decode_mma"] == "2048 rows of a sequence: at most 16"
    assert h100["kernels"]["prefill with a window"]["not_tried"]["prefill_wgmma"] == "no window"
    assert h100["kernels"]["int8 latents with a scale per token"]["tried"] == ["decode_simt"]


def test_the_text_has_a_line_for_each_call_and_for_each_reason(capsys: Capture) -> None:
    assert main(["doctor", "--gpu", "9.0"]) == 0
    first, shapes, *lines = capsys.readouterr().out.splitlines()
    assert first == 'kernels that "auto" tries on compute capability 9.0 (H100, H200, GH200), bf16 queries'
    assert shapes == "for head dim 128 and latents of 576/512; another head dim may have fewer kernels"
    assert [line.partition(": ")[0] for line in lines if not line.startswith(" ")] == list(CALLS)
    assert "prefill with a window: prefill_mma" in lines
    assert "    not prefill_wgmma: no window" in lines


@pytest.mark.parametrize("gpu", ["", "9", "9.7", "sm_90", "H100", "9.0.0", "-9.0", "9.0 "])
def test_a_gpu_that_there_is_not_is_answered_with_those_that_there_are(gpu: str, capsys: Capture) -> None:
    assert main(["doctor", f"--gpu={gpu}"]) == 2
    told = capsys.readouterr().err
    assert f"--gpu {gpu!r}: give a compute capability, of 7.0 (V100), " in told
    assert "9.0 (H100, H200, GH200)" in told


@pytest.mark.parametrize(
    "other",
    [["--retune"], ["--disk", "."], ["--disk", ""], ["--remote", "valkey://localhost:1/0"], ["--size", "1GiB"],
     ["--cluster"], ["--secret-file", "x"], ["--ca-file", "x"]],
    ids=lambda other: other[0] + other[-1][:1],
)  # fmt: skip
def test_another_gpu_is_asked_about_alone(other: list[str], capsys: Capture) -> None:
    assert main(["doctor", "--gpu", "9.0", *other]) == 2
    assert "--gpu shows the kernels of another GPU and tries nothing here" in capsys.readouterr().err
