"""What the tools print for people: progress, tables, ages."""

from __future__ import annotations

import io
import sys

import pytest

from pagedkv.tools.store import show


class Terminal(io.StringIO):
    """Text that believes to be on a screen."""

    def isatty(self) -> bool:
        return True


def look(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a screen in the place of stderr and return it.

    The test itself calls this, because pytest puts its own in place before that.
    """
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    return screen


def test_progress_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with show.progress("checked", 100) as tick:
        tick(100)
    assert capsys.readouterr() == ("", "")


def test_without_rich_progress_is_lines_with_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = look(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(show, "have_rich", lambda: False)
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    with show.progress("checked", 8 << 20) as tick:
        for seconds in (1.0, 2.0, 3.0, 4.0):
            now[0] = seconds
            tick(2 << 20)
    assert terminal.getvalue() == (
        "checked: 4.00 MiB of 8.00 MiB, 2.00 MiB/s\nchecked: 8.00 MiB of 8.00 MiB, 2.00 MiB/s\n"
    )


def test_with_rich_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = look(monkeypatch)
    pytest.importorskip("rich")
    with show.progress("checked", 100) as tick:
        tick(100)
    assert "checked" in terminal.getvalue()


def test_an_error_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch)
    with pytest.raises(KeyboardInterrupt), show.progress("checked", 100):
        raise KeyboardInterrupt
    with show.progress("again", 100) as tick:  # rich allows one bar at a time
        tick(1)


def test_a_table_is_plain_text_in_a_file() -> None:
    file = io.StringIO()
    show.print_table(["name", "blocks"], [["a", "1"], ["long name", "1,000"]], file)
    assert file.getvalue() == (
        "name       blocks\n"
        "---------  ------\n"
        "a               1\n"
        "long name   1,000\n"
    )  # fmt: skip


def test_a_table_on_a_terminal_is_rich_s_where_it_is_installed_and_holds_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    screen = Terminal()
    show.print_table(["name", "blocks"], [["a", "1,000"]], screen)
    assert "1,000" in screen.getvalue()
    assert "│" in screen.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [
    (-5, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (3661, "1 h 1 min"),
    (86400 * 3 + 3600 * 4 + 60, "3 d 4 h"), (86400 + 59, "1 d"), (86400 * 400, "400 d"),
])  # fmt: skip
def test_an_age_is_its_two_largest_units(seconds: float, text: str) -> None:
    assert show.age(seconds) == text
