"""Progress of a replay on stderr: rich's bar, else plain lines, or nothing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from types import TracebackType
from typing import Any, Protocol

SECONDS_BETWEEN_LINES = 2.0


class Progress(Protocol):
    """One replay at a time: ``start``, then ``advance`` as requests are done."""

    def __enter__(self) -> Progress: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def start(self, label: str, num_requests: int) -> None: ...
    def advance(self, num_requests: int) -> None: ...


class Silent:
    """Says nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def start(self, label: str, num_requests: int) -> None:
        """Nothing to say."""

    def advance(self, num_requests: int) -> None:
        """Nothing to say."""


class Lines(Silent):
    """A line on stderr when a replay starts, and every two seconds."""

    def __init__(self) -> None:
        self._label, self._total, self._done, self._next = "", 0, 0, 0.0

    def start(self, label: str, num_requests: int) -> None:
        self._label, self._total, self._done = label, num_requests, 0
        self._next = time.monotonic() + SECONDS_BETWEEN_LINES
        print(f"{label}: {num_requests} requests", file=sys.stderr, flush=True)

    def advance(self, num_requests: int) -> None:
        self._done += num_requests
        now = time.monotonic()
        if now >= self._next and self._done < self._total:
            self._next = now + SECONDS_BETWEEN_LINES
            print(f"{self._label}: {self._done} of {self._total}", file=sys.stderr, flush=True)


class Bar(Silent):
    """rich's progress bar on stderr, one line per replay."""

    def __init__(self) -> None:
        rich_progress: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console").Console(stderr=True)
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: Any = None

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def start(self, label: str, num_requests: int) -> None:
        self._task = self._bar.add_task(label, total=num_requests)

    def advance(self, num_requests: int) -> None:
        self._bar.advance(self._task, num_requests)


def have_rich() -> bool:
    """Whether the ``bench`` extra's rich is installed."""
    return importlib.util.find_spec("rich") is not None


def progress(wanted: bool | None) -> Progress:
    """``True``: always; ``False``: never; ``None``: when stderr is a terminal."""
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        return Silent()
    return Bar() if have_rich() and sys.stderr.isatty() else Lines()
