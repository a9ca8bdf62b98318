"""Kills are recorded from pytest's reports, and docs/testing.md has their counts."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutants.kills import (
    BEGIN,
    END,
    NO_RUN,
    OF_CATALOGUE,
    OF_KERNELS,
    PAGE,
    RESULTS,
    ROOT,
    Recorder,
    Room,
    drawn,
    files_of,
    kept,
    mutant_of,
    written,
)
from tests.mutants.rooms import KERNEL_MODULES, KERNELS, NAMES

pytestmark = pytest.mark.checkout


def test_the_page_has_the_counts_of_the_catalogue() -> None:
    page = PAGE.read_text(encoding="utf-8")
    _, _, table = page.partition("| mutants of | killed at 32d988c | in the catalogue |\n")
    found = re.findall(r"^\| ([\w ]+) \| (\d+) \| (\d+) \|$", table.partition("\n\n")[0], re.MULTILINE)
    rooms = [room for room, _, _ in found]
    assert sorted(rooms) == sorted(set(rooms)), "a room has one row"
    assert {room: int(now) for room, _, now in found} == {room: len(names) for room, names in NAMES.items()}
    assert all(int(now) >= int(before) for _, before, now in found), "no claim got weaker"


def test_the_page_has_the_kills_of_the_last_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == drawn(page, kept(RESULTS)), "draw it: python -m tests.mutants --table"


def test_no_mutant_of_the_last_run_survived() -> None:
    assert {room: row.survived + row.untried for room, row in kept(RESULTS).items() if row.survived + row.untried} == {}


def report(name: str, when: str = "call", outcome: str = "passed", words: str = "") -> Any:
    case = f"{OF_CATALOGUE}[{name.replace(' ', '_')}]"
    return SimpleNamespace(
        nodeid=case, when=when, passed=outcome == "passed", skipped=outcome == "skipped", longreprtext=words
    )


def test_a_mutant_is_killed_where_its_test_passed_and_else_says_why_not() -> None:
    killed, survived, broken, skipped, *rest = NAMES["replay"]
    recorder = Recorder(["replay"])
    for one in (
        report(killed), report(killed, "teardown"), report(survived, outcome="failed", words="it survived test_x"),
        report(broken, outcome="failed", words="the mutant does not compile"), report(skipped, "setup", "skipped"),
    ):  # fmt: skip
        recorder.pytest_runtest_logreport(one)
    (room,) = recorder.outcomes().values()
    assert (room.killed, room.survived, room.untried) == (1, (survived,), (broken, skipped, *rest))


def test_only_tests_that_try_a_mutant_count() -> None:
    assert mutant_of(f"{OF_CATALOGUE}[a_name[x]]") == "a_name[x]"
    assert mutant_of(f"{OF_KERNELS[0]}[ptxsim-a_name]") == mutant_of(f"{OF_KERNELS[-1]}[a_name]") == "a_name"
    assert mutant_of("tests/mutants/test_mutants.py::test_the_same_tests_pass_where_nothing_is_wrong") is None
    assert mutant_of("tests/kernels/test_matrix.py::test_the_tests_notice_that[a]") is None


def test_the_tests_of_the_kernels_mutants_are_known_by_the_ids_that_pytest_gives_them() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "--collect-only", *OF_KERNELS],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = {mutant_of(line) for line in listed.stdout.splitlines()} - {None}
    assert found >= {name.replace(" ", "_") for name in NAMES[KERNELS]}


def test_every_module_with_mutants_of_kernels_is_counted() -> None:
    folder = ROOT / "tests" / "kernels"
    found = {path.stem for path in folder.glob("test_*.py") if "\nMUTANTS" in path.read_text(encoding="utf-8")}
    assert found == {module.__name__.rpartition(".")[2] for module in KERNEL_MODULES}


def test_no_two_mutants_of_a_room_have_one_name() -> None:
    assert {room: len(set(names)) for room, names in NAMES.items()} == {room: len(NAMES[room]) for room in NAMES}


def test_a_room_is_run_alone() -> None:
    assert len(files_of(["replay"])) == len(NAMES["replay"])
    assert files_of([KERNELS]) == list(OF_KERNELS)


def test_rooms_are_kept_and_drawn(tmp_path: Any) -> None:
    page = f"a\n{BEGIN}\nold\n{END}\nb"
    assert kept(tmp_path / "none.json") == {}
    assert drawn(page, {}) == f"a\n{BEGIN}\n\n{NO_RUN}\n\n{END}\nb"
    rooms = {"core": Room(3, ("a",), ("b",), "1234567", "2026-01-02")}
    written(tmp_path / "rooms.json", rooms)
    assert kept(tmp_path / "rooms.json") == rooms
    assert "| core | 4 | 3 | 1 | 1234567 |" in drawn(page, rooms)
