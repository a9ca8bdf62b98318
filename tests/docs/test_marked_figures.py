"""Each marked figure in prose equals its source in bench/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.figures import Figure, evaluate, figures, wrong

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = ["README.md", "docs/benchmarks.md"]  # pages that must have marked figures

pytestmark = pytest.mark.checkout

DOCUMENT = {
    "kill": {"count": 1000},
    "rows": [
        {"case": "a", "system": "us", "value": 2.5}, {"case": "a", "system": "them", "value": 10.0},
        {"case": "b", "system": "us", "value": 0.125},
    ],
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_marked_figure_is_that_of_its_result_file(page: Path) -> None:
    problems = [problem for figure in figures(page.read_text(encoding="utf-8")) if (problem := wrong(figure))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", MARKED)
def test_a_page_with_results_marks_figures_and_a_changed_digit_is_noticed(name: str) -> None:
    there = list(figures((ROOT / name).read_text(encoding="utf-8")))
    assert there
    for figure in there:
        for at, digit in enumerate(figure.said):
            if digit.isdigit():
                other = f"{figure.said[:at]}{(int(digit) + 1) % 10}{figure.said[at + 1 :]}"
                assert wrong(Figure(figure.line, other, figure.file, figure.what))


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("kill.count", 1000), ("rows[case=a,system=us].value", 2.5), ("rows[case=b].value * 100", 12.5),
        ("rows[case=a,system=them].value / rows[case=a,system=us].value", 4),
    ],
)  # fmt: skip
def test_a_path_leads_to_one_value(what: str, value: float) -> None:
    assert evaluate(DOCUMENT, what) == value


@pytest.mark.parametrize(
    "what", ["kill.counts", "rows[case=a].value", "rows[case=c].value", "kill.count.more", "[", ""]
)
def test_a_path_that_leads_nowhere_or_to_several_is_refused(what: str) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        evaluate(DOCUMENT, what)


def test_a_mark_needs_a_number_before_it() -> None:
    with pytest.raises(ValueError, match="line 2: no number"):
        list(figures("1,000\nkills <!-- figure: reliability.json kill.count -->"))
