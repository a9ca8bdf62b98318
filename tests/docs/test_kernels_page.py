"""docs/kernels.md names every kernel, and the limits of each attention kernel."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedkv.kernels.select import KERNELS, Kernel
from pagedkv.kernels.shipped import FLAGSHIP, LATENTS
from pagedkv.kernels.source import kernel_names
from pagedkv.tools.choice import CALLS, GPUS, choices

pytestmark = pytest.mark.checkout

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
ROW = re.compile(r"^\| (?P<names>`\w+`(?:, `\w+`)*) \| [^|]* \|(?P<needs>[^|]*)\|$", re.MULTILINE)
OTHERS = re.compile(r"what `(\w+)` needs")
H100 = (9, 0)
# The words of the page for a limit -> a call beyond it.
LIMITS: dict[str, dict[str, Any]] = {
    "no window": {"window": True},
    "soft cap": {"soft_cap": True},
    "ALiBi": {"alibi": True},
    "sinks": {"sinks": True},
    "mask": {"mask": True},
    "positions": {"positions": True},
    "fp16 or bf16 queries": {"q_dtype": "float32", "kv_dtype": "float32"},
    "not quantised": {"kv_dtype": "float8_e4m3", "scale_mode": "tensor"},
    "no scales per token and head": {"kv_dtype": "int8", "scale_mode": "token_head"},
    "paged KV": {"block_size": 0},
    "blocks of a multiple of 8": {"block_size": 20},
    "multiples of 16 bytes": {"kv_alignment": 8},
}


def needs() -> dict[str, str]:
    """The last column of the table by kernel."""
    table = PAGE.read_text(encoding="utf-8").partition("## Kernels")[2].partition("\n## ")[0]
    return {name: row["needs"] for row in ROW.finditer(table) for name in re.findall(r"\w+", row["names"])}


def test_every_kernel_has_a_row() -> None:
    assert set(needs()) == set(kernel_names())


DEVICES = {"H100 (9.0)": [(9, 0)], "B200 (10.0)": [(10, 0)], "A100 (8.0)": [(8, 0)],
           "RTX 4090 and 5090 (8.9, 12.0)": [(8, 9), (12, 0)]}  # fmt: skip


def test_the_page_says_which_kernels_are_tried_for_a_call() -> None:
    lines = PAGE.read_text(encoding="utf-8").partition("| bf16 queries |")[2].partition("\n\n")[0].splitlines()
    heads = [cell.strip() for cell in lines[0].strip("|").split("|") if cell.strip()]
    assert heads == list(DEVICES)
    rows = {cells[0].strip(): cells[1:] for line in lines[2:] for cells in [line.strip("|").split("|")]}
    assert list(rows) == list(CALLS)
    for cells, capabilities in zip(zip(*rows.values(), strict=True), DEVICES.values(), strict=True):
        for capability in capabilities:
            assert capability in GPUS
            for cell, choice in zip(cells, choices(capability), strict=True):
                assert tuple(re.findall(r"`(\w+)`", cell)) == choice.tried, (choice.call, capability)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_row_names_the_limits_of_its_kernel_and_no_others(kernel: Kernel) -> None:
    said = needs()[kernel.name]
    said += "".join(needs()[name] for name in OTHERS.findall(said))
    config = replace(LATENTS, group_size=64 if "wgmma" in kernel.name else 16) if "mla" in kernel.name else FLAGSHIP
    assert kernel.unsupported(config, H100) is None
    refused = {limit for limit, call in LIMITS.items() if kernel.unsupported(replace(config, **call), H100)}
    implied = {"no scales per token and head"} if "not quantised" in refused else set()
    assert refused - implied == {limit for limit in LIMITS if limit in said} - implied
