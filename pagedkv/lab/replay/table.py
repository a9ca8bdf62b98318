"""Results as a table: plain text on the base install, rich's where installed and wanted.

In 80 columns unless it may be wide: then columns are left out, the least telling first.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from pagedkv.lab.replay.about import about, fitting, held_and_staked, notes
from pagedkv.lab.replay.options import Options
from pagedkv.lab.replay.progress import have_rich
from pagedkv.lab.replay.references import BOUNDS
from pagedkv.lab.replay.result import Result
from pagedkv.lab.replay.trace import Trace
from pagedkv.spec.sizes import format_size

WIDTH = 80
FEW_POINTS = 3.0  # of hit rate between LRU and MIN, below which a share of them says little
LEFT_OUT = (  # first to last, where a table is too wide
    *("us/request", "flops %", "engine", "moved", "tokens %", "hit blocks", "verified", "squeezed"),
    *("disk %", "host %", "device %"),
)


def print_table(
    trace: Trace,
    results: Sequence[Result],
    file: TextIO | None = None,
    *,
    options: Options | None = None,
    wide: bool = False,
) -> None:
    """Print the trace, one line per result, and how to read them.

    Parameters
    ----------
    file : default stdout.
    options : that the results were made with; default ``Options()``.
    wide : all columns and a line for each bound, however long the lines are.
    """
    file = sys.stdout if file is None else file
    for line in about(trace, results, Options() if options is None else options):
        print(line if wide else fitting(line), file=file)
    shown, same = (list(results), "") if wide else _without_doubles(results)
    columns, rows = table(shown, WIDTH if not wide else None)
    widths = _widths(columns, rows)
    if have_rich() and file.isatty() and sum(widths) + 3 * len(widths) + 1 <= terminal_width():
        _print_rich(columns, rows, file)
    else:  # rich would cut the cells of a table that is too wide
        _print_plain(columns, rows, widths, file)
    for line in (*notes(results, FEW_POINTS), same):
        if line:
            print(line if wide else fitting(line), file=file)


def table(results: Sequence[Result], width: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; only columns that say something for these results.

    Of these, those that fit in `width` characters, two between columns.
    """
    host = any(r.capacity.host for r in results)
    disk = any(r.capacity.disk for r in results)
    real = any(r.engine == "real" for r in results)
    several = len({r.capacity.blocks for r in results}) > 1
    columns = ["policy", "engine"]
    if several:
        columns += ["device", *(["host"] if host else []), *(["disk"] if disk else [])]
    columns += ["hit blocks", "hit %"]
    if host or disk:
        columns += ["device %", *(["host %"] if host else []), *(["disk %"] if disk else [])]
    columns += ["tokens %", "flops %", "LRU to MIN", "moved", "us/request"]
    if held_and_staked(results):
        columns += ["squeezed"]
    if real:
        columns += ["verified", "wrong bytes"]
    cells = [_cells(r) for r in results]
    for name in LEFT_OUT:
        widths = _widths(columns, [[line[c] for c in columns] for line in cells])
        if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
            break
        columns = [column for column in columns if column != name]
    return columns, [[line[c] for c in columns] for line in cells]


def _cells(r: Result) -> dict[str, str]:
    accesses = r.block_accesses
    bound = r.engine == "bound"
    return {
        "policy": r.policy,
        "engine": r.engine,
        "device": f"{r.capacity.device:,}",
        "host": f"{r.capacity.host:,}",
        "disk": f"{r.capacity.disk:,}",
        "hit blocks": f"{r.hit_blocks['total']:,}",
        "hit %": f"{100 * r.block_hit_rate:.2f}",
        "device %": f"{100 * r.hit_blocks['device'] / accesses:.2f}",
        "host %": f"{100 * r.hit_blocks['host'] / accesses:.2f}",
        "disk %": f"{100 * r.hit_blocks['disk'] / accesses:.2f}",
        "tokens %": f"{100 * r.token_hit_rate:.2f}",
        "flops %": f"{100 * r.flop_weighted_hit_rate:.2f}",
        "LRU to MIN": _between(r),
        "moved": "-" if bound else format_size(sum(r.bytes.values())),
        "us/request": "-" if r.bookkeeping_us_per_request is None else f"{r.bookkeeping_us_per_request:.1f}",
        "squeezed": f"{r.counters['squeezed_requests']:,}" if "squeezed_requests" in r.counters else "-",
        "verified": "-" if bound else format_size(r.verified_bytes),
        "wrong bytes": "-" if bound else str(r.wrong_bytes),
    }


def _between(r: Result) -> str:
    """Where a result lies between LRU and MIN: as a share, or in points where these are few."""
    if r.gap_to_min_closed is None:
        return "-"
    points = 100 * (r.min_hit_blocks - r.lru_hit_blocks) / r.block_accesses
    if points < FEW_POINTS:
        return f"{points * r.gap_to_min_closed:+.2f} pt"
    return f"{100 * r.gap_to_min_closed:.1f} %"


def _without_doubles(results: Sequence[Result]) -> tuple[list[Result], str]:
    """Leave out bounds that hit as much as another one everywhere; a line names them."""
    hits: dict[str, list[int]] = {}
    for r in results:
        if r.policy in BOUNDS:
            hits.setdefault(r.policy, []).append(r.hit_blocks["total"])
    kept: dict[tuple[int, ...], str] = {}
    for name in sorted(hits, key=lambda name: name != "min"):
        kept.setdefault(tuple(hits[name]), name)
    doubles = {name: kept[tuple(counts)] for name, counts in hits.items() if kept[tuple(counts)] != name}
    told = ", ".join(f"{name} hits as much as {other}" for name, other in doubles.items())
    return [r for r in results if r.policy not in doubles], told


def _widths(columns: list[str], rows: list[list[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]


def _print_plain(columns: list[str], rows: list[list[str]], widths: list[int], file: TextIO) -> None:
    left = {"policy", "engine"}
    for cells in (columns, ["-" * width for width in widths], *rows):
        padded = [
            cell.ljust(w) if name in left else cell.rjust(w)
            for name, cell, w in zip(columns, cells, widths, strict=True)
        ]
        print("  ".join(padded).rstrip(), file=file)


def terminal_width() -> int:
    """Columns of the terminal that stdout or stderr is."""
    return shutil.get_terminal_size().columns


def _print_rich(columns: list[str], rows: list[list[str]], file: TextIO) -> None:
    rich_table: Any = importlib.import_module("rich.table").Table()
    for column in columns:
        justify = "left" if column in ("policy", "engine") else "right"
        rich_table.add_column(column, justify=justify, no_wrap=True)
    for row in rows:
        rich_table.add_row(*row)
    console: Any = importlib.import_module("rich.console").Console(file=file, width=terminal_width())
    console.print(rich_table)
