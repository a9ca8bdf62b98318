"""Runs every ``python`` snippet of the README and the docs, in order.

The snippets of a file share one namespace.

A snippet that is not meant to run is fenced as ``text``. ``python`` is the only fence that is executed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.checkout


def snippets(page: Path) -> list[tuple[int, str]]:
    """The line each snippet starts on, and its code."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in FENCE.finditer(text)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if snippets(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_every_snippet_of_a_page_runs_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__snippet__"}
    for line, code in snippets(page):
        # blank lines in front, so that a traceback names the line of the page
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


def test_the_readme_has_snippets_and_no_fence_is_misspelt() -> None:
    assert snippets(ROOT / "README.md"), "the library example of the README is not found"
    for page in PAGES:
        opened = re.findall(r"^```(\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(opened) <= {"python", "bash", "text", "json"}, page
