"""The table for people.

Plain without rich or a terminal, rich's on a terminal wide enough for it.
"""

from __future__ import annotations

import io

import pytest

from pagedkv.lab.replay import Capacity, Options, load_trace, replay
from pagedkv.lab.replay import progress as progress_module
from pagedkv.lab.replay import table as table_module
from pagedkv.lab.replay.progress import Bar, Lines, Silent, progress
from pagedkv.lab.replay.table import print_table, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


TRACE = load_trace("synthetic:chat:0:60")


def test_columns_are_those_that_say_something() -> None:
    one = replay(TRACE, ["lru"], 50)
    assert "host %" not in table(one)[0]
    assert "device" not in table(one)[0]
    three = replay(TRACE, ["lru"], [Capacity(5, 10, 20), Capacity(9)])
    assert {"device", "host", "disk", "device %", "host %", "disk %"} <= set(table(three)[0])
    assert all(len(row) == len(table(three)[0]) for row in table(three)[1])


def test_without_a_terminal_the_table_is_plain_text() -> None:
    out = io.StringIO()
    print_table(TRACE, replay(TRACE, ["lru", "min"], 50), out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("synthetic:chat:0:60: 60 requests")
    assert lines[2].strip("- ") == ""
    assert [line.split()[0] for line in lines[3:]] == ["lru", "min"]


@pytest.mark.parametrize(("width", "boxed"), [(200, True), (40, False)])
def test_on_a_terminal_rich_draws_a_table_if_it_fits(width: int, boxed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(table_module, "terminal_width", lambda: width)
    out = Terminal()
    print_table(TRACE, replay(TRACE, ["lru"], 50), out)
    assert ("┃" in out.getvalue()) is boxed
    assert "…" not in out.getvalue()


def test_without_rich_a_terminal_gets_the_plain_table_and_plain_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module, "have_rich", lambda: False)
    monkeypatch.setattr(table_module, "have_rich", lambda: False)
    monkeypatch.setattr("sys.stderr", Terminal())
    assert isinstance(progress(None), Lines)
    out = Terminal()
    print_table(TRACE, replay(TRACE, ["lru"], 50), out)
    assert "┃" not in out.getvalue()


def test_progress_is_a_bar_on_a_terminal_and_silent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    assert isinstance(progress(False), Silent)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert type(progress(None)) is Silent
    monkeypatch.setattr("sys.stderr", Terminal())
    with progress(None) as shown:
        assert isinstance(shown, Bar)
        assert replay(TRACE, ["lru"], 50, options=Options(), progress=shown)
