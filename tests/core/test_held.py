"""Owners and rows as objects.

What a holder holds is released when it dies, whatever raised in between.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv._core.held import fork_row, open_row, own, own_partial
from pagedkv.core import BlockTable
from pagedkv.errors import InvalidArgument, StaleHandle
from tests.core.helpers import cache, single, sound, tiered


def owners(placement: object) -> int:
    return placement.stats()["owners"]  # type: ignore[attr-defined, no-any-return]


def test_an_owner_whose_holder_dies_is_released() -> None:
    _, _, placement = tiered(1, (8,))
    cache(placement, [1, 2, 3])
    hold = own(placement, [1, 2, 3, 4])
    assert (hold.num_blocks, owners(placement)) == (3, 1)
    del hold
    assert owners(placement) == 0
    sound(placement)


def test_a_holder_lets_go_once() -> None:
    _, _, placement = tiered(1, (8,))
    cache(placement, [1, 2])
    with own(placement, [1, 2]) as hold:
        handle = hold.handle
        other, _ = placement.acquire([1, 2])
        hold.release()
        assert owners(placement) == 1
    hold.release()
    assert hold.handle == -1 != handle
    assert owners(placement) == 1
    placement.release(other)


def test_what_a_row_took_over_is_the_rows() -> None:
    _, _, placement = tiered(1, (8,))
    table = BlockTable(placement, 4)
    cache(placement, [1, 2])
    with own(placement, [1, 2, 3], 0, 2) as hold:
        row = open_row(table, [1, 2, 3], 0, hold)
        assert hold.handle == -1
    assert owners(placement) == table.num_rows == 1
    assert table.info(row.handle).num_computed == 2
    with pytest.raises(StaleHandle, match="let go of"):
        open_row(table, [1, 2, 3], 0, hold)
    assert row.release()
    assert not row.release()
    assert owners(placement) == table.num_rows == 0


def test_a_row_whose_holder_dies_is_released() -> None:
    _, _, placement = tiered(1, (8,))
    table = BlockTable(placement, 4)
    row = open_row(table, [1, 2, 3], 0, own(placement, [1, 2, 3], 0, 2))
    rows = fork_row(table, row, 3)
    assert table.num_rows == owners(placement) == 4
    del row
    assert table.num_rows == 3
    del rows
    assert table.num_rows == owners(placement) == 0
    table.check_integrity()


def test_a_row_that_cannot_be_opened_leaves_its_owner_with_its_holder() -> None:
    _, _, placement = tiered(1, (8,))
    table = BlockTable(placement, 1)
    table.open([9])
    with own(placement, [1]) as hold:
        with pytest.raises(InvalidArgument, match="rows are in use"):
            open_row(table, [1], 0, hold)
        assert hold.handle >= 0
    assert owners(placement) == 1


def test_forks_that_do_not_fit_leave_none_behind() -> None:
    _, _, placement = tiered(1, (8,))
    table = BlockTable(placement, 3)
    row = open_row(table, [1], 0, own(placement, [1]))
    with pytest.raises(InvalidArgument, match="rows are free"):
        fork_row(table, row, 3)
    assert table.num_rows == 1


def test_a_block_that_begins_alike_is_held_until_its_holder_lets_go() -> None:
    _, _, placement = tiered(4, (8,))
    cache(placement, [1, 2, 3, 4, 5, 6, 7, 8])
    with own(placement, [1, 2, 3, 4]) as hold:
        other, block, common = own_partial(placement, hold, [5, 6, 9])
        assert other is not None
        assert (common, block >= 0, owners(placement)) == (2, True, 2)
        del other
        assert owners(placement) == 1
        assert own_partial(placement, hold, [9]) == (None, -1, 0)


def shared(table: BlockTable, block_size: int = 4) -> tuple[int, int]:
    """A row with a partly filled block, and a fork of it that is about to write there."""
    row, _ = table.open([1, 2])
    table.step([row])
    table.commit([row])
    fork = int(table.fork(row)[0])
    table.append([fork], [3])
    return row, fork


@pytest.mark.parametrize("end", ["cancel", "step", "truncate", "release"])
def test_a_copy_that_was_not_made_is_undone_with_its_step(end: str) -> None:
    _, pool, placement = single(4, 8)
    table = BlockTable(placement, 4)
    row, fork = shared(table)
    before = table.blocks(row).tolist()
    ((source, target),) = table.step([fork]).copies.tolist()
    assert [source] == before
    if end == "cancel":
        table.cancel([fork])
        assert table.blocks(fork).tolist() == before
    elif end == "step":  # its step ended neither way: the copy is asked for again
        ((again, _),) = table.step([fork]).copies.tolist()
        assert again == source
    elif end == "truncate":
        table.truncate(fork, 2)
        assert table.blocks(fork).tolist() == before
    else:
        table.release(fork)
        assert pool.refs([source, target]).tolist() == [1, 0]
    table.check_integrity()
    table.cancel([one for one in (row, fork) if end != "release" or one == row])
    table.copies_done()
    table.check_integrity()


def test_a_copy_that_was_made_stays_when_its_step_is_cancelled_or_committed() -> None:
    for end in ("cancel", "commit"):
        _, pool, placement = single(4, 8)
        table = BlockTable(placement, 4)
        row, fork = shared(table)
        copies = table.step([fork]).copies
        if end == "cancel":
            table.copies_done(copies)
            table.cancel([fork])
        else:
            table.commit([fork])
            table.copies_done(np.ascontiguousarray(copies))
        assert table.blocks(fork).tolist() == [int(copies[0, 1])]
        assert pool.refs(copies[0]).tolist() == [1, 1]
        table.check_integrity()
        table.release(row)
        table.release(fork)
