"""The kill counts of docs/testing.md are those of the catalogue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels import test_mutants_cache, test_mutants_decode, test_mutants_prefill
from tests.mutants.catalogue import ROOMS

KERNELS = (test_mutants_cache, test_mutants_decode, test_mutants_prefill)


@pytest.mark.checkout
def test_the_page_has_the_counts_of_the_catalogue() -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    _, _, table = page.partition("| mutants of | killed at 32d988c | killed now |\n")
    found = re.findall(r"^\| ([\w ]+) \| (\d+) \| (\d+) \|$", table.partition("\n\n")[0], re.MULTILINE)
    counts = {room: len(mutants) for room, mutants in ROOMS.items()}
    assert {room: int(now) for room, _, now in found} == {
        **counts, "CUDA kernels": sum(len(module.MUTANTS) for module in KERNELS),
    }  # fmt: skip
    assert all(int(now) >= int(before) for _, before, now in found), "no claim got weaker"
