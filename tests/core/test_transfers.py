"""Blocks between tiers.

A copy is visible only once its move has succeeded, and every ending keeps the counts right.
"""

from __future__ import annotations

from random import Random

import pytest

from pagedkv.core import MOVE_DTYPE, Tier
from pagedkv.errors import OutOfBlocks, StaleHandle
from tests.core.helpers import (
    below,
    cache,
    cached_prefixes,
    finish,
    insert,
    make_room,
    nothing_changes,
    remember,
    sound,
    states,
    tiered,
    where,
)

# ---- demotion


def test_a_demotion_names_every_block_and_holds_both_sides_until_it_is_complete() -> None:
    _, pools, placement = tiered(1, (4, 8))
    cache(placement, [1, 2, 3, 4])
    assert placement.reserve(2) == 2
    moves = placement.take_moves()
    assert moves.dtype == MOVE_DTYPE
    assert moves["src_tier"].tolist() == [Tier.DEVICE] * 2
    assert moves["dst_tier"].tolist() == [Tier.HOST] * 2
    assert moves["src_block"].tolist() == placement.match([1, 2, 3, 4])[1].tolist()[2:]
    assert len(set(moves["transfer"].tolist())) == len(set(moves["node"].tolist())) == 1
    assert moves["depth"].tolist() == [2, 3]
    assert placement.path_tokens(int(moves["node"][0])).tolist() == [1, 2, 3, 4]
    assert placement.depth_of(int(moves["node"][0])) == 2
    assert placement.root_of(int(moves["node"][0])) == 0
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE] * 4
    assert pools[1].refs(moves["dst_block"]).tolist() == [1, 1]
    assert states(placement) == [(0, 2, 2), (6, 2, 0)]
    assert placement.num_in_flight == 1
    sound(placement)
    placement.complete(moves["transfer"][:1], [True])
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.HOST]
    assert states(placement) == [(2, 0, 2), (6, 0, 2)]
    assert placement.reserve(2) == 0
    assert placement.stats()["demoted"]["device"] == 2
    sound(placement)


def test_a_transfer_whose_moves_were_not_taken_cannot_be_completed() -> None:
    _, _, placement = tiered(1, (4, 8))
    cache(placement, [1, 2, 3, 4])
    assert placement.reserve(1) == 1
    first = int(finish(placement)["transfer"][0])
    assert placement.reserve(2) == 1
    guess = first + (1 << 32)  # the next one in its place
    with pytest.raises(StaleHandle, match="take_moves never gave it out"):
        placement.complete([guess], [True])
    assert placement.num_in_flight == 1
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE] * 3 + [Tier.HOST]
    sound(placement)
    assert set(finish(placement)["transfer"].tolist()) == {guess}
    sound(placement)


def test_moves_are_taken_once() -> None:
    _, _, placement = tiered()
    assert len(placement.take_moves()) == 0
    cache(placement, [1, 2])
    placement.reserve(4)
    assert len(placement.take_moves()) == 2
    assert len(placement.take_moves()) == 0


def test_asking_again_while_a_demotion_is_in_flight_starts_no_second_one() -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    for _ in range(3):
        assert placement.reserve(2) == 2
    assert placement.num_in_flight == 1
    assert len(finish(placement)) == 2
    assert placement.reserve(2) == 0


def test_what_was_demoted_piece_by_piece_is_one_run_again() -> None:
    tree, _, placement = tiered(1, (6, 12))
    cache(placement, [1, 2, 3, 4, 5, 6])
    for n in range(1, 7):
        assert placement.reserve(n) == 1
        finish(placement)
        sound(placement)
    assert where(placement, [1, 2, 3, 4, 5, 6]) == [Tier.HOST] * 6
    assert tree.num_nodes == 2
    owner, matched = placement.acquire([1, 2, 3, 4, 5, 6])
    assert (matched, placement.promote(owner)) == (6, 1)
    finish(placement)
    placement.release(owner)
    sound(placement)


def test_pieces_completed_in_any_order_are_one_run_again() -> None:
    for seed in range(10):
        tree, _, placement = tiered(1, (6, 12))
        cache(placement, [1, 2, 3, 4, 5, 6])
        for n in (1, 2, 4, 6):
            placement.reserve(n)
        transfers = list(dict.fromkeys(placement.take_moves()["transfer"].tolist()))
        assert len(transfers) == 4
        Random(seed).shuffle(transfers)
        for transfer in transfers:
            placement.complete([transfer], [True])
            sound(placement)
        assert where(placement, [1, 2, 3, 4, 5, 6]) == [Tier.HOST] * 6
        assert len(cached_prefixes(tree)) == 6


def test_a_demotion_that_fails_is_a_miss_and_gives_every_block_back() -> None:
    tree, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(2)
    finish(placement, ok=False)
    assert cached_prefixes(tree) == {(1,), (1, 2)}
    assert states(placement) == [(2, 0, 2), (8, 0, 0)]
    assert placement.stats()["failed_demotions"] == 2
    assert placement.reserve(2) == 0
    sound(placement)


def test_a_block_wanted_again_while_it_is_demoted_stays_where_it_was() -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(4)
    owner, matched = placement.acquire([1, 2, 3, 4])
    assert matched == 4
    assert placement.tiers_of(owner).tolist() == [Tier.DEVICE] * 4
    assert not placement.is_moving(owner)
    assert placement.settle(owner) == 4
    sound(placement)
    finish(placement)
    assert placement.tiers_of(owner).tolist() == [Tier.DEVICE] * 4
    assert states(placement) == [(0, 4, 0), (8, 0, 0)]
    placement.release(owner)
    sound(placement)


def test_a_block_wanted_again_leaves_a_clean_copy_behind_where_the_tier_is_inclusive() -> None:
    _, _, placement = tiered(inclusive=(False, True))
    cache(placement, [1, 2, 3, 4])
    placement.reserve(4)
    owner, _ = placement.acquire([1, 2, 3, 4])
    finish(placement)
    assert states(placement) == [(0, 4, 0), (4, 0, 4)]
    placement.release(owner)
    sound(placement)
    assert placement.reserve(4) == 0  # no move needed: the copy is there
    assert where(placement, [1, 2, 3, 4]) == [Tier.HOST] * 4
    assert placement.stats()["trimmed"]["device"] == 4
    sound(placement)


def test_a_failed_demotion_of_a_block_wanted_again_loses_nothing() -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(4)
    owner, _ = placement.acquire([1, 2, 3, 4])
    finish(placement, ok=False)
    assert placement.settle(owner) == 4
    assert states(placement) == [(0, 4, 0), (8, 0, 0)]
    placement.release(owner)
    sound(placement)


def test_a_run_in_flight_cannot_be_cut_and_names_the_transfer_to_wait_for() -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(4)
    moves = placement.take_moves()
    owner, matched = placement.acquire([1, 2, 9])
    assert matched == 0
    assert placement.blocked_by(owner) == moves["transfer"][0]
    assert placement.stats()["blocked_matches"] == 1
    placement.complete(moves["transfer"][:1], [True])
    other, matched = placement.acquire([1, 2, 9])
    assert (matched, placement.blocked_by(other)) == (2, -1)
    assert placement.tiers_of(other).tolist() == [Tier.HOST] * 2
    placement.release(owner)
    placement.release(other)
    sound(placement)


def test_with_everything_held_there_is_no_room_and_nothing_moves() -> None:
    _, _, placement = tiered()
    owner = remember(placement, [1, 2, 3, 4])
    with nothing_changes(placement):
        assert placement.reserve(1) == 1
    assert len(placement.take_moves()) == 0
    placement.release(owner)


def test_what_the_last_tier_cannot_hold_is_dropped_leaf_first() -> None:
    tree, pools, placement = tiered(1, (4, 4, 4))
    for start in range(0, 40, 4):
        make_room(placement, 4)
        cache(placement, [7, *range(start, start + 3)])
        sound(placement)
        prefixes = cached_prefixes(tree)
        assert all(prefix[:-1] in prefixes for prefix in prefixes if len(prefix) > 1)
    assert all(pool.counts()["cached"] >= 3 for pool in pools)
    assert placement.stats()["dropped"]["disk"] > 0


# ---- promotion


def test_a_promotion_is_visible_only_when_it_is_complete() -> None:
    placement = below()
    owner, matched = placement.acquire([1, 2, 3, 4, 5])
    assert matched == 4
    assert placement.promote(owner) == 1
    moves = placement.take_moves()
    assert (moves["src_tier"].tolist(), moves["dst_tier"].tolist()) == ([Tier.HOST] * 4, [Tier.DEVICE] * 4)
    assert placement.tiers_of(owner).tolist() == [Tier.HOST] * 4
    assert placement.is_moving(owner)
    assert placement.promote(owner) == 0
    sound(placement)
    placement.complete(moves["transfer"][:1], [True])
    assert not placement.is_moving(owner)
    assert placement.tiers_of(owner).tolist() == [Tier.DEVICE] * 4
    assert placement.blocks_of(owner).tolist() == moves["dst_block"].tolist()
    assert placement.settle(owner) == 4
    assert states(placement) == [(0, 4, 0), (8, 0, 0)]
    placement.release(owner)
    sound(placement)


@pytest.mark.parametrize(("inclusive", "host"), [(False, (8, 0, 0)), (True, (4, 0, 4))])
def test_an_inclusive_tier_keeps_its_copy_and_an_exclusive_one_does_not(
    inclusive: bool, host: tuple[int, int, int]
) -> None:
    placement = below(inclusive=(False, inclusive))
    owner, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(owner)
    finish(placement)
    assert states(placement) == [(0, 4, 0), host]
    placement.release(owner)
    sound(placement)


def test_a_redundant_copy_goes_before_anything_is_lost() -> None:
    tree, _, placement = tiered(1, (4, 4), inclusive=(False, True))
    cache(placement, [1, 2, 3, 4])
    make_room(placement, 4)
    owner, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(owner)
    finish(placement)
    placement.release(owner)
    assert placement.reserve(4, Tier.HOST) == 0
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE] * 4
    assert len(cached_prefixes(tree)) == 4
    sound(placement)


def test_promoting_without_room_starts_nothing() -> None:
    placement = below()
    placement.pools[0].alloc(1)
    owner, _ = placement.acquire([1, 2, 3, 4])
    with nothing_changes(placement), pytest.raises(OutOfBlocks) as raised:
        placement.promote(owner)
    assert (raised.value.asked, raised.value.free) == (4, 3)
    placement.release(owner)


def test_settling_keeps_what_is_on_the_device_from_the_front() -> None:
    _, _, placement = tiered(1, (8, 8))
    cache(placement, [1, 2, 3, 4])
    placement.reserve(6)
    finish(placement)
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.HOST]
    owner, matched = placement.acquire([1, 2, 3, 4])
    assert (matched, placement.settle(owner)) == (4, 2)
    assert placement.tiers_of(owner).tolist() == [Tier.DEVICE] * 2
    assert placement.settle(owner) == 2
    assert states(placement)[1] == (6, 0, 2)
    placement.release(owner)
    sound(placement)


def test_a_promotion_that_fails_is_a_miss_for_everybody() -> None:
    placement = below()
    first, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(first)
    second, matched = placement.acquire([1, 2, 3, 4])
    assert matched == 0
    assert placement.blocked_by(second) >= 0
    finish(placement, ok=False)
    assert placement.stats()["failed_promotions"] == 4
    assert where(placement, [1, 2, 3, 4]) == []
    third, matched = placement.acquire([1, 2, 3, 4])
    assert (matched, placement.settle(first)) == (0, 0)
    assert placement.promote(first) == 0
    for owner in (first, second, third):
        placement.release(owner)
    assert states(placement) == [(4, 0, 0), (8, 0, 0)]
    sound(placement)


def test_blocks_computed_again_replace_a_copy_that_could_not_be_read() -> None:
    placement = below()
    broken, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(broken)
    finish(placement, ok=False)
    owner, matched = placement.acquire([1, 2, 3, 4])
    assert matched == 0
    insert(placement, owner, [1, 2, 3, 4])
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE] * 4
    sound(placement)
    placement.release(broken)
    placement.release(owner)
    assert states(placement) == [(0, 0, 4), (8, 0, 0)]
    sound(placement)


def test_blocks_computed_meanwhile_take_the_place_of_a_colder_copy() -> None:
    placement = below()
    reader, _ = placement.acquire([1, 2, 3, 4])
    owner, _ = placement.acquire([1, 2, 3, 4], max_blocks=0)
    blocks = insert(placement, owner, [1, 2, 3, 4])
    assert placement.blocks_of(reader).tolist() == blocks.tolist()
    assert placement.tiers_of(reader).tolist() == [Tier.DEVICE] * 4
    assert states(placement) == [(0, 4, 0), (8, 0, 0)]
    sound(placement)
    placement.release(reader)
    placement.release(owner)
    sound(placement)


def test_blocks_for_a_run_in_flight_stay_the_callers() -> None:
    placement = below((8, 8))
    reader, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(reader)
    owner, _ = placement.acquire([1, 2, 3, 4])
    mine = placement.pools[0].alloc(4)  # type: ignore[union-attr]
    assert placement.insert(owner, [1, 2, 3, 4], mine) == 0
    finish(placement)
    assert placement.insert(owner, [1, 2, 3, 4], mine) == 4
    assert mine.tolist() == placement.blocks_of(reader).tolist()
    placement.release(reader)
    placement.release(owner)
    sound(placement)


@pytest.mark.parametrize("ok", [True, False])
def test_an_owner_may_leave_while_its_promotion_is_in_flight(ok: bool) -> None:
    placement = below()
    owner, _ = placement.acquire([1, 2, 3, 4])
    placement.promote(owner)
    assert placement.settle(owner) == 0  # lets go of what is not there yet
    placement.release(owner)
    sound(placement)
    finish(placement, ok=ok)
    assert where(placement, [1, 2, 3, 4]) == ([Tier.DEVICE] * 4 if ok else [])
    sound(placement)
    make_room(placement, 4)
    make_room(placement, 8, Tier.HOST)
    sound(placement)


def test_a_promotion_from_the_disk_leaves_its_copy_there_and_needs_no_second_write() -> None:
    _, _, placement = tiered(1, (2, 2, 4))
    cache(placement, [1, 2])
    make_room(placement, 2)
    make_room(placement, 2, Tier.HOST)
    assert where(placement, [1, 2]) == [Tier.DISK] * 2
    owner, _ = placement.acquire([1, 2])
    placement.promote(owner)
    finish(placement)
    placement.release(owner)
    assert states(placement) == [(0, 0, 2), (2, 0, 0), (2, 0, 2)]
    assert placement.reserve(2) == 0  # dropped from the device, no move
    assert where(placement, [1, 2]) == [Tier.DISK] * 2
    assert placement.num_in_flight == 0
    sound(placement)
