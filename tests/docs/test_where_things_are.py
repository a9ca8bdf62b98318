"""The architecture's table of places names files that exist and functions that they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.checkout


def rows() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Where things are\n")[2].partition("\n## ")[0]
    return [line for line in table.split("\n") if line.startswith("| ")][1:]


def test_the_table_has_matching_writing_and_policies() -> None:
    assert len(rows()) >= 6
    assert all(any(word in row for row in rows()) for word in ("matched", "written to disk", "policy is added"))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip())
def test_a_place_is_there_and_has_what_the_row_says(row: str) -> None:
    named = re.findall(r"`([\w/.]+)`", row)
    paths = [ROOT / name for name in named if "/" in name or name == "kernels_cu"]
    assert paths
    assert all(path.exists() for path in paths)
    texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    functions = [name for name in named if not re.search(r"[/.]", name) and name not in ("kernels_cu", "match")]
    for function in functions:
        assert any(re.search(rf"\b(?:def|int32_t|int64_t|object) {function}\(", text) for text in texts), function


def test_what_only_looks_says_so_in_its_first_lines() -> None:
    """A reader who looks for the match finds these first."""
    for file, words in (
        ("pagedkv/_core/radix_tree.pyx", "only looks"),
        ("pagedkv/tiers/disk/store.py", "slots.py reads and writes its blocks"),
    ):
        assert words in (ROOT / file).read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
