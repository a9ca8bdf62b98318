"""A handle names what it was made for and nothing else.

That holds even after its slot has been used again 2**31 times.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from pagedkv.core import BlockPool, BlockTable
from pagedkv.errors import DoubleRelease, InvalidArgument, StaleHandle
from tests.core.helpers import cache, finish, make_room, remember, single, sound, struct_of, tiered

LAST = 2**31 - 1


def test_an_owner_whose_generations_are_used_up_is_never_handed_out_again(native_generations: ModuleType) -> None:
    _, _, placement = single(1, 16)
    first, _ = placement.acquire([])
    placement.release(first)
    native_generations.next_owner(placement, LAST)
    last, _ = placement.acquire([])
    assert last >> 32 == LAST
    placement.release(last)
    slots = [placement.acquire([])[0] & LAST for _ in range(40)]
    assert len(set(slots)) == len(slots)
    assert last & LAST not in slots
    for stale in (first, last):
        with pytest.raises(DoubleRelease):
            placement.release(stale)
    sound(placement)


def test_an_owner_that_a_row_took_over_has_no_handle_until_it_is_used_again(native_generations: ModuleType) -> None:
    _, _, placement = single(1, 16)
    table = BlockTable(placement, 4)
    placement.release(placement.acquire([])[0])
    native_generations.next_owner(placement, LAST)
    owner, _ = placement.acquire([1, 2])
    row, _ = table.open([1, 2, 3], owner=owner)
    for handle in (owner, owner & LAST):  # what its generation would be after it had wrapped
        with pytest.raises(StaleHandle):
            placement.blocks_of(handle)
    table.release(row)
    with pytest.raises(StaleHandle):
        placement.blocks_of(owner)
    sound(placement, table)


def test_a_row_whose_generations_are_used_up_is_never_handed_out_again(native_generations: ModuleType) -> None:
    _, _, placement = single(1, 16)
    table = BlockTable(placement, 3)
    first, _ = table.open([1])
    table.release(first)
    native_generations.next_row(table, LAST)
    last, _ = table.open([1])
    assert last >> 32 == LAST
    table.release(last)
    rows = [table.open([1])[0] for _ in range(2)]
    assert last & LAST not in {row & LAST for row in rows}
    with pytest.raises(InvalidArgument, match="rows are in use"):
        table.open([1])
    for stale in (first, last):
        with pytest.raises(StaleHandle):
            table.info(stale)
    assert native_generations.retired(placement, table)[1] == 1
    sound(placement, table)


def test_a_transfer_whose_generations_are_used_up_is_never_handed_out_again(native_generations: ModuleType) -> None:
    _, _, placement = tiered(1, (2, 16))
    cache(placement, [1, 2])
    make_room(placement, 2)
    native_generations.next_transfer(placement, LAST)
    cache(placement, [3, 4])
    placement.reserve(2)
    last = int(placement.take_moves()["transfer"][0])
    assert last >> 32 == LAST
    placement.complete([last], [True])
    for token in range(10, 50, 2):
        cache(placement, [token, token + 1])
        placement.reserve(2)
        assert last & LAST not in {int(transfer) & LAST for transfer in finish(placement)["transfer"]}
    for stale in (last, last & LAST):
        with pytest.raises(StaleHandle):
            placement.complete([stale], [True])
    sound(placement)


def test_a_node_whose_generations_are_used_up_is_never_a_namespace_again(native_generations: ModuleType) -> None:
    tree, _, placement = single(1, 16)
    first = tree.namespace(b"first")
    assert placement.forget(first)
    native_generations.next_node(tree, LAST)
    last = tree.namespace(b"last")
    assert last >> 32 == LAST
    assert last & LAST == first & LAST
    assert placement.forget(last)
    others = [tree.namespace(b"%d" % number) for number in range(100)]
    assert last & LAST not in {other & LAST for other in others}
    for stale in (first, last):
        with pytest.raises(StaleHandle):
            placement.acquire([1], stale)
    cache(placement, [1, 2, 3], others[-1])
    assert native_generations.retired(placement)[0] == 1
    sound(placement)


def test_visits_and_what_is_remembered_end_with_their_generations_too(native_generations: ModuleType) -> None:
    tree, _, placement = single(1, 16, policy="hazard")
    hazard = placement.hazard
    assert hazard is not None
    other = tree.namespace(b"other")
    placement.release(remember(placement, [7, 8, 9], other))
    placement.drop_namespace(other)
    native_generations.next_past(placement, LAST)
    native_generations.next_visit(placement, LAST)
    owner = remember(placement, [1, 2, 3])
    last = hazard.depart(owner, later=True)
    assert last >> 32 == LAST
    placement.release(owner)
    hazard.report(last, 5)
    placement.drop_namespace(0)
    for _ in range(80):
        owner, _ = placement.acquire([4])
        visit = hazard.depart(owner, used=False)
        placement.release(owner)
        assert visit & LAST != last & LAST or visit == -1
    with pytest.raises(StaleHandle):
        hazard.report(last, 5)
    assert native_generations.retired(placement)[2] >= 1
    sound(placement)


def test_a_block_whose_generations_are_used_up_stays_in_use_but_has_no_handle() -> None:
    pool = BlockPool(1)
    struct = struct_of(pool)
    block = pool.alloc(1)
    handle = pool.handles(block)
    pool.free(block)
    struct.generations[0] = LAST - 1
    block = pool.alloc(1)
    last = pool.handles(block)
    assert pool.check(last).tolist() == [0]
    for _ in range(3):
        pool.free(block)
        block = pool.alloc(1)
        with pytest.raises(StaleHandle, match="no handle can name it"):
            pool.handles(block)
        for stale in (handle, last, last + (1 << 32)):
            with pytest.raises(StaleHandle):
                pool.check(stale)
    pool.check_integrity()
