"""A run's rows as tables: one for each section, the bars, what was not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.attention.bars import compare
from bench.attention.sections import NAMES, PARTS
from bench.table import render_table

Row = Mapping[str, Any]
TITLES = {part.name: part.title for part in PARTS}
_COLUMNS = {
    "case": "case",
    "system": "system",
    "us": "us",
    "tb_per_s": "TB/s",
    "tflop_per_s": "TFLOP/s",
    "of_read": "of read",
    "of_paged_read": "of paged read",
    "of_copy": "of copy",
    "of_matmul": "of matmul",
    "steps": "steps",
    "error": "error",
    "status": "status",
}
VIEWS = {"bars": "Bars", **TITLES, "unmeasured": "Without a figure"}  # name -> title, in the order of a page


def view(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of a view of a result document, with headings as keys.

    Raises
    ------
    ValueError
        There is no such view.
    """
    rows: Sequence[Row] = document["rows"]
    if name == "bars":
        return compare(rows)
    if name == "unmeasured":
        return unmeasured(rows)
    if name in NAMES:
        return section(rows, name)
    raise ValueError(f"no view {name!r} of attention's results: {', '.join(VIEWS)}")


def page(document: Mapping[str, Any]) -> str:
    """All views that have rows, each a heading and a table, as Markdown."""
    parts = {title: view(document, name) for name, title in VIEWS.items()}
    drawn = [f"### {title}\n\n{render_table(rows, markdown=True)}" for title, rows in parts.items() if rows]
    return "\n\n".join(drawn)


def section(rows: Sequence[Row], name: str) -> list[dict[str, Any]]:
    """A section's measured rows; only columns that have a value."""
    chosen = [row for row in rows if row["section"] == name and row["status"] == "measured"]
    used = [key for key in _COLUMNS if key != "status" and any(row.get(key) is not None for row in chosen)]
    return [{_COLUMNS[key]: row.get(key) for key in used} for row in chosen]


def unmeasured(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What has no figure, and why.

    The cases of one system that share a reason are counted together.
    """
    counted: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "measured":
            why = row.get("note") or (f"error {row['error']:.2g}" if "error" in row else "")
            counted.setdefault((row["section"], row["system"], row["status"], why), []).append(row["case"])
    return [
        {"section": section_, "system": system, "status": status, "why": why, "cases": len(cases), "first": cases[0]}
        for (section_, system, status, why), cases in counted.items()
    ]
