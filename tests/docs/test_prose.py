"""The tree is within the bars of tests/prose.py, and its counters count."""

from __future__ import annotations

import re

import pytest

from tests.prose import BARS, ROOT, Counts, banned, clauses, count, files, long_first_lines, scars, vague_words


@pytest.mark.slow
@pytest.mark.parametrize("parts", BARS, ids=lambda parts: parts[0])
def test_prose_is_no_worse_than_it_was(parts):
    found, bars = count(parts), BARS[parts]
    assert all(have <= bar for have, bar in zip(found, bars, strict=True)), f"{found}, bars {bars}: docs/style.md"


def test_vague_words_are_counted_wherever_they_stand():
    assert vague_words("Nobody waits; whoever comes. nobodyness, everybody's") == 3
    assert vague_words("The caller waits.") == 0


def test_long_first_lines_are_counted_and_others_not():
    long, short = "x" * 90, "x" * 89
    assert long_first_lines(f'"""{long}"""\ndef f():\n    """{short}\n\n    {long}\n    """\n') == 1


def test_a_long_first_line_of_cython_is_counted_too():
    assert long_first_lines(f'cdef int f():\n    """{"x" * 90}"""\n    return 1\n', ".pyx") == 1
    assert long_first_lines(f'def f() -> int:\n    """{"x" * 89}"""\n', ".pyi") == 0


@pytest.mark.parametrize(
    "source",
    [
        "# a line that\n# broke\n# goes on\n",
        "# a line that\n# broke.\nx = 1\n",
        "    // a line that\n    // broke\n",
        "/* a line that\n * broke. */\n",
        f'"""First line.\n\n{"a full line " * 5}that\nbroke.\n"""\n',
    ],
)
def test_one_word_left_by_reflowing_is_a_scar(source):
    assert scars(source) == 1


@pytest.mark.parametrize(
    "source",
    [
        "# alone\nx = 1\n",
        "    # a\n    # label:\n    x = 1\n",
        '"""First line.\n\nReturns\n-------\nint\n"""\n',
        f'"""First line.\n\nname\n    {"a full line " * 5}\nother\n"""\n',
        f"{'a full line = ' * 5}1\nelse\n",
    ],
)
def test_a_word_that_stands_alone_on_purpose_is_none(source):
    assert scars(source) == 0


def test_relative_clauses_as_nouns_are_counted():
    assert clauses("Drop what is not worth its loading, and what the tier holds. Say what to do.") == 2


def test_banned_phrases_are_counted_across_lines():
    assert banned("A call that is waited for\n    # no longer. Waited for no longer.") == 2
    assert banned("A call that the mover gives up.") == 0


def test_results_that_pages_quote_are_read_too():
    read = {file.relative_to(ROOT).as_posix() for file in files(("bench",))}
    assert "bench/results/reliability.json" in read


def test_no_page_tells_the_projects_own_history():
    """Decisions may; bench/results and `git log` know which version had what."""
    words = ("figures from before", "before the (?:change|tests)", "used to be", "formerly", "an earlier version")
    words += ("earlier full runs", "(?:run|hour|night|soak|test) had found", "after the fix")
    history = re.compile("|".join(words))
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
    told = {page.name: found for page in pages if (found := history.findall(page.read_text(encoding="utf-8").lower()))}
    assert told == {}


def test_vague_words_are_at_most_ten_in_all():
    assert sum(bars.vague for bars in BARS.values()) <= 10


def test_the_bars_are_counts():
    assert all(isinstance(bars, Counts) for bars in BARS.values())
