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
from pagedkv.spec.sizes import Blocks


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


TRACE = load_trace("synthetic:chat:0:60")


def test_columns_are_those_that_say_something() -> None:
    one = replay(TRACE, ["lru"], Blocks(50))
    assert "host %" not in table(one)[0]
    assert "device" not in table(one)[0]
    three = replay(TRACE, ["lru"], [Capacity(5, 10, 20), Capacity(9)])
    assert {"device", "host", "disk", "device %", "host %", "disk %"} <= set(table(three)[0])
    assert all(len(row) == len(table(three)[0]) for row in table(three)[1])


def test_without_a_terminal_the_table_is_plain_text() -> None:
    out = io.StringIO()
    print_table(TRACE, replay(TRACE, ["lru", "min"], Blocks(50)), out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("synthetic:chat:0:60: 60 requests")
    assert lines[2] == "tiers: device 50 blocks (3.12 GiB)"
    assert lines[3] == "128 KiB of KV per token (--bytes-per-token), 64.0 MiB per block"
    assert lines[5].strip("- ") == ""
    assert [line.split()[0] for line in lines[6:]] == ["lru", "min"]


def test_columns_are_left_out_until_a_table_fits() -> None:
    results = replay(TRACE, ["lru", "min"], [Capacity(5, 10, 20), Capacity(9)])
    for width in (200, 110, 100, 90, 80, 70):
        columns, rows = table(results, width)
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        assert sum(widths) + 2 * (len(widths) - 1) <= width
        assert {"policy", "device", "host", "disk", "hit %", "LRU to MIN"} <= set(columns)
    assert table(results, 200) == table(results)


def test_where_lru_is_close_to_min_the_column_between_them_has_points() -> None:
    trace = load_trace("synthetic:chat")
    close = replay(trace, ["lru", "min"], "50%")
    points = 100 * (close[1].hit_blocks["total"] - close[0].hit_blocks["total"]) / trace.num_accesses
    assert 0 < points < 3
    columns, rows = table(close)
    assert [row[columns.index("LRU to MIN")] for row in rows] == ["+0.00 pt", f"{points:+.2f} pt"]
    out = io.StringIO()
    print_table(trace, close, out)
    assert "pt: points of hit rate above LRU" in " ".join(out.getvalue().split())


def test_bounds_that_hit_as_much_as_min_are_told_in_a_line_unless_it_may_be_wide() -> None:
    results = replay(TRACE, ["lru", "infinite", "min", "min-bypass"], "100%")
    narrow, wide = io.StringIO(), io.StringIO()
    print_table(TRACE, results, narrow)
    print_table(TRACE, results, wide, wide=True)
    assert "infinite hits as much as min, min-bypass hits as much as min" in narrow.getvalue()
    assert "\ninfinite  bound" not in narrow.getvalue()
    assert "\ninfinite    bound" in wide.getvalue()
    few = io.StringIO()
    print_table(TRACE, replay(TRACE, ["infinite", "min"], Blocks(9)), few)
    assert "\ninfinite" in few.getvalue()


@pytest.mark.parametrize(("width", "boxed"), [(200, True), (40, False)])
def test_on_a_terminal_rich_draws_a_table_if_it_fits(width: int, boxed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(table_module, "terminal_width", lambda: width)
    out = Terminal()
    print_table(TRACE, replay(TRACE, ["lru"], Blocks(50)), out)
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
    print_table(TRACE, replay(TRACE, ["lru"], Blocks(50)), out)
    assert "┃" not in out.getvalue()


def test_progress_is_a_bar_on_a_terminal_and_silent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    assert isinstance(progress(False), Silent)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert type(progress(None)) is Silent
    monkeypatch.setattr("sys.stderr", Terminal())
    with progress(None) as shown:
        assert isinstance(shown, Bar)
        assert replay(TRACE, ["lru"], Blocks(50), options=Options(), progress=shown)
