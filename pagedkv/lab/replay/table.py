"""Results as a table: plain text on the base install, rich's where installed and wanted."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from pagedkv.lab.replay.progress import have_rich
from pagedkv.lab.replay.result import Result
from pagedkv.lab.replay.trace import Trace
from pagedkv.spec.sizes import format_size


def print_table(trace: Trace, results: Sequence[Result], file: TextIO | None = None) -> None:
    """Print what was replayed, and one line per result, to ``file`` (default stdout)."""
    file = sys.stdout if file is None else file
    columns, rows = table(results)
    about = (
        f"{trace.name}: {trace.num_requests:,} requests, {trace.num_accesses:,} block accesses, "
        f"{trace.num_unique:,} unique blocks of {trace.block_size} tokens{holding(results)}"
    )
    print(about, file=file)
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if have_rich() and file.isatty() and sum(widths) + 3 * len(widths) + 1 <= terminal_width():
        _print_rich(columns, rows, file)
    else:  # rich would cut the cells of a table that is too wide
        _print_plain(columns, rows, widths, file)


def holding(results: Sequence[Result]) -> str:
    """How long requests hold their blocks, and what hazard risks: the end of a line.

    Empty by default.
    """
    times = {r.parameters["generating_ms"] for r in results} - {None}
    stakes = {r.parameters.get("hazard_stake") for r in results if r.policy == "hazard"} - {None}
    held = "".join(f"; held for {ms:g} ms per output token, in lru, min and min-bypass too" for ms in times)
    return held + "".join(f"; hazard with stake {stake}" for stake in stakes)


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; only columns that say something for these results."""
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
    if holding(results):
        columns += ["squeezed"]
    if real:
        columns += ["verified", "wrong bytes"]
    return columns, [[_cells(r)[c] for c in columns] for r in results]


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
        "LRU to MIN": "-" if r.gap_to_min_closed is None else f"{100 * r.gap_to_min_closed:.1f} %",
        "moved": "-" if bound else format_size(sum(r.bytes.values())),
        "us/request": "-" if r.bookkeeping_us_per_request is None else f"{r.bookkeeping_us_per_request:.1f}",
        "squeezed": f"{r.counters['squeezed_requests']:,}" if "squeezed_requests" in r.counters else "-",
        "verified": "-" if bound else format_size(r.verified_bytes),
        "wrong bytes": "-" if bound else str(r.wrong_bytes),
    }


def _print_plain(columns: list[str], rows: list[list[str]], widths: list[int], file: TextIO) -> None:
    for cells in (columns, ["-" * width for width in widths], *rows):
        padded = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        print("  ".join(padded).rstrip(), file=file)


def terminal_width() -> int:
    """Columns of the terminal that stdout or stderr is."""
    return shutil.get_terminal_size().columns


def _print_rich(columns: list[str], rows: list[list[str]], file: TextIO) -> None:
    rich_table: Any = importlib.import_module("rich.table").Table()
    for i, column in enumerate(columns):
        rich_table.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        rich_table.add_row(*row)
    console: Any = importlib.import_module("rich.console").Console(file=file, width=terminal_width())
    console.print(rich_table)
