"""BlockTable: every refused call says why and changes nothing, in no row of the batch."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.core import BlockPool, BlockTable
from pagedkv.errors import DoubleRelease, InvalidArgument, OutOfBlocks, StaleHandle, WrongType
from tests.core.helpers import (
    DAMAGED_IDS,
    TOO_LARGE,
    bare,
    filled,
    finish,
    kind,
    nothing_changes,
    single,
    sound,
)


def test_too_few_blocks_change_nothing() -> None:
    table = bare(2)
    rows = [filled(table, [1] * 4), table.open([2] * 5)[0]]
    with nothing_changes((table, rows)):
        with pytest.raises(OutOfBlocks) as raised:
            table.step(rows)
        assert (raised.value.asked, raised.value.free, raised.value.held) == (2, 1, 1)
        assert table.try_step(rows) == 2, "a shortage is a result: what it needs"
        assert table.try_step(rows[:1], lookahead=40) == 10
    table.step(rows, [0, 4])
    sound(table)


def test_all_rows_in_use_is_an_error_that_changes_nothing() -> None:
    table = bare(8, 4, 2)
    rows = [table.open([1])[0] for _ in range(2)]
    with nothing_changes((table, rows)):
        with pytest.raises(InvalidArgument, match="all 2 rows"):
            table.open([1])
        with pytest.raises(InvalidArgument):
            table.fork(rows[0])
    table.release(rows[0])
    assert table.open([1])[0] not in rows


def _row_calls(table: BlockTable) -> list[Any]:
    return [
        lambda row: table.append([row], [1]),
        lambda row: table.try_step([row]),
        lambda row: table.extend(row, [1]),
        lambda row: table.seed(row, 1),
        lambda row: table.blocks_needed([row]),
        lambda row: table.step([row]),
        lambda row: table.commit([row]),
        lambda row: table.truncate(row, 0),
        table.fork,
        lambda row: table.retain(row, 1),
        table.info,
        table.tokens,
        table.blocks,
    ]


@pytest.mark.parametrize("forged", [-1, 1, 99, 2**31, 2**32, 2**63 - 1])
def test_a_row_that_never_existed_changes_nothing(forged: int) -> None:
    table = bare()
    row = filled(table, [1, 2])
    with nothing_changes((table, [row])):
        for call in _row_calls(table):
            with pytest.raises(StaleHandle):
                call(forged)
        with pytest.raises(DoubleRelease):
            table.release(forged)


def test_a_released_row_is_stale_even_when_its_place_is_used_again() -> None:
    table = bare()
    old = filled(table, [1, 2])
    table.release(old)
    new = filled(table, [3])
    assert new % 2**32 == old % 2**32, "the same place, another generation"
    with nothing_changes((table, [new])):
        for call in _row_calls(table):
            with pytest.raises(StaleHandle):
                call(old)
        with pytest.raises(DoubleRelease):
            table.release(old)
        table.cancel([old])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_stale_row_undoes_the_whole_batch(position: int) -> None:
    table = bare()
    rows = [filled(table, [1, 2]), table.open([3])[0], table.open([4])[0]]
    live = rows.copy()
    rows[position] = 999
    with nothing_changes((table, live)):
        for call in (
            lambda: table.append(rows, [1, 2, 3]),
            lambda: table.try_step(rows),
            lambda: table.step(rows),
            lambda: table.commit(rows),
        ):
            with pytest.raises(StaleHandle, match=f"entry {position}"):
                call()


def test_a_row_twice_in_a_batch_undoes_it() -> None:
    table = bare()
    a, b = filled(table, [1, 2]), table.open([3])[0]
    with nothing_changes((table, [a, b])):
        for call in (
            lambda: table.append([a, b, a], [1, 2, 3]),
            lambda: table.try_step([a, b, a]),
            lambda: table.step([a, b, a]),
            lambda: table.blocks_needed([a, b, a]),
        ):
            with pytest.raises(InvalidArgument, match="entry 2"):
                call()


@pytest.mark.parametrize("q_lens", [[3, 0], [-1, 0], [0, 1], [0], [0, 0, 0], [0.0, 0.0], [2**31, 0], [-(2**31), 0]])
def test_lengths_that_do_not_fit_the_rows_change_nothing(q_lens: list[Any]) -> None:
    table = bare()
    rows = [table.open([1, 2])[0], filled(table, [3])]
    with nothing_changes((table, rows)):
        for call in (table.step, table.blocks_needed):
            with pytest.raises((InvalidArgument, WrongType)):
                call(rows, q_lens)


@pytest.mark.parametrize("tokens", [*DAMAGED_IDS, *TOO_LARGE], ids=kind)
def test_tokens_of_another_type_change_nothing(tokens: Any) -> None:
    table = bare()
    row = filled(table, [1, 2])
    with nothing_changes((table, [row])):
        for call in (
            table.open,
            lambda bad: table.extend(row, bad),
            lambda bad: table.append([row], bad),
            lambda bad: table.try_step([row], bad if bad is not None else [0.0]),
            lambda bad: table.step([row], bad if bad is not None else [0.0]),
        ):
            with pytest.raises((WrongType, InvalidArgument)):
                call(tokens)


@pytest.mark.parametrize("rows", DAMAGED_IDS, ids=kind)
def test_rows_of_another_type_change_nothing(rows: Any) -> None:
    table = bare()
    row = filled(table, [1, 2])
    with nothing_changes((table, [row])):
        for call in (table.step, table.commit, table.cancel, table.blocks_needed, lambda bad: table.append(bad, [1])):
            with pytest.raises((WrongType, InvalidArgument)):
                call(rows)


@pytest.mark.parametrize("lookahead", [-1, 2**21, 1.0, None, "1"])
def test_an_impossible_lookahead_changes_nothing(lookahead: Any) -> None:
    table = bare()
    row = filled(table, [1])
    with nothing_changes((table, [row])):
        for call in (
            lambda: table.step([row], None, lookahead),
            lambda: table.blocks_needed([row], None, lookahead),
            lambda: table.try_step([row], None, lookahead),
        ):
            with pytest.raises((InvalidArgument, WrongType)):
                call()


@pytest.mark.parametrize("leave", [-1, 2**31, 1.5, None])
def test_an_impossible_number_of_tokens_to_leave_is_refused(leave: Any) -> None:
    table = bare()
    with nothing_changes((table, [])), pytest.raises((InvalidArgument, WrongType)):
        table.open([1], leave=leave)


def test_a_table_of_an_impossible_shape_is_refused() -> None:
    _, _, placement = single(4)
    for wrong in (None, 5, "pool", [BlockPool(1)]):
        with pytest.raises(WrongType):
            BlockTable(wrong)  # type: ignore[arg-type]
    for rows in (0, -1, 2**25, 1.0):
        with pytest.raises((InvalidArgument, WrongType)):
            BlockTable(BlockPool(1), rows)  # type: ignore[arg-type]
    for size in (0, 257, -1, 2.0):
        with pytest.raises((InvalidArgument, WrongType)):
            BlockTable(BlockPool(1), 4, block_size=size)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        BlockTable(placement, 4, block_size=8)
    assert repr(BlockTable(placement, 4)) == "<BlockTable 0 of 4 rows, block size 4>"


def test_a_table_keeps_its_pool_and_placement_alive() -> None:
    tree, pool, placement = single(4, 8)
    table = BlockTable(placement, 4)
    del tree, pool, placement
    row = filled(table, list(range(8)))
    assert table.placement.match(list(range(8)))[1].tolist() == table.blocks(row).tolist()
    assert table.block_pool is table.placement.pools[0]
    finish(table.placement)
    sound(table)
