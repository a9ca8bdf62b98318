"""Transfers given up early, paths released in part, and the state of a run in flight."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.core import BlockTable, Placement, Tier
from pagedkv.errors import InvalidArgument, StaleHandle, WrongType
from tests.core.helpers import (
    below,
    cache,
    finish,
    make_room,
    nothing_changes,
    remember,
    sound,
    states,
    tiered,
    where,
)


def give_up(placement: Placement) -> None:
    """All moves are over, and nothing of them was tried."""
    transfers = np.unique(placement.take_moves()["transfer"])
    never = np.zeros(len(transfers), np.bool_)
    placement.complete(transfers, never, never)


def test_a_promotion_given_up_is_a_miss_now_and_a_hit_later() -> None:
    placement = below()
    owner, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(owner)
    give_up(placement)
    assert placement.settle(owner) == 0
    placement.release(owner)
    sound(placement)
    assert where(placement, [1, 2, 3, 4]) == [Tier.HOST] * 4
    assert (placement.stats()["late_promotions"], placement.stats()["failed_promotions"]) == (4, 0)
    again, matched = placement.acquire([1, 2, 3, 4])
    assert matched == 4
    placement.promote(again)
    finish(placement)
    assert placement.settle(again) == 4
    placement.release(again)
    sound(placement)


def test_a_promotion_that_was_tried_and_failed_is_not_matched_again() -> None:
    placement = below()
    owner, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(owner)
    transfers = np.unique(placement.take_moves()["transfer"])
    placement.complete(transfers, np.zeros(len(transfers), np.bool_), np.ones(len(transfers), np.bool_))
    placement.release(owner)
    assert where(placement, [1, 2, 3, 4]) == []
    assert (placement.stats()["late_promotions"], placement.stats()["failed_promotions"]) == (0, 4)
    sound(placement)


def test_a_promotion_given_up_after_its_owner_left_and_its_namespace_was_dropped_leaves_nothing() -> None:
    placement = below()
    owner, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(owner)
    placement.release(owner)
    placement.drop_namespace(0)
    assert placement.moving_in(0) == 1
    give_up(placement)
    assert placement.moving_in(0) == 0
    assert states(placement) == [(4, 0, 0), (8, 0, 0)]
    sound(placement)


def test_a_deeper_run_may_arrive_although_the_one_before_it_was_given_up() -> None:
    _, _, placement = tiered(1, (8, 8))
    cache(placement, [1, 2])
    cache(placement, [1, 2, 3, 4])
    cache(placement, [1, 2, 8])
    make_room(placement, 8)
    owner, matched = placement.acquire([1, 2, 3, 4])
    assert matched == 4
    placement.promote(owner)
    moves = placement.take_moves()
    transfers = np.unique(moves["transfer"])
    first = moves["transfer"][moves["src_block"] == placement.blocks_of(owner)[0]][0]
    placement.complete(transfers, transfers != first, transfers != first)
    assert placement.settle(owner) == 0
    placement.release(owner)
    sound(placement)
    assert where(placement, [1, 2, 3, 4]) == [Tier.HOST, Tier.HOST, Tier.DEVICE, Tier.DEVICE]
    make_room(placement, 8)
    assert where(placement, [1, 2, 3, 4]) == [Tier.HOST] * 4
    sound(placement)


def test_a_demotion_given_up_drops_its_blocks_and_counts_as_refused() -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(2)
    give_up(placement)
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE] * 2
    assert (placement.stats()["refused_demotions"], placement.stats()["failed_demotions"]) == (2, 0)
    assert placement.reserve(2) == 0
    sound(placement)


def test_a_demotion_given_up_drops_nothing_that_somebody_came_back_for() -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(4)
    owner, _ = placement.acquire([1, 2, 3, 4])
    give_up(placement)
    assert placement.settle(owner) == 4
    placement.release(owner)
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE] * 4
    sound(placement)


@pytest.mark.parametrize("tried", [[], [True, True], [2], ["x"], 1])
def test_outcomes_that_do_not_fit_change_nothing(tried: object) -> None:
    placement = below()
    owner, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(owner)
    transfer = placement.take_moves()["transfer"][:1]
    with nothing_changes(placement), pytest.raises((InvalidArgument, WrongType)):
        placement.complete(transfer, [True], tried)  # type: ignore[arg-type]
    placement.complete(transfer, [True], [True])
    placement.release(owner)


def test_a_path_is_let_go_of_in_part() -> None:
    _, _, placement = tiered(1, (8, 8))
    owner = remember(placement, [1, 2, 3, 4])
    assert placement.shorten(owner, 9) == 4
    assert placement.shorten(owner, 3) == 3
    assert states(placement)[0] == (4, 3, 1)
    assert placement.blocks_of(owner).tolist() == placement.match([1, 2, 3])[1].tolist()
    assert placement.shorten(owner, 0) == 0
    sound(placement)
    placement.release(owner)
    with pytest.raises(StaleHandle):
        placement.shorten(owner, 0)
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE] * 4


def test_a_run_in_flight_is_not_cut_by_letting_go_of_a_part() -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(4)
    owner, _ = placement.acquire([1, 2, 3, 4])
    assert placement.shorten(owner, 2) == 4
    assert placement.shorten(owner, 0) == 0
    finish(placement)
    placement.release(owner)
    sound(placement)


def test_what_is_known_of_a_run_in_flight() -> None:
    _, _, placement = tiered(1, (8, 16))
    cache(placement, [1, 2])
    cache(placement, [1, 2, 3, 4])
    cache(placement, [1, 2, 7, 8])  # matched 1 and 2 twice more
    placement.reserve(8)
    moves = placement.take_moves()
    known = {
        tuple(placement.path_tokens(int(node)).tolist()): placement.prospects(int(node))
        for node in np.unique(moves["node"])
    }
    assert known == {(1, 2): (0, True, True), (1, 2, 3, 4): (2, False, False), (1, 2, 7, 8): (2, False, False)}
    assert placement.moving_in(0) == 3
    transfers = np.unique(moves["transfer"])
    placement.complete(transfers, np.ones(len(transfers), np.bool_))
    assert placement.moving_in(0) == 0
    sound(placement)


def test_what_is_computed_again_counts_as_matched() -> None:
    _, _, placement = tiered(1, (8, 8))
    first, second = (placement.acquire([1, 2])[0] for _ in range(2))
    for owner in (first, second):
        blocks = placement.pools[0].alloc(2)
        assert placement.insert(owner, np.array([1, 2], np.int32), blocks) == 2
        placement.release(owner)
    placement.reserve(8)
    assert placement.prospects(int(placement.take_moves()["node"][0])) == (0, False, True)


def test_rows_say_whose_they_are() -> None:
    tree, _, placement = tiered(1, (8,))
    table = BlockTable(placement, 4)
    roots = [tree.namespace(name) for name in (b"a", b"b", b"a")]
    rows = [table.open([1, 2], root)[0] for root in roots]
    assert table.roots(rows).tolist() == roots
    assert table.roots([]).tolist() == []
    table.release(rows[1])
    with pytest.raises(StaleHandle):
        table.roots(rows)
