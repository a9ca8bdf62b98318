"""How far a run is, on stderr.

Rich's bar where there is a terminal and rich, plain lines otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from bench.attention.runner import Row


class Lines:
    """A line for every row."""

    def __init__(self) -> None:
        self._total = self._done = 0

    def total(self, entries: int) -> None:
        """So many entries there are in all."""
        self._total = entries

    def say(self, text: str) -> None:
        """Only what is not an entry's step."""
        if "new process" in text:
            print(text, file=sys.stderr, flush=True)

    def row(self, row: Row) -> None:
        """An entry is done."""
        self._done += 1
        figure = next((f"{row[name]:,.1f} {name}" for name in ("us", "steps") if name in row), row["status"])
        what = f"{row['section']}: {row['case']}, {row['system']}"
        print(f"[{self._done}/{self._total}] {what}: {figure}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to take away."""


class Bar:
    """rich's bar; what failed stays above it."""

    def __init__(self) -> None:
        rich: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console").Console(stderr=True)
        self._bar = rich.Progress(
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(),
            rich.TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._bar.start()

    def total(self, entries: int) -> None:
        """So many entries there are in all."""
        self._bar.update(self._task, total=entries)

    def say(self, text: str) -> None:
        """What happens now."""
        self._bar.update(self._task, description=text)

    def row(self, row: Row) -> None:
        """An entry is done."""
        self._bar.advance(self._task)
        if row["status"] in ("wrong", "failed", "crashed"):
            what = f"{row['section']}: {row['case']}, {row['system']}: {row['status']}"
            self._bar.console.print(f"{what}: {row.get('note') or row.get('error')}", markup=False, highlight=False)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def progress() -> Lines | Bar:
    """What suits where stderr goes."""
    rich = importlib.util.find_spec("rich") is not None
    return Bar() if rich and sys.stderr.isatty() else Lines()
