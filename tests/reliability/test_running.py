"""The runner of the proofs, on tiny proofs.

It tells what they found, and nothing that is wrong passes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.reliability import table
from tests.reliability.__main__ import main
from tests.reliability.running import Task, run_all

FAKE = """
import os
from tests.reliability.proof import Proof, Tally

def run(count, seed, tick):
    tally = Tally()
    for case in range(count):
        {body}
        tally.count += 1
        tally.hits += 2
        tick(1)
    tally.add("seeds", seed)
    return tally

PROOF = Proof("what {name} claims", "cases", quick=3, full=5, run=run)
"""
BODIES = {
    "good": "pass",
    "wrong": "case == 2 and tally.fail(f'case {case} of seed {seed}')",
    "raises": "assert case < 1, 'too far'",
    "dies": "case == 2 and os._exit(9)",
    "lazy": "count = case; break",
    "honest": "tally.skipped = ('no root here',); break",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of fake proofs, one for each body."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name, body in BODIES.items():
        (folder / f"{name}.py").write_text(FAKE.format(name=name, body=body))
    monkeypatch.syspath_prepend(tmp_path)
    return "fakes"


def test_a_proof_is_only_what_ran_to_its_end_without_a_wrong_case(package: str) -> None:
    results = run_all([Task(name, 4, 7, package) for name in BODIES], 2, lambda task, n: None)
    problems = {result.task.name: result.problem for result in results}
    assert problems == {
        "good": "",
        "honest": "",
        "wrong": "1 wrong, first case 2 of seed 7",
        "raises": "1 wrong, first AssertionError: too far",
        "dies": "1 wrong, first its process ended with exit code 9",
        "lazy": "only 0 of 4 cases, and nothing says why",
    }


def test_the_command_fails_where_anything_is_wrong(package: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--package", package, "--only", "good,honest"]) == 0
    assert main(["--package", package, "--only", "good,wrong", "--jobs", "2"]) == 1
    assert "WRONG wrong: 1 wrong, first case 2 of seed 1" in capfd.readouterr().err
    assert main(["--package", package, "--only", "unknown"]) == 2
    assert "there are dies, good, honest" in capfd.readouterr().err


def test_rows_are_merged_into_the_file_proof_by_proof(package: str, tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.json"
    assert main(["--package", package, "--only", "good", "--json", str(path)]) == 0
    assert main(["--package", package, "--only", "honest", "--json", str(path)]) == 0
    assert main(["--package", package, "--only", "good", "--full", "--seed", "4", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert list(rows) == ["good", "honest"]
    assert (rows["good"]["count"], rows["good"]["hits"], rows["good"]["found"]) == (5, 10, {"seeds": 4})
    assert rows["good"]["command"] == "python -m tests.reliability --only good --full --seed 4"
    assert rows["good"]["machine"]
    assert rows["honest"]["skipped"] == ["no root here"]


def test_the_table_of_the_docs_is_written_between_its_marks(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, docs = tmp_path / "rows.json", tmp_path / "docs.md"
    docs.write_text(f"before\n\n{table.BEGIN}\nold\n{table.END}\n\nafter\n")
    monkeypatch.setattr("tests.reliability.__main__.DOCS", docs)
    assert main(["--package", package, "--only", "good,honest", "--count", "7", "--json", str(path)]) == 0
    assert main(["--table", "--json", str(path)]) == 0
    text = docs.read_text()
    assert text.startswith(f"before\n\n{table.BEGIN}\n| claim | cases |")
    assert "| what good claims | 7 cases | 14 | 0 | seeds 1 |" in text
    assert "| what honest claims | 0 cases |  | 0 | seeds 1; not done: no root here |" in text
    assert "old" not in text
    assert text.endswith(f"{table.END}\n\nafter\n")
    with pytest.raises(ValueError, match="once each"):
        table.write_between_marks("no marks", table.markdown(list(table.kept(path).values())))


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_table_is_not_emptied_for_lack_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], content: str | None
) -> None:
    path, docs = tmp_path / "rows.json", tmp_path / "docs.md"
    docs.write_text(page := f"{table.BEGIN}\nold\n{table.END}\n")
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr("tests.reliability.__main__.DOCS", docs)
    assert main(["--table", "--json", str(path)]) == 2
    assert "has no rows for the table" in capfd.readouterr().err
    assert docs.read_text() == page
    for nothing in ("", table.markdown([])):
        with pytest.raises(ValueError, match="without rows"):
            table.write_between_marks(page, nothing)
