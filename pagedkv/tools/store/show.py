"""Output of the tools: progress on stderr for terminals, tables, ages and rates."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from pagedkv.spec.sizes import format_size

SECONDS_BETWEEN_LINES = 2.0


def have_rich() -> bool:
    """Whether the ``bench`` extra's rich is installed."""
    return importlib.util.find_spec("rich") is not None


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yields a function to call with each number of bytes done.

    On a terminal, a bar or lines show progress and the rate.
    """
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
    elif not have_rich():
        yield _Lines(label, total).advance
    else:
        rich: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console").Console(stderr=True)
        columns = (
            rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn(binary_units=True),
            rich.TransferSpeedColumn(), rich.TimeRemainingColumn(),
        )  # fmt: skip
        with rich.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda num_bytes: bar.advance(task, num_bytes)


class _Lines:
    """A line every two seconds."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._start = time.monotonic()
        self._next = self._start + SECONDS_BETWEEN_LINES

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SECONDS_BETWEEN_LINES
            rate = format_size(int(self._done / (now - self._start)))
            done, total = format_size(self._done), format_size(self._total)
            print(f"{self._label}: {done} of {total}, {rate}/s", file=sys.stderr, flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO) -> None:
    """A table whose first column stands left and the others right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if have_rich() and file.isatty():
        table: Any = importlib.import_module("rich.table").Table()
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        importlib.import_module("rich.console").Console(file=file).print(table)
        return
    for cells in (columns, ["-" * width for width in widths], *rows):
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        print("  ".join(padded).rstrip(), file=file)


def counted(number: int, noun: str, plural: str = "") -> str:
    """``"1 slot"``, ``"2,000 slots"``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def age(seconds: float) -> str:
    """A time span in its two largest units, such as ``"3 d 4 h"``.

    A negative span, from a clock that was set back, is 0.
    """
    left = max(0, int(seconds))
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
        elif parts:
            break
    return " ".join(parts[:2])
