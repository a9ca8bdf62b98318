"""CHANGELOG says what 0.1 has, by area, in a page; the old names follow in a table."""

from __future__ import annotations

from pathlib import Path

import pytest

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"
MOST_LINES = 59

pytestmark = pytest.mark.checkout


def test_the_text_beside_the_table_is_a_page() -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    _, _, unreleased = text.partition("## [Unreleased]")
    beside, heading, table = unreleased.partition("### Old names\n")
    assert heading
    assert len(beside.splitlines()) <= MOST_LINES, "merge bullets, and tell no unreleased state against another"
    assert all(line.startswith("|") for line in table.splitlines() if line)
