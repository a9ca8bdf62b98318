"""How far all replays together are, on stderr.

One rich bar on a terminal that has rich, else a line each.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from pagedkv.lab.replay.progress import Progress, Silent, have_rich


class Lines(Silent):
    """A line for every replay that begins."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def start(self, label: str, num_requests: int) -> None:
        print(f"[{100 * self._done / self._total:3.0f} %] {label}", file=sys.stderr, flush=True)

    def advance(self, num_requests: int) -> None:
        self._done += num_requests


class Bar(Silent):
    """One bar over the requests of all replays."""

    def __init__(self, total: int) -> None:
        rich: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console").Console(stderr=True)
        columns = (rich.BarColumn(), rich.TaskProgressColumn(), rich.TimeRemainingColumn())
        text = rich.TextColumn("{task.description}", markup=False)
        self._bar = rich.Progress(*columns, text, console=console, transient=True)
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def start(self, label: str, num_requests: int) -> None:
        self._bar.update(self._task, description=label)

    def advance(self, num_requests: int) -> None:
        self._bar.advance(self._task, num_requests)


def progress(total: int) -> Progress:
    """What suits where stderr goes; `total`: requests of all replays."""
    return Bar(total) if have_rich() and sys.stderr.isatty() else Lines(total)
