"""Which mutants a run killed: recorded from pytest's reports, kept, and drawn.

A mutant is killed if the test that tries it passed: that test fails unless one of the mutant's killers failed.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.rooms import KERNEL_MODULES, KERNELS, NAMES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "mutants.json"
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- kills: python -m tests.mutants -->", "<!-- end of kills -->"
OF_CATALOGUE = "tests/mutants/test_mutants.py::test_the_suite_notices_that"
OF_KERNELS = tuple(f"{module.__name__.replace('.', '/')}.py::test_the_tests_notice_that" for module in KERNEL_MODULES)
ON_INTERPRETER = "ptxsim-"  # in the id of a test of a kernel's mutant: a GPU would be another backend
NO_RUN = "No run: `bench/results/mutants.json` does not exist."


@dataclass(frozen=True)
class Room:
    """A room's outcome in one run.

    Attributes
    ----------
    killed : number of mutants that a killer noticed.
    survived, untried : names of those that none noticed, and of those whose test ended in another way or did not run.
    commit : short hash, with a ``+`` where the tree had other changes.
    date : of the run, ISO 8601.
    """

    killed: int
    survived: tuple[str, ...]
    untried: tuple[str, ...]
    commit: str
    date: str


class Recorder:
    """A pytest plugin that notes how the test of each mutant ended, in any process."""

    def __init__(self, rooms: Iterable[str]) -> None:
        self._rooms = tuple(rooms)
        self._ended: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the name in the test's id, ``...[the_name]``, and how it ended."""
        name = mutant_of(report.nodeid)
        if name is None:
            return
        if report.when == "call" and not report.skipped:
            survived = "it survived" in report.longreprtext or "nothing noticed that" in report.longreprtext
            self._ended[name] = "killed" if report.passed else "survived" if survived else "untried"
        elif not report.passed:
            self._ended[name] = "untried"

    def outcomes(self) -> dict[str, Room]:
        """The outcome of each room that was asked for."""
        found = {}
        for room in self._rooms:
            ended = {name: self._ended.get(_id(name), "untried") for name in NAMES[room]}
            survived, untried = (tuple(n for n in ended if ended[n] == how) for how in ("survived", "untried"))
            killed = len(ended) - len(survived) - len(untried)
            found[room] = Room(killed, survived, untried, commit(), datetime.date.today().isoformat())
        return found


def mutant_of(test: str) -> str | None:
    """The mutant in a test's id; None where the test tries none."""
    function, bracket, case = test.partition("[")
    tries = function in (OF_CATALOGUE, *OF_KERNELS)
    return case.removesuffix("]").removeprefix(ON_INTERPRETER) if bracket and tries else None


def files_of(rooms: Iterable[str]) -> list[str]:
    """Tests for pytest that try the mutants of these rooms, and no others."""
    tests: list[str] = []
    for room in rooms:
        if room == KERNELS:
            tests += OF_KERNELS
        else:
            tests += [f"{OF_CATALOGUE}[{_id(name)}]" for name in NAMES[room]]
    return tests


def kept(path: Path) -> dict[str, Room]:
    """The rooms in a file; none where there is no file."""
    if not path.exists():
        return {}
    rooms: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return {
        room: Room(**{**row, "survived": tuple(row["survived"]), "untried": tuple(row["untried"])})
        for room, row in rooms.items()
    }


def written(path: Path, rooms: Mapping[str, Room]) -> None:
    """Write the rooms to a file, in the catalogue's order."""
    rows = {room: asdict(rooms[room]) for room in NAMES if room in rooms}
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def drawn(page: str, rooms: Mapping[str, Room]) -> str:
    """The page with the table of these rooms between the marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert (begin, end) == (BEGIN, END), "the page lacks its marks"
    return f"{head}{begin}\n\n{_table(rooms) if rooms else NO_RUN}\n\n{end}{tail}"


def commit() -> str:
    """The commit of the tree that was tried."""
    head = _git("rev-parse", "--short", "HEAD")
    return head + ("+" if _git("status", "--porcelain", "--", ".", ":!bench/results", ":!docs") else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _table(rooms: Mapping[str, Room]) -> str:
    lines = ["| mutants of | tried | killed | survived | commit |", "|---|---:|---:|---:|---|"]
    for name, room in rooms.items():
        tried = room.killed + len(room.survived)
        lines.append(f"| {name} | {tried} | {room.killed} | {len(room.survived)} | {room.commit} |")
    return "\n".join(lines)


def _id(name: str) -> str:
    return name.replace(" ", "_")
