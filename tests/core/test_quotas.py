"""Quotas of namespaces, and what happens when one namespace is dropped or all are cleared."""

from __future__ import annotations

from tests.core.helpers import (
    cache,
    cached_prefixes,
    finish,
    kept,
    make_room,
    nothing_changes,
    remember,
    single,
    sound,
    tiered,
)

# ---- quotas


def test_a_namespace_at_its_quota_evicts_its_own_blocks_and_nobody_elses() -> None:
    tree, _, placement = single(1, 8)
    mine = tree.namespace(b"mine")
    cache(placement, [1, 2, 3])
    placement.set_quota(mine, 2)
    for tokens in ([4, 5], [6], [7, 8]):
        cache(placement, tokens, mine)
        assert len(cached_prefixes(tree, mine)) <= 2
        sound(placement)
    assert cached_prefixes(tree, mine) == {(7,), (7, 8)}
    assert kept(placement, [1, 2, 3]) == [3]


def test_blocks_that_a_quota_refuses_are_counted_once() -> None:
    _, pool, placement = single(1, 8)
    placement.set_quota(0, 3)
    owner, _ = placement.acquire([])
    assert placement.insert(owner, [1, 2, 3, 4, 5], pool.alloc(5)) == 3
    assert placement.stats()["refused_by_quota"] == 2


def test_a_lowered_quota_evicts_at_once_what_nobody_owns() -> None:
    tree, _, placement = single(1, 8)
    mine = tree.namespace(b"mine")
    owner = remember(placement, [1, 2], mine)
    cache(placement, [3, 4, 5], mine)
    placement.set_quota(mine, 1)
    assert cached_prefixes(tree, mine) == {(1,), (1, 2)}
    placement.release(owner)
    placement.set_quota(mine, 0)
    assert cached_prefixes(tree, mine) == set()
    sound(placement)


def test_a_quota_can_be_lifted() -> None:
    tree, _, placement = single(1, 8)
    mine = tree.namespace(b"mine")
    placement.set_quota(mine, 1)
    placement.set_quota(mine, None)
    cache(placement, [1, 2, 3], mine)
    assert len(cached_prefixes(tree, mine)) == 3
    sound(placement)


def test_pressure_from_others_still_evicts_a_namespace_with_a_quota_in_its_turn() -> None:
    tree, _, placement = single(1, 4)
    mine = tree.namespace(b"mine")
    placement.set_quota(mine, 3)
    cache(placement, [1], mine)
    cache(placement, [2, 3])
    assert placement.reserve(2) == 0
    assert (cached_prefixes(tree, mine), cached_prefixes(tree)) == (set(), {(2,), (2, 3)})
    sound(placement)


def test_a_run_that_making_room_within_the_quota_sends_on_its_way_is_not_adopted() -> None:
    tree, pools, placement = tiered(1, (4, 1, 4))
    mine = tree.namespace(b"mine")
    cache(placement, [1], mine)
    make_room(placement, 4)
    assert placement.match([1], mine)[0].tolist() == [1], "it is in the host"
    placement.set_quota(mine, 1)
    cache(placement, [2], mine)
    owner, _ = placement.acquire([], mine)
    blocks = pools[0].alloc(1)
    assert placement.insert(owner, [1], blocks) == 0, "it is on its way from the host to the disk"
    assert placement.num_in_flight == 1
    finish(placement)
    sound(placement)
    pools[0].free(blocks)
    placement.release(owner)
    sound(placement)


def test_a_quota_below_is_kept_by_demotions_that_overlap() -> None:
    tree, pools, placement = tiered(1, (4, 8))
    mine = tree.namespace(b"mine")
    placement.set_quota(mine, 2, tier=1)
    cache(placement, [1, 2], mine)
    cache(placement, [3, 4], mine)
    placement.reserve(4)
    finish(placement)
    assert pools[1].counts()["cached"] <= 2
    sound(placement)


def test_a_quota_on_the_device_holds_for_promotions_too() -> None:
    tree, pools, placement = tiered(1, (8, 8))
    mine = tree.namespace(b"mine")
    cache(placement, [1, 2, 3, 4], mine)
    make_room(placement, 8)
    placement.set_quota(mine, 2)
    owner, _ = placement.acquire([1, 2, 3, 4], mine)
    placement.promote(owner)
    finish(placement)
    placement.settle(owner)
    placement.release(owner)
    assert pools[0].counts()["cached"] <= 2
    sound(placement)


def test_what_the_quota_does_not_admit_stays_the_callers() -> None:
    tree, pool, placement = single(1, 8)
    mine = tree.namespace(b"mine")
    placement.set_quota(mine, 3)
    owner, _ = placement.acquire([], mine)
    blocks = pool.alloc(5)
    assert placement.insert(owner, [1, 2, 3, 4, 5], blocks) == 3
    assert pool.refs(blocks).tolist() == [2, 2, 2, 1, 1]
    with nothing_changes(pool):
        assert placement.insert(owner, [4, 5], blocks[3:]) == 0
    pool.free(blocks[3:])
    placement.release(owner)
    assert len(cached_prefixes(tree, mine)) == 3
    sound(placement)


# ---- dropping and clearing


def test_a_dropped_namespace_frees_what_nobody_uses_and_never_matches_again() -> None:
    tree, pool, placement = single(1, 8)
    mine = tree.namespace(b"mine")
    cache(placement, [1, 2], mine)
    cache(placement, [1, 9])
    owner = remember(placement, [1, 3], mine)
    assert placement.drop_namespace(mine) == 1
    assert (pool.counts()["live"], pool.counts()["cached"]) == (2, 2)
    assert kept(placement, [1, 9]) == [2]
    for _ in range(2):
        assert [len(found) for found in placement.match([1, 3], mine)[:2]] == [0, 0]
        other, matched = placement.acquire([1, 3], mine)
        assert matched == 0
        placement.release(other)
        sound(placement)
    assert len(placement.blocks_of(owner)) == 2
    placement.release(owner)
    assert pool.counts()["live"] == 0
    assert pool.counts()["cached"] == 2
    assert placement.drop_namespace(mine) == 0
    sound(placement)


def test_nothing_enters_a_namespace_that_was_dropped() -> None:
    tree, pool, placement = single(1, 8)
    mine = tree.namespace(b"mine")
    owner, _ = placement.acquire([], mine)
    placement.drop_namespace(mine)
    blocks = pool.alloc(2)
    assert placement.insert(owner, [1, 2], blocks) == 0
    assert pool.refs(blocks).tolist() == [1, 1]
    placement.release(owner)
    sound(placement)


def test_the_name_of_a_dropped_namespace_can_be_used_again() -> None:
    tree, _, placement = single(1, 8)
    old = tree.namespace(b"mine")
    cache(placement, [1, 2], old)
    placement.drop_namespace(old)
    new = tree.namespace(b"mine")
    assert new != old
    cache(placement, [1, 2], new)
    assert [len(placement.match([1, 2], root)[1]) for root in (old, new)] == [0, 2]
    sound(placement)


def test_clear_drops_everything_that_nobody_owns_in_every_tier_and_namespace() -> None:
    tree, pools, placement = tiered(1, (4, 8))
    mine = tree.namespace(b"mine")
    cache(placement, [1, 2], mine)
    make_room(placement, 3)
    cache(placement, [3])
    owner = remember(placement, [4, 5])
    assert [pool.counts()["cached"] for pool in pools] == [2, 1]
    assert placement.clear() == 3
    assert [pool.counts()["cached"] for pool in pools] == [0, 0]
    assert kept(placement, [4, 5]) == [2]
    placement.release(owner)
    assert placement.clear() == 2
    assert (tree.num_blocks, placement.clear()) == (0, 0)
    sound(placement)


def test_clear_also_drops_what_arrived_late_in_a_dropped_namespace() -> None:
    tree, pools, placement = tiered(1, (4, 8))
    mine = tree.namespace(b"mine")
    cache(placement, [1, 2], mine)
    placement.reserve(4)
    placement.drop_namespace(mine)
    finish(placement)
    placement.clear()
    assert tree.num_blocks == 0
    assert [pool.counts()["cached"] for pool in pools] == [0, 0]
    sound(placement)


def test_a_quota_below_keeps_nobody_else_out_of_that_tier() -> None:
    """A namespace over its quota in a tier gives up its own coldest blocks there.

    Other namespaces' blocks go down as before.
    """
    tree, _, placement = tiered(1, (16, 100))
    bounded, free = tree.namespace(b"bounded"), tree.namespace(b"free")
    placement.set_quota(bounded, 8, 1)
    for namespace in (bounded, free):
        for first in range(0, 1000, 100):
            make_room(placement, 6)
            cache(placement, list(range(first, first + 6)), namespace)
    make_room(placement, 16)
    finish(placement)
    assert len(placement.blocks_in(bounded, 1)) <= 8
    assert len(placement.blocks_in(free, 1)) == 60
    sound(placement)


# ---- quotas over several tiers


def test_what_is_leaving_for_a_colder_tier_no_longer_counts_so_the_newest_blocks_stay() -> None:
    tree, _, placement = tiered(1, (16, 32))
    mine = tree.namespace(b"mine")
    placement.set_quota(mine, 4)
    for first in range(0, 40, 4):
        cache(placement, list(range(first, first + 4)), mine)
        sound(placement)
        tiers, _, _ = placement.match(list(range(first, first + 4)), mine)
        assert tiers.tolist() == [0, 0, 0, 0], "the newest is on the device"
        finish(placement)
        sound(placement)
        assert len(placement.blocks_in(mine)) == 4
    assert placement.stats()["refused_by_quota"] == 0
    assert placement.stats()["demoted"]["device"] == 36


def test_a_demotion_that_fails_or_is_cancelled_leaves_no_more_than_the_quota() -> None:
    for tried in (True, False):
        tree, _, placement = tiered(1, (16, 32))
        mine = tree.namespace(b"mine")
        placement.set_quota(mine, 4)
        cache(placement, [1, 2, 3, 4], mine)
        cache(placement, [5, 6, 7, 8], mine)
        moves = placement.take_moves()
        back, _ = placement.acquire([1, 2, 3, 4], mine)  # a request for what is leaving: it stays, and counts again
        transfers = list(dict.fromkeys(moves["transfer"].tolist()))
        placement.complete(transfers, [False] * len(transfers), [tried] * len(transfers))
        sound(placement)
        placement.release(back)
        sound(placement)
        cache(placement, [9], mine)
        finish(placement)
        assert len(placement.blocks_in(mine)) <= 4
        sound(placement)


def test_a_namespace_that_gets_a_quota_while_its_blocks_move_is_counted_as_if_it_had_had_it() -> None:
    tree, _, placement = tiered(1, (8, 16))
    mine = tree.namespace(b"mine")
    cache(placement, [1, 2, 3, 4], mine)
    cache(placement, [5, 6, 7, 8])
    assert placement.reserve(2) == 2
    placement.set_quota(mine, 3)
    sound(placement)
    finish(placement)
    sound(placement)
    assert len(placement.blocks_in(mine)) <= 3
    owner, _ = placement.acquire([1, 2, 3, 4], mine)
    placement.reserve(4)
    finish(placement)
    placement.promote(owner)
    placement.set_quota(mine, 8)
    sound(placement)
    finish(placement)
    sound(placement)
    placement.release(owner)


def test_where_the_colder_tier_is_busy_old_blocks_are_dropped_rather_than_new_ones_refused() -> None:
    tree, _, placement = tiered(1, (16, 4, 64))
    mine = tree.namespace(b"mine")
    cache(placement, [101, 102, 103, 104])
    make_room(placement, 16)  # these lie in the colder tier, and fill it: they have to go to the disk first
    placement.set_quota(mine, 4)
    for first in range(0, 24, 4):
        cache(placement, list(range(first, first + 4)), mine)  # nothing is moved meanwhile
        sound(placement)
        assert kept(placement, list(range(first, first + 4))) == [0]
        assert len(placement.match(list(range(first, first + 4)), mine)[0]) == 4
    assert placement.stats()["refused_by_quota"] == 0
    assert placement.stats()["dropped"]["device"] > 0
    finish(placement)
    sound(placement)
