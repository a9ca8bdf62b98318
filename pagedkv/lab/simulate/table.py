"""Results as tables for people: plain text, or rich's where it is installed and wanted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from pagedkv.lab.replay.about import fitting
from pagedkv.lab.replay.progress import have_rich
from pagedkv.lab.replay.table import terminal_width
from pagedkv.lab.simulate.result import SimResult
from pagedkv.spec.sizes import format_size

Row = dict[str, str]
WIDTH = 80
DAY_S = 86_400
LEFT_OUT = (  # first to last, where a table is too wide
    *("wall s", "tokens/slot", "again tok", "most", "restored", "disk/day", "seconds", "memory %", "tok/s"),
    *("TPOT p99 ms", "moved", "recomputed", "swapped", "disk %", "host %", "served", "running", "waste %"),
    *("requests", "prompt"),
    *("steps", "contiguous, most", "paged, most", "contiguous, formula", "paged, formula"),  # of studies
)
LEGEND = {
    "system": "how KV is allocated (--systems)",
    "served": "requests that came to their end",
    "refused": "requests that no empty device could take",
    "seconds": "virtual time from the first arrival to the last token",
    "TTFT p50 s": "time from arrival to the first token, median",
    "TTFT p99 s": "the same, of the slowest in a hundred",
    "TPOT p50 ms": "time per token after the first, a request's mean, median of the requests",
    "TPOT p99 ms": "the same, of the slowest in a hundred",
    "output tok/s": "tokens generated per virtual second",
    "tok/s": "the same, with prompt tokens",
    "hit %": "prompt tokens that were found in the cache",
    "host %": "those of them that came from host memory",
    "disk %": "those of them that came from disk",
    "running": "sequences at once, mean over time",
    "most": "sequences at once, at most",
    "waste %": "token slots held that hold no token, mean over time",
    "tokens/slot": "tokens of all sequences per slot held; above 1 where some are shared or out of reach",
    "memory %": "the device's slots that running sequences hold, mean over time",
    "swapped": "suspensions whose blocks may come back from a colder tier",
    "recomputed": "suspensions whose tokens are computed again",
    "again tok": "tokens computed once more after a suspension",
    "restored": "blocks of suspended requests that came back from a colder tier",
    "stalled %": "of the seconds: steps waited for blocks from colder tiers",
    "moved": "bytes copied between tiers, both ways",
    "disk/day": "bytes written to the disk, at the rate of the run in a day",
    "wall s": "time that the simulation itself took",
}
FOUND_LEGEND = {
    "found": "coldest tier that some of a prompt came from, if half of it was cached; else part, or none",
    "requests": "whose prompts were found there",
    "prompt": "tokens of their prompts, mean",
    "found %": "of these the cached ones",
    "load ms": "what a request's own bytes take on their links with no other bytes before them, median",
    "TTFT p50 ms": "from arrival to the first token, with waiting and computing the rest, median",
    "TTFT p99 ms": "the same, of the slowest in a hundred",
}


def rows(results: Sequence[SimResult]) -> list[Row]:
    """A line for each result; only columns that say something for these.

    LEGEND says what they are.
    """
    lines = [_row(result) for result in results]
    empty = {name for name in lines[0] if all(line[name] in ("0", "0.0", "-") for line in lines)} if lines else set()
    return [{name: cell for name, cell in line.items() if name not in empty} for line in lines]


def _row(r: SimResult) -> Row:
    moved = sum(r.moved_bytes.values())
    written = r.disk_written_bytes
    served, held = r.requests > 0, r.memory_held > 0
    return {
        "system": r.system,
        "served": f"{r.requests:,}",
        "refused": f"{r.refused:,}",
        "seconds": f"{r.seconds:,.0f}",
        "TTFT p50 s": f"{r.ttft_s['p50']:.2f}" if served else "-",
        "TTFT p99 s": f"{r.ttft_s['p99']:.2f}" if served else "-",
        "TPOT p50 ms": f"{1000 * r.tpot_s['p50']:.1f}" if served else "-",
        "TPOT p99 ms": f"{1000 * r.tpot_s['p99']:.1f}" if served else "-",
        "output tok/s": f"{r.output_tokens_per_s:,.0f}",
        "tok/s": f"{r.tokens_per_s:,.0f}",
        "hit %": f"{100 * r.hit_rate['total']:.1f}",
        "host %": f"{100 * r.hit_rate.get('host', 0.0):.1f}",
        "disk %": f"{100 * r.hit_rate.get('disk', 0.0):.1f}",
        "running": f"{r.mean_running:.1f}",
        "most": f"{r.most_running}",
        "waste %": f"{100 * max(0.0, 1 - r.tokens_per_slot):.1f}" if held else "-",
        "tokens/slot": f"{r.tokens_per_slot:.2f}" if held else "-",
        "memory %": f"{100 * r.memory_held:.1f}",
        "swapped": f"{r.preemptions['swap']:,}",
        "recomputed": f"{r.preemptions['recompute']:,}",
        "again tok": f"{r.recomputed_tokens:,}",
        "restored": f"{r.restored_blocks:,}",
        "stalled %": f"{100 * r.stalled_s / r.seconds:.1f}" if r.seconds else "-",
        "moved": format_size(moved) if moved else "-",
        "disk/day": format_size(int(written / r.seconds * DAY_S)) if written is not None and r.seconds else "-",
        "wall s": f"{r.wall_s:.1f}",
    }


def found_rows(results: Sequence[SimResult]) -> list[Row]:
    """A line for each place that prompts of a result were found in.

    FOUND_LEGEND says what they are.
    """
    return [_found_row(r.system, kind, figures) for r in results for kind, figures in r.found.items()]


def _found_row(system: str, kind: str, figures: Mapping[str, float]) -> Row:
    return {
        "system": system,
        "found": kind,
        "requests": f"{figures['requests']:,}",
        "prompt": f"{figures['prompt_tokens']:,.0f}",
        "found %": f"{100 * figures['found_tokens'] / figures['prompt_tokens']:.1f}",
        "load ms": f"{1000 * figures['load_s']:.1f}",
        "TTFT p50 ms": f"{1000 * figures['ttft_p50_s']:,.1f}",
        "TTFT p99 ms": f"{1000 * figures['ttft_p99_s']:,.1f}",
    }


def print_rows(lines: Sequence[Row], title: str, file: TextIO | None = None, width: int | None = None) -> None:
    """Print lines under a title, to `file` (default stdout); `width` as :func:`narrowed`."""
    file = sys.stdout if file is None else file
    print(title if width is None else fitting(title), file=file)
    if not lines:
        return
    lines = narrowed(lines, width)
    columns = list(lines[0])
    cells = [[line[column] for column in columns] for line in lines]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if have_rich() and file.isatty() and sum(widths) + 3 * len(widths) + 1 <= terminal_width():
        _print_rich(columns, cells, file)
        return
    for line in (columns, ["-" * width for width in widths], *cells):
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(padded).rstrip(), file=file)


def narrowed(lines: Sequence[Row], width: int | None) -> Sequence[Row]:
    """The columns that fit in `width` characters (None: all); the least telling go first."""
    for name in ("", *LEFT_OUT):
        lines = [{column: cell for column, cell in line.items() if column != name} for line in lines]
        widths = [max(len(column), *(len(line[column]) for line in lines)) for column in lines[0]]
        if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
            break
    return lines


def _print_rich(columns: list[str], cells: list[list[str]], file: TextIO) -> None:
    table: Any = importlib.import_module("rich.table").Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    importlib.import_module("rich.console").Console(file=file, width=terminal_width()).print(table)


def markdown(lines: Sequence[Row]) -> str:
    """The same as a Markdown table."""
    columns = list(lines[0]) if lines else []
    rule = ["---", *(["---:"] * (len(columns) - 1))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, rule, *([*row.values()] for row in lines)])
