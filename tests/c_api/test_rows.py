"""Rows and steps through ``pagedkv.h``: each call works, and a refused one changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv import c_api
from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree
from pagedkv.errors import StaleHandle
from tests.c_api.native import (
    ARGUMENT,
    BAD,
    BLOCKS,
    DUPLICATE,
    NIL,
    OK,
    RANGE,
    ROOM,
    ROWS,
    STALE,
    STATE,
    Arrays,
    call,
    out,
    rows_of,
    tokens_of,
)
from tests.core.helpers import bare, below, cache, filled, nothing_changes, single, sound, struct_of


def table(num_blocks: int = 32, max_rows: int = 8, block_size: int = 4) -> BlockTable:
    return BlockTable(single(block_size, num_blocks)[2], max_rows)


def opened(rows: BlockTable, tokens: Any, leave: int = 1, owner: int = NIL, ns: int = 0) -> tuple[int, int]:
    row, cached, given = out(), out(), tokens_of(tokens)
    assert call("table_open", rows, ns, given, len(given), leave, owner, row, cached) == OK
    return int(row[0]), int(cached[0])


def stepped(
    rows: BlockTable, batch: Any, q_lens: Any = None, lookahead: int = 0, arrays: Arrays | None = None
) -> Arrays:
    arrays = arrays or Arrays(len(batch), 16, 64, 8)
    lens = None if q_lens is None else tokens_of(q_lens)
    assert call("table_step", rows, rows_of(batch), len(batch), lens, lookahead, arrays.struct, None) == OK
    return arrays


def committed(rows: BlockTable, batch: Any, number: int = 0) -> int:
    taken = out()
    assert call("table_commit", rows, rows_of(batch), len(batch), number, taken, None) == OK
    return int(taken[0])


def test_a_row_is_opened_stepped_and_committed_and_another_one_hits_it() -> None:
    rows = table()
    row, cached = opened(rows, range(10))
    assert cached == 0
    arrays = stepped(rows, [row])
    assert (arrays.num_tokens, arrays.width, arrays.num_new_blocks, arrays.num_copies) == (10, 3, 3, 0)
    assert (arrays.seq_lens[0], arrays.q_indptr.tolist()) == (10, [0, 10])
    blocks = arrays.tables.ravel()[:3].astype(np.int64)
    assert arrays.tables.ravel()[:3].tolist() == rows.blocks(row).tolist()
    assert arrays.tokens[:10].tolist() == arrays.positions[:10].tolist() == list(range(10))
    assert arrays.slots[:10].tolist() == [int(blocks[i // 4]) * 4 + i % 4 for i in range(10)]
    assert committed(rows, [row], arrays.number) == 2
    assert opened(rows, range(10))[1] == 8
    assert opened(rows, range(8))[1] == 4, "one token is left to compute"
    assert opened(rows, range(8), leave=0)[1] == 8
    sound(rows)


def test_a_step_has_the_callers_stride() -> None:
    rows = table()
    batch = [opened(rows, range(i, i + 5))[0] for i in (0, 100)]
    arrays = stepped(rows, batch, arrays=Arrays(2, 8, 10, stride=8))
    assert arrays.width == 2
    assert (arrays.tables[:, 2:] == NIL).all()
    assert arrays.tables[:, :2].tolist() == [rows.blocks(row).tolist() for row in batch]


def test_a_step_without_room_says_what_it_needs_and_changes_nothing() -> None:
    rows = table()
    batch = [opened(rows, range(6))[0], opened(rows, range(50, 53))[0]]
    for arrays in (
        *(Arrays(2, 1, 9), Arrays(2, 2, 8), Arrays(2, 0, 0), Arrays(2, 2, 9, stride=1), Arrays(2, 2, 9, stride=3)),
    ):
        with nothing_changes((rows, batch)):
            assert call("table_step", rows, rows_of(batch), 2, None, 0, arrays.struct, None) == ROOM
            assert (arrays.width, arrays.num_tokens, arrays.num_copies, arrays.num_new_blocks) == (2, 9, 0, 3)
    stepped(rows, batch, arrays=Arrays(2, 2, 9))
    sound(rows)


def test_copies_without_room_are_refused_and_then_listed() -> None:
    rows = table()
    row, _ = opened(rows, range(6))
    stepped(rows, [row])
    committed(rows, [row])
    forks = out(size=2)
    assert call("table_fork", rows, row, 2, forks) == OK
    batch = [row, *forks.tolist()]
    assert call("table_append", rows, rows_of(batch), tokens_of([7, 8, 9]), 3, None) == OK
    few = Arrays(3, 4, 8, 1)
    with nothing_changes((rows, batch)):
        assert call("table_step", rows, rows_of(batch), 3, None, 0, few.struct, None) == ROOM
        assert few.num_copies == 3
    arrays = stepped(rows, batch)
    sources, targets = arrays.copies[:3].T.tolist()
    assert len(set(sources)) == 1
    assert targets == [rows.blocks(each)[1] for each in batch]
    assert len({*sources, *targets}) == 4
    assert call("table_copies_done", rows, arrays.copies, 3) == OK
    assert rows.block_pool.refs(sources).tolist() == [0] * 3
    committed(rows, batch, arrays.number)
    sound(rows)


def test_all_copies_are_ended_at_once() -> None:
    rows = table()
    row = filled(rows, list(range(6)))
    (fork,) = rows.fork(row).tolist()
    rows.append([row, fork], [1, 2])
    stepped(rows, [row, fork])
    held = rows.block_pool.counts()["live"]
    assert call("table_copies_done", rows, None, 0) == OK
    committed(rows, [row, fork])
    for each in (row, fork):
        rows.release(each)
    assert held
    assert rows.block_pool.counts()["live"] == 0
    sound(rows)


def test_a_row_takes_an_owner_over() -> None:
    placement = below((8, 8))
    rows = BlockTable(placement, 4)
    owner, *_ = placement.acquire([1, 2, 3, 4])
    row, cached, tokens = out(), out(), tokens_of([1, 2, 3, 4, 5])
    with nothing_changes((rows, [])):
        assert call("table_open", rows, 0, tokens, 5, 1, owner, row, cached) == STATE, "it is below the device"
    placement.promote(owner)
    moves = placement.take_moves()
    placement.complete(moves["transfer"], [True] * len(moves))
    with nothing_changes((rows, [])):
        assert call("table_open", rows, 0, tokens_of([9, 9, 9, 9, 9]), 5, 1, owner, row, cached) == STATE
    assert call("table_open", rows, 0, tokens, 5, 1, owner, row, cached) == OK
    assert cached[0] == 4
    assert call("table_open", rows, 0, tokens, 5, 1, owner, row, cached) == STALE
    with pytest.raises(StaleHandle):
        placement.settle(owner)
    sound(rows)


def test_tokens_are_appended_and_extended_and_cut() -> None:
    rows = table()
    row, _ = opened(rows, range(6))
    stepped(rows, [row])
    committed(rows, [row])
    assert call("table_extend", rows, row, tokens_of([6, 7, 8]), 3) == OK
    assert call("table_append", rows, rows_of([row]), tokens_of([9]), 1, None) == OK
    needed = out()
    assert call("table_blocks_needed", rows, rows_of([row]), 1, None, 0, needed, None) == OK
    assert needed[0] == rows.blocks_needed([row]) == 1
    assert call("table_truncate", rows, row, 3) == OK
    state, tokens, num = np.zeros(1, c_api.struct("pagedkv_row")), out(np.int32, 8), out()
    assert call("table_row", rows, row, state) == OK
    assert state[0].tolist() == tuple(rows.info(row)) == (3, 0, 0, 0)
    assert call("table_tokens", rows, row, tokens, 8, num) == OK
    assert (num[0], tokens[:3].tolist()) == (3, [0, 1, 2])
    assert call("table_blocks", rows, row, tokens, 8, num) == OK
    assert num[0] == 0
    assert call("table_release", rows, row, 0) == OK
    assert rows.num_rows == 0
    sound(rows)


def test_a_remainder_is_kept_where_it_is_asked_for() -> None:
    for keep, cached in ((0, 1), (1, 2)):
        rows = table()
        row, _ = opened(rows, range(6))
        stepped(rows, [row])
        committed(rows, [row])
        assert call("table_release", rows, row, keep) == OK
        assert rows.block_pool.counts()["cached"] == cached
        sound(rows)


def test_a_step_that_is_over_is_not_committed_and_cancels_no_other_one() -> None:
    rows, taken, bad = table(), out(), out(np.int32)
    batch = [opened(rows, range(6))[0], opened(rows, range(20, 26))[0]]
    first = stepped(rows, batch)
    second = stepped(rows, batch[1:])
    with nothing_changes((rows, batch)):
        assert call("table_commit", rows, rows_of(batch), 2, first.number, taken, bad) == STALE
        assert bad[0] == 1
    assert call("table_cancel", rows, rows_of(batch), 2, first.number) == OK
    assert committed(rows, batch[1:], second.number) == 1
    with nothing_changes((rows, batch)):
        assert call("table_commit", rows, rows_of(batch[:1]), 1, first.number, taken, bad) == STALE
    third = stepped(rows, batch[:1])
    assert call("table_cancel", rows, rows_of(batch[:1]), 1, 0) == OK
    assert call("table_commit", rows, rows_of(batch[:1]), 1, third.number, taken, bad) == STALE


def test_a_refused_call_on_rows_changes_nothing_and_names_the_entry() -> None:
    rows, bad, taken = table(), out(np.int32), out()
    row, other = opened(rows, range(6))[0], opened(rows, range(50, 55))[0]
    gone, _ = opened(rows, [1])
    rows.release(gone)
    arrays, state, num = Arrays(3, 8, 32, 4), np.zeros(1, c_api.struct("pagedkv_row")), out()
    new, forks, tokens = out(), out(size=9), tokens_of(range(9))
    with nothing_changes((rows, [row, other])):
        for wrong, code, entry in (([row, gone], STALE, 1), ([row, other, row], DUPLICATE, 2), ([-1], STALE, 0)):
            batch = rows_of(wrong)
            n = len(batch)
            assert call("table_append", rows, batch, tokens, n, bad) == code
            assert bad[0] == entry
            bad[0] = BAD
            assert call("table_step", rows, batch, n, None, 0, arrays.struct, bad) == code
            assert bad[0] == entry
            bad[0] = BAD
            assert call("table_blocks_needed", rows, batch, n, None, 0, num, bad) == code
            assert bad[0] == entry
            if code == STALE:
                assert call("table_commit", rows, batch, n, 0, taken, bad) == code
                assert bad[0] == entry
        both = rows_of([row, other])
        for lens in ([6, 6], [0, -1]):
            assert call("table_step", rows, both, 2, tokens_of(lens), 0, arrays.struct, bad) == RANGE
            assert bad[0] == 1
            assert call("table_blocks_needed", rows, both, 2, tokens_of(lens), 0, num, bad) == RANGE
        for stale in (gone, -1, 99, 2**62):
            assert call("table_extend", rows, stale, tokens, 1) == STALE
            assert call("table_fork", rows, stale, 1, forks) == STALE
            assert call("table_truncate", rows, stale, 0) == STALE
            assert call("table_release", rows, stale, 0) == STALE
            assert call("table_row", rows, stale, state) == STALE
            assert call("table_tokens", rows, stale, tokens, 9, num) == STALE
            assert call("table_blocks", rows, stale, tokens, 9, num) == STALE
        assert call("table_truncate", rows, row, 7) == RANGE
        assert call("table_fork", rows, row, 7, forks) == ROWS
        assert call("table_tokens", rows, row, tokens, 5, num) == ROOM
        assert num[0] == 6
        assert call("table_open", rows, 12345, tokens, 9, 1, NIL, new, num) == RANGE
        assert call("table_open", rows, 0, tokens, 9, 1, 12345, new, num) == STALE
    stepped(rows, [row])
    with nothing_changes((rows, [row])):
        assert call("table_fork", rows, row, 1, forks) == STATE
        assert call("table_blocks", rows, row, tokens, 1, num) == ROOM
        assert num[0] == 2


def test_a_full_table_and_a_full_pool_are_told_apart() -> None:
    rows, new, num = table(2, 2), out(), out()
    batch = [opened(rows, range(10 * i, 10 * i + 6))[0] for i in range(2)]
    arrays = Arrays(2, 8, 16)
    with nothing_changes((rows, batch)):
        assert call("table_open", rows, 0, tokens_of([1]), 1, 1, NIL, new, num) == ROWS
        assert call("table_step", rows, rows_of(batch), 2, None, 0, arrays.struct, None) == BLOCKS
        assert arrays.num_new_blocks == 4
    stepped(rows, batch[:1])
    committed(rows, batch[:1])
    rows.release(batch[0])
    stepped(rows, batch[1:])  # over one tier it evicts by itself
    sound(rows)


def test_a_shared_block_at_its_limit_is_not_forked() -> None:
    rows, forks = table(), out(size=2)
    row = filled(rows, list(range(6)))
    block = int(rows.blocks(row)[1])
    struct_of(rows.block_pool).refs[block] = 2**31 - 2
    assert call("table_fork", rows, row, 2, forks) == -5
    struct_of(rows.block_pool).refs[block] = 1
    assert rows.num_rows == 1
    sound(rows)


def test_rows_that_follow_others_in_python_are_committed_with_their_leaders() -> None:
    rows, taken = table(), out()
    leader, follower = rows.open(range(9))[0], rows.open(range(9))[0]
    step = rows.step([leader, follower], follow=[(1, 0, 2)])
    with nothing_changes((rows, [leader, follower])):
        assert call("table_commit", rows, rows_of([follower]), 1, step.number, taken, None) == STATE
        twice = rows_of([leader, leader])
        assert call("table_commit", rows, twice, 2, step.number, taken, None) == DUPLICATE
    assert committed(rows, [leader, follower], step.number) == 4
    sound(rows)


def test_arguments_of_rows_that_are_never_allowed_change_nothing() -> None:
    rows = table()
    row, _ = opened(rows, range(6))
    batch, tokens, num, new = rows_of([row]), tokens_of(range(9)), out(), out()
    wrong: list[tuple[Any, ...]] = [
        ("table_open", rows, 0, None, 1, 1, NIL, new, num),
        ("table_open", rows, 0, tokens, -1, 1, NIL, new, num),
        ("table_open", rows, 0, tokens, 2**30 + 1, 1, NIL, new, num),
        ("table_open", rows, 0, tokens, 9, -1, NIL, new, num),
        ("table_open", rows, 0, tokens, 9, 1, -2, new, num),
        ("table_open", rows, 0, tokens, 9, 1, NIL, None, num),
        ("table_open", rows, 0, tokens, 9, 1, NIL, new, None),
        ("table_append", rows, None, tokens, 1, None),
        ("table_append", rows, batch, None, 1, None),
        ("table_append", rows, batch, tokens, -1, None),
        ("table_extend", rows, row, None, 1),
        ("table_extend", rows, row, tokens, -1),
        ("table_blocks_needed", rows, None, 1, None, 0, num, None),
        ("table_blocks_needed", rows, batch, -1, None, 0, num, None),
        ("table_blocks_needed", rows, batch, 1, None, -1, num, None),
        ("table_blocks_needed", rows, batch, 1, None, 2**20 + 1, num, None),
        ("table_blocks_needed", rows, batch, 1, None, 0, None, None),
        ("table_copies_done", rows, None, 1),
        ("table_copies_done", rows, tokens, -1),
        ("table_commit", rows, None, 1, 0, num, None),
        ("table_commit", rows, batch, -1, 0, num, None),
        ("table_commit", rows, batch, 1, -1, num, None),
        ("table_commit", rows, batch, 1, 0, None, None),
        ("table_cancel", rows, None, 1, 0),
        ("table_cancel", rows, batch, -1, 0),
        ("table_cancel", rows, batch, 1, -1),
        ("table_fork", rows, row, 1, None),
        ("table_fork", rows, row, -1, num),
        ("table_truncate", rows, row, -1),
        ("table_row", rows, row, None),
        ("table_tokens", rows, row, None, 9, num),
        ("table_tokens", rows, row, tokens, -1, num),
        ("table_tokens", rows, row, tokens, 9, None),
        ("table_blocks", rows, row, None, 9, num),
        ("table_blocks", rows, row, tokens, -1, num),
        ("table_blocks", rows, row, tokens, 9, None),
    ]
    with nothing_changes((rows, [row])):
        for name, *arguments in wrong:
            assert call(name, *arguments) == ARGUMENT, (name, arguments)
            assert call(name, 0, *arguments[1:]) == ARGUMENT, name
        assert call("table_release", 0, row, 0) == ARGUMENT
        assert call("table_step", rows, batch, 1, None, 0, None, None) == ARGUMENT
        assert call("table_step", rows, None, 1, None, 0, Arrays(1, 4, 8).struct, None) == ARGUMENT
        assert call("table_step", rows, batch, -1, None, 0, Arrays(1, 4, 8).struct, None) == ARGUMENT
        assert call("table_step", rows, batch, 1, None, -1, Arrays(1, 4, 8).struct, None) == ARGUMENT
        assert call("table_step", 0, batch, 1, None, 0, Arrays(1, 4, 8).struct, None) == ARGUMENT
        for field in ("block_tables", "seq_lens", "q_indptr", "positions", "tokens", "slot_mapping", "copies"):
            arrays = Arrays(1, 4, 8, 1)
            arrays.struct[field] = 0
            assert call("table_step", rows, batch, 1, None, 0, arrays.struct, None) == ARGUMENT, field
        for field in ("tables_room", "stride", "tokens_room", "copies_room"):
            arrays = Arrays(1, 4, 8, 1)
            arrays.struct[field] = -1
            assert call("table_step", rows, batch, 1, None, 0, arrays.struct, None) == ARGUMENT, field


def test_a_batch_of_no_rows_is_a_step() -> None:
    rows, arrays = table(), Arrays(0, 0, 0)
    assert call("table_step", rows, None, 0, None, 0, arrays.struct, None) == OK
    assert (arrays.q_indptr.tolist(), arrays.num_tokens) == ([0], 0)
    assert call("table_append", rows, None, None, 0, None) == OK
    assert committed(rows, []) == 0


def test_a_table_is_made_and_deleted_without_python() -> None:
    _, _, placement = single(4, 16)
    handle, new, cached = out(), out(), out()
    assert call("table_new", placement, 4, handle) == OK
    rows = int(handle[0])
    assert call("table_open", rows, 0, tokens_of([1, 2]), 2, 1, NIL, new, cached) == OK
    assert call("table_release", rows, int(new[0]), 0) == OK
    c_api.function("table_delete")(rows)
    c_api.function("table_delete")(0)
    for wrong in (0, -1, 2**24 + 1):
        assert call("table_new", placement, wrong, handle) == ARGUMENT
    assert call("table_new", 0, 4, handle) == ARGUMENT
    assert call("table_new", placement, 4, None) == ARGUMENT
    sound(placement)


def test_a_table_of_python_is_the_same_one_also_over_a_bare_pool() -> None:
    handle = out()
    rows = bare()
    assert call("table_of", id(rows), handle) == OK
    row, cached = opened(rows, range(5))
    assert cached == 0
    stepped(rows, [row])
    assert committed(rows, [row]) == 0
    assert opened(rows, range(5))[1] == 0
    new, tokens = out(), tokens_of(range(5))
    with nothing_changes((rows, [row])):
        assert call("table_open", rows, 1, tokens, 5, 1, NIL, new, out()) == RANGE
        assert call("table_open", rows, 0, tokens, 5, 1, 0, new, out()) == STALE
    c_api.function("table_delete")(int(handle[0]))
    assert call("table_of", id(rows.block_pool), handle) == ARGUMENT
    assert call("table_of", 0, handle) == ARGUMENT
    assert call("table_of", id(rows), None) == ARGUMENT
    sound(rows)


def test_objects_with_groups_of_layers_are_refused() -> None:
    from pagedkv.core import ExtentPool

    pools = ExtentPool(8, (2, 2)).pools
    placement = Placement(RadixTree(4), [pools[0]], groups=[(pools[1], 2, 0)])
    rows, handle = BlockTable(placement, 2), out()
    assert call("placement_of", id(placement), handle) == -13
    assert call("table_of", id(rows), handle) == -13
    assert BlockPool(1).num_free == 1


def test_a_cut_row_gives_up_a_committed_block() -> None:
    rows = table()
    cache(rows.placement, list(range(8)))
    row, cached = opened(rows, range(9))
    assert cached == 8
    assert call("table_truncate", rows, row, 6) == OK
    assert rows.info(row) == (6, 4, 1, 1)
    sound(rows)
