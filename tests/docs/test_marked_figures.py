"""Each marked figure in prose equals its source in bench/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.figures import Figure, bare, evaluate, figures, wrong

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = [f"{page}.md" for page in ("README", "docs/benchmarks", "docs/policies", "docs/simulation")]
SOURCED = [  # pages whose measured figures need a source; of the decisions, the one that follows a result file
    *(page for page in PAGES if page.parent.name != "decisions"),
    ROOT / "docs" / "decisions" / "0015-one-call-per-trip.md",
]
NOT_MEASURED = {  # settings, bars, shares of a trace, targets, bounds, an earlier run; 1.1 % is from the named test
    "docs/compare_policies.md": {"5%", "20 ms"},
    "docs/benchmarks.md": {
        *("3 us", "8 us", "10 us", "15 us", "1.3 times", "2 %", "5 %", "5x", "6x", "8x", "2x", "1x", "1.4x"),
        *("45.7 us", "7.8 us", "8.2 us", "8.6 times", "11.4 times"),
    },
    "docs/decisions/0015-one-call-per-trip.md": {"2.5 times"},
    "docs/disk.md": {"1.7 MB/s", "4 times"},
    "docs/observability.md": {"10 us"},
    "docs/events.md": {"0", "10,000", "100,000"},
    "docs/policies.md": {"10 %", "5 %", "0.5 %", "20 ms", "100 ns", "16 times", "1.1 %"},
    "docs/remote.md": {"65,536", "4"},
    "docs/replay.md": {"20 ms", "1 %", "4 %", "10 %", "0 %", "3 points", "0.1 points"},
}

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


@pytest.mark.parametrize("page", SOURCED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_measured_figure_in_prose_has_a_source(page: Path) -> None:
    allowed = NOT_MEASURED.get(page.relative_to(ROOT).as_posix(), set())
    assert bare(page.read_text(encoding="utf-8"), allowed) == [], "mark it (tests/docs/figures.py)"


def test_every_allowed_figure_is_in_its_page() -> None:
    assert all((ROOT / name).exists() for name in NOT_MEASURED)
    unused = {
        name: figures - set(bare((ROOT / name).read_text(encoding="utf-8"))) for name, figures in NOT_MEASURED.items()
    }
    assert unused == {name: set() for name in NOT_MEASURED}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 12.5 us, 3 % more.", ["12.5 us", "3 %"]),
        ("It takes 12.5<!-- figure: core.json a.b --> us, twice as fast as 2x.", ["2x"]),
        ("```\n3 ms\n```\n`a` 4x", ["4x"]),
        ("<!-- table: core.json rows -->\n3 ms\n<!-- end -->\n", []),
        ("3 ms\n\n## A\n\n4 ms\n\n## B\n\n<!-- figures: by hand -->\n\n5 ms", ["3 ms", "4 ms"]),
        ("<!-- figures: computed -->\n\n## A\n\n4 ms", []),
        ("| a | b |\n|---|---:|\n| x | 12.5 | 1,000 |\n", ["12.5", "1,000"]),
        ("| x | 12.5<!-- figure: core.json a.b --> | 3 rows | 4 ms |", ["4 ms"]),
        ("<!-- counts: a test -->\n| x | 12.5 |\n<!-- end of counts -->", []),
        ("256 sequences, block 5 of 16, sha-3 x, 20 times", ["20 times"]),
    ],
)
def test_a_measured_figure_without_a_source_is_found(text: str, found: list[str]) -> None:
    assert bare(text) == found
    assert bare(text, set(found)) == []


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
        ("rows[case=a,system=them].value / rows[case=a,system=us].value", 4), ("min rows[case=a].value", 2.5),
        ("max rows[system=us].value * 2", 5), ("count rows[case=a].value >= 3", 1), ("rows[case!=a].value", 0.125),
        ("max rows[system=t*].value", 10),
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
