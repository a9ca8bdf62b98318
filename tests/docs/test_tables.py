"""A table between marks is what its result file generates.

Where there is no result file, the text says that no run exists.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from bench.report import PAGES, RESULTS, fill
from tests.reliability.running import names
from tests.reliability.table import BEGIN, DOCS, END, kept, markdown, write_between_marks

ROOT = Path(__file__).parents[2]
MARK = re.compile(
    r"<!-- table: (?P<what>.*?) -->(?P<inside>.*?)(?P<end><!-- end(?: of table)? -->|(?=<!-- table:)|\Z)", re.DOTALL
)
WRITTEN = {*PAGES, DOCS}

pytestmark = pytest.mark.checkout


def pages() -> list[Path]:
    """Every Markdown file of the repository."""
    folders = (ROOT, ROOT / "docs", ROOT / "bench", ROOT / "examples", ROOT / "tests", ROOT / ".github")
    found = {page for folder in folders[1:] for page in folder.rglob("*.md")} | set(ROOT.glob("*.md"))
    return sorted(found)


def drawn(text: str, results: Path) -> str:
    """The page with every table as its file generates it."""
    if BEGIN not in text:
        return fill(text, results)
    rows = kept(results / "reliability.json")
    return write_between_marks(text, markdown([rows[name] for name in sorted(rows)]))


def stale(text: str, results: Path = RESULTS) -> list[str]:
    """What is wrong with a page's marked tables."""
    wrong = []
    for mark in MARK.finditer(text):
        what, inside = mark["what"], mark["inside"].strip()
        if f"<!-- table: {what} -->" == BEGIN:
            file, ends = results / "reliability.json", END
        else:
            file, ends = results / what.split()[0], "<!-- end -->"
        if mark["end"] != ends:
            wrong.append(f"{what}: it does not end with {ends}")
        elif not file.exists() and not inside.startswith("No run"):
            wrong.append(f"{what}: there is no {file.name}, and the text does not say that there is no run")
        elif file.exists() and not inside:
            wrong.append(f"{what}: it is empty")
    if wrong:
        return wrong
    if BEGIN in text and not (results / "reliability.json").exists():
        return []
    pairs = zip(MARK.finditer(text), MARK.finditer(drawn(text, results)), strict=True)
    return [f"{old['what']}: it is not what its file generates" for old, new in pairs if old[0] != new[0]]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_marked_table_is_what_its_file_generates(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert stale(text) == [], "draw it: python -m bench.report; python -m tests.reliability --table"
    assert not MARK.search(text) or page in WRITTEN, "no command draws the tables of this page"


def test_the_pages_have_the_tables_that_are_spoken_of() -> None:
    count = {page.name: len(MARK.findall(page.read_text(encoding="utf-8"))) for page in WRITTEN}
    assert count["reliability.md"] == 1
    assert count["benchmarks.md"] > 10
    assert count["policies.md"] > 10


def test_every_row_of_the_table_of_proofs_is_of_a_proof_that_exists() -> None:
    assert set(kept(RESULTS / "reliability.json")) <= set(names())


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RESULTS, tmp_path / "results"))


def emptied(text: str) -> str:
    return MARK.sub(lambda mark: f"<!-- table: {mark['what']} -->\n{mark['end']}", text, count=1)


@pytest.mark.parametrize("page", sorted(WRITTEN), ids=lambda page: page.name)
def test_a_table_that_was_emptied_cut_or_changed_is_noticed(page: Path, results: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert stale(text, results) == []
    first = MARK.search(text)
    assert first is not None
    assert stale(emptied(text), results) == [f"{first['what']}: it is empty"]
    assert "does not end with" in stale(text.replace(first["end"], "", 1), results)[0]
    digit = re.search(r"\d", text[first.start("inside") :])
    assert digit is not None
    at = first.start("inside") + digit.start()
    changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
    assert stale(changed, results) == [f"{first['what']}: it is not what its file generates"]


@pytest.mark.parametrize("page", sorted(WRITTEN), ids=lambda page: page.name)
def test_a_table_whose_file_is_missing_must_say_that_there_is_no_run(page: Path, results: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file in results.glob("*.json"):
        file.unlink()
    assert any("the text does not say that there is no run" in line for line in stale(text, results))
    said = MARK.sub(lambda mark: f"<!-- table: {mark['what']} -->\nNo run yet.\n\n{mark['end']}", text)
    if BEGIN in text:
        assert stale(said, results) == []


def test_a_new_row_that_the_page_does_not_have_is_noticed(results: Path) -> None:
    path = results / "reliability.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps(rows | {"zzz": rows["api"]}))
    assert len(stale(DOCS.read_text(encoding="utf-8"), results)) == 1
