"""Rows of mappings as a table.

Aligned text, Markdown, or rich's table on a terminal that has rich.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def format_value(value: Any) -> str:
    """Three significant digits for a float, ``-`` for None.

    Above 100, whole digits with thousands commas.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value != value:
            return "nan"
        size = abs(value)
        if size >= 100:
            return f"{value:,.0f}"
        if size >= 10:
            return f"{value:.1f}"
        return f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.3g}"
    return str(value)


def render_table(
    rows: Rows, columns: Sequence[str] | None = None, *, title: str = "", markdown: bool = False
) -> str:
    """Draw `rows` as text.

    Parameters
    ----------
    rows : one mapping per line; a column a row lacks shows as ``-``.
    columns : names and their order; all keys in order of first appearance if left out.
    title : a line above the table (a Markdown heading is the caller's).
    markdown : a Markdown table instead of aligned text.

    Returns
    -------
    str
        The table, without a newline at its end.
    """
    names = list(columns) if columns is not None else _columns(rows)
    cells = [[format_value(row.get(name)) for name in names] for row in rows]
    numeric = [any(_is_number(row.get(name)) for row in rows) for name in names]
    if markdown:
        cells = [[cell.replace("|", "\\|") for cell in line] for line in cells]
        rule = ["---:" if right else "---" for right in numeric]
        lines = ["| " + " | ".join(line) + " |" for line in [names, rule, *cells]]
    else:
        widths = [max(len(name), *(len(line[i]) for line in cells), 0) for i, name in enumerate(names)]
        lines = []
        for line in [names, ["-" * width for width in widths], *cells]:
            padded = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, numeric, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
    return "\n".join([title, *lines] if title else lines)


def print_table(rows: Rows, columns: Sequence[str] | None = None, *, title: str = "") -> None:
    """Print `rows`: rich's table on a terminal where rich is installed, aligned text otherwise."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            names = list(columns) if columns is not None else _columns(rows)
            table = Table(title=title or None)
            for name in names:
                numeric = any(_is_number(row.get(name)) for row in rows)
                table.add_column(name, justify="right" if numeric else "left")
            for row in rows:
                table.add_row(*(format_value(row.get(name)) for name in names))
            Console().print(table)
            return
    print(render_table(rows, columns, title=title))


def _columns(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
