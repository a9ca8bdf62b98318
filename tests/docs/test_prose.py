"""The tree is within the bars of tests/prose.py, and its counters count."""

from __future__ import annotations

import pytest

from tests.prose import BARS, Counts, count, long_first_lines, scars, vague_words


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


def test_one_word_between_comment_lines_is_a_scar():
    assert scars("# a line that\n# broke\n# goes on\n") == 1
    assert scars("# alone\nx = 1\n") == 0
    assert scars("    # a\n    # label:\n    x = 1\n") == 0


def test_the_bars_are_counts():
    assert all(isinstance(bars, Counts) for bars in BARS.values())
