"""NVIDIA's checkers are given a test of every attention kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagedkv.kernels.select import KERNELS
from tests.kernels.test_on_gpu import SANITIZED


@pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS])
def test_the_checkers_are_given_each_attention_kernel(kernel: str) -> None:
    text = (Path(__file__).parent / f"test_{kernel}.py").read_text(encoding="utf-8")
    tests = [block for block in text.split("\n\n\n") if "\n@pytest.mark.slow\n" not in f"\n{block}"]
    names = re.findall(r"^def (test_\w+)", "\n".join(tests), re.MULTILINE)
    words = SANITIZED.partition("(")[2].rstrip(")").split(" or ")
    assert any(word in name for name in names for word in words)
