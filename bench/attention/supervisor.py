"""Runs the bench in a child process, and restarts it after a crash or hang.

A bad kernel costs one row.

The process writes a line before everything that could end it and a line for every row. When it ends too early, or says
nothing for too long, what it had begun gets a row that says so, and a new process goes on with the rest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.attention.runner import Row
from bench.results import ROOT

MAX_STARTS = 12
POLL_S = 0.05
GRACE_S = 12.0  # that a process may take beyond its deadline
LEAST_S = 20.0  # with less time than this left nothing is started again
LOST = 3  # exit status of a process whose device takes no more work; what it had begun has its row


class Listener(Protocol):
    """Told how far the run is."""

    def total(self, entries: int) -> None:
        """So many entries there are in all."""

    def say(self, text: str) -> None:
        """What happens now."""

    def row(self, row: Row) -> None:
        """An entry is done."""


@dataclass(slots=True)
class Outcome:
    """What a run came to.

    Attributes
    ----------
    rows, about : the results, and the process's word about its device.
    ended : seconds from the start to each section's last row.
    starts : processes.
    failure : why the run is incomplete; empty if it is whole.
    """

    rows: list[Row] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    starts: int = 0
    failure: str = ""


class Journal:
    """The file that the process writes and the supervisor reads: one JSON value per line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def write(self, **line: Any) -> None:
        """Append a line; it is there when this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def news(self) -> Iterator[dict[str, Any]]:
        """Whole lines that were not read before."""
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self._position)
            while (line := file.readline()).endswith("\n"):
                self._position = file.tell()
                yield json.loads(line)


def supervise(
    arguments: Sequence[str],
    folder: Path,
    listener: Listener,
    *,
    seconds: float,
    silence_s: float,
    module: str = "bench.attention.child",
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run ``python -m MODULE`` until every entry has a row, or time is over.

    Parameters
    ----------
    arguments : of the process, but for those that this adds.
    folder : for the journal; empty.
    seconds : for everything; the process is told when they end.
    silence_s : a process that writes nothing for so long hangs.
    module : what measures.
    clock : seconds, by which silence is measured.
    """
    journal = Journal(folder / "journal.jsonl")
    deadline = time.time() + seconds
    outcome = Outcome()
    while outcome.starts < MAX_STARTS:
        outcome.starts += 1
        command = [sys.executable, "-m", module, *arguments]
        command += ["--journal", str(journal.path), "--deadline", repr(deadline)]
        before = len(outcome.rows)
        process = subprocess.Popen(command, cwd=ROOT)
        begun, ended = _follow(process, journal, outcome, listener, silence_s, deadline + GRACE_S, clock)
        if process.returncode == 0:
            return outcome
        for case, system in _without_row(begun, outcome.rows) if begun else ():
            row = {"section": begun["section"], "case": case, "system": system, "status": "crashed"}
            journal.write(row={**row, "note": f"{ended} while {begun['doing']}"})
        for line in journal.news():
            _take(line, outcome, listener)
        if len(outcome.rows) == before:
            outcome.failure = f"{ended} without a result"
            break
        if deadline - time.time() < LEAST_S:
            outcome.failure = f"{ended}; no time to go on"
            break
        listener.say(f"{ended}: going on in a new process")
    return outcome


def _follow(
    process: subprocess.Popen[bytes],
    journal: Journal,
    outcome: Outcome,
    listener: Listener,
    silence_s: float,
    until: float,
    clock: Callable[[], float],
) -> tuple[dict[str, Any], str]:
    """Read the journal until the process ends. What it had begun last, and how it ended."""
    begun: dict[str, Any] = {}
    heard = clock()
    try:
        while True:
            ended = process.poll() is not None
            for line in journal.news():
                heard = clock()
                begun = line.get("begin", begun)
                _take(line, outcome, listener)
            if ended:
                return begun, f"the process ended with status {process.returncode}"
            silent = clock() - heard > silence_s
            if silent or time.time() > until:
                process.kill()
                process.wait()
                return begun, f"nothing was heard for {silence_s:.0f} s" if silent else "time was over"
            time.sleep(POLL_S)
    except BaseException:
        process.kill()
        process.wait()
        raise


def _take(line: dict[str, Any], outcome: Outcome, listener: Listener) -> None:
    if "row" in line:
        outcome.rows.append(line["row"])
        outcome.ended[line["row"]["section"]] = round(time.monotonic() - outcome.begun, 1)
        listener.row(line["row"])
    elif "about" in line:
        outcome.about = line["about"]
        listener.total(line["about"]["entries"])
    elif "begin" in line:
        begun = line["begin"]
        shown = begun["keys"][0] if begun["keys"] else ["", ""]
        listener.say(" ".join(part for part in (begun["section"], *shown, begun["doing"]) if part))


def _without_row(begun: dict[str, Any], rows: Sequence[Row]) -> list[tuple[str, str]]:
    known = {(row["section"], row["case"], row["system"]) for row in rows}
    return [(case, system) for case, system in begun["keys"] if (begun["section"], case, system) not in known]
