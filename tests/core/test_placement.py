"""Placement on one tier.

Who owns what, what may be evicted, and that a refused call changes nothing.
"""

from __future__ import annotations

import gc
from random import Random

import pytest

from pagedkv.core import POLICIES, BlockPool, Placement, RadixTree
from pagedkv.errors import InvalidArgument, OutOfBlocks
from tests.core.helpers import (
    cache,
    cached_prefixes,
    insert,
    nothing_changes,
    remember,
    single,
    sound,
    tiered,
)


def by_state(pool: BlockPool) -> tuple[int, int, int]:
    counts = pool.counts()
    return counts["free"], counts["live"], counts["cached"]


def test_what_was_inserted_is_matched_and_is_evictable_once_released() -> None:
    _, pool, placement = single(2, 8)
    owner, matched = placement.acquire([1, 1, 2, 2])
    assert matched == 0
    blocks = insert(placement, owner, [1, 1, 2, 2])
    assert by_state(pool) == (6, 2, 0)
    assert pool.refs(blocks).tolist() == [2, 2]
    placement.release(owner)
    assert by_state(pool) == (6, 0, 2)
    tiers, found, common = placement.match([1, 1, 2, 2, 3, 3])
    assert (tiers.tolist(), found.tolist(), common) == ([0, 0], blocks.tolist(), 0)
    sound(placement)


def test_a_match_owns_nothing_and_touches_nothing() -> None:
    _, _, placement = single()
    cache(placement, [1, 2, 3])
    with nothing_changes(placement):
        for tokens in ([], [1], [1, 2, 3, 4], [5], [1, 9]):
            placement.match(tokens)
            placement.match(tokens, partial=True)


def test_an_owner_holds_its_path_and_shares_it_with_other_owners() -> None:
    _, pool, placement = single()
    cache(placement, [1, 2, 3, 4])
    owners = [placement.acquire([1, 2, 3, 4]), placement.acquire([1, 2]), placement.acquire([1, 2, 3, 9])]
    assert [matched for _, matched in owners] == [4, 2, 3]
    assert pool.refs(placement.blocks_of(owners[0][0])).tolist() == [4, 4, 3, 2]
    assert placement.tiers_of(owners[1][0]).tolist() == [0, 0]
    sound(placement)
    for owner, _ in owners:
        placement.release(owner)
        sound(placement)
    assert by_state(pool) == (12, 0, 4)


def test_a_match_may_be_limited() -> None:
    _, _, placement = single(2)
    cache(placement, [1, 1, 2, 2, 3, 3])
    for limit, expected in ((0, 0), (1, 1), (2, 2), (3, 3), (9, 3), (None, 3)):
        owner, matched = placement.acquire([1, 1, 2, 2, 3, 3], max_blocks=limit)
        assert matched == expected
        assert len(placement.blocks_of(owner)) == expected
        placement.release(owner)
    sound(placement)


def test_two_who_compute_the_same_prefix_end_with_one_copy() -> None:
    _, pool, placement = single()
    first, _ = placement.acquire([1, 2, 3])
    second, _ = placement.acquire([1, 2, 3, 4])
    kept = insert(placement, first, [1, 2, 3])
    mine = pool.alloc(4)
    given = mine.tolist()
    assert placement.insert(second, [1, 2, 3, 4], mine) == 4
    assert mine.tolist() == [*kept.tolist(), given[3]]
    assert pool.refs(given[:3]).tolist() == [0, 0, 0]
    assert placement.blocks_of(second).tolist() == mine.tolist()
    assert placement.stats()["adopted"] == 3
    sound(placement)
    placement.release(first)
    placement.release(second)
    assert by_state(pool) == (12, 0, 4)
    sound(placement)


def test_an_insertion_that_leaves_a_run_in_its_middle_splits_it() -> None:
    _, pool, placement = single()
    cache(placement, [1, 2, 3, 4])
    owner, _ = placement.acquire([])
    mine = pool.alloc(3)
    assert placement.insert(owner, [1, 2, 9], mine) == 3
    assert placement.match([1, 2, 3, 4])[1].tolist()[:2] == mine.tolist()[:2]
    assert placement.match([1, 2, 9])[1].tolist() == mine.tolist()
    placement.release(owner)
    sound(placement)


def test_an_insertion_goes_on_from_what_the_owner_has() -> None:
    tree, _, placement = single(1, 400)
    owner, _ = placement.acquire([])
    for token in range(300):
        insert(placement, owner, [token])
    assert placement.blocks_of(owner).tolist() == list(range(300))
    assert tree.num_nodes == 1 + 2  # runs of 256
    placement.release(owner)
    assert placement.match(range(300))[1].tolist() == list(range(300))
    sound(placement)


def test_a_block_that_somebody_else_holds_too_stays_with_the_caller() -> None:
    _, pool, placement = single()
    owner, _ = placement.acquire([])
    blocks = pool.alloc(3)
    pool.incref(blocks[1:2])
    assert placement.insert(owner, [1, 2, 3], blocks) == 1
    assert placement.blocks_of(owner).tolist() == blocks[:1].tolist()
    sound(placement)
    pool.free(blocks[1:2])
    assert placement.insert(owner, [2, 3], blocks[1:]) == 2
    placement.release(owner)
    sound(placement)
    assert by_state(pool) == (13, 0, 3)


def test_the_coldest_leaf_goes_first_and_deepest_blocks_before_their_parents() -> None:
    tree, _, placement = single(1, 6)
    cache(placement, [1, 2, 3])
    cache(placement, [4, 5, 6])
    placement.release(placement.acquire([1])[0])  # the root of the first is hot, its tail is not
    for missing, left in (
        (1, {(1,), (1, 2), (4,), (4, 5), (4, 5, 6)}),
        (2, {(1,), (4,), (4, 5), (4, 5, 6)}),
        (3, {(1,), (4,), (4, 5)}),
        (5, {(1,)}),
        (6, set()),
    ):
        assert placement.reserve(missing) == 0
        assert cached_prefixes(tree) == left
        sound(placement)


def test_what_is_owned_is_never_evicted() -> None:
    tree, _, placement = single(1, 4)
    owner = remember(placement, [1, 2, 3])
    cache(placement, [1, 9])
    assert placement.reserve(2) == 1
    assert cached_prefixes(tree) == {(1,), (1, 2), (1, 2, 3)}
    assert placement.reserve(2) == 1
    placement.release(owner)
    assert placement.reserve(2) == 0
    sound(placement)


def test_a_match_made_before_making_room_keeps_what_it_matched() -> None:
    _, _, placement = single(1, 4)
    cache(placement, [1, 2])
    cache(placement, [3, 4])
    owner, matched = placement.acquire([1, 2, 5, 6])
    assert matched == 2
    assert placement.reserve(2) == 0
    assert len(placement.match([1, 2])[1]) == 2
    placement.release(owner)
    sound(placement)


def test_allocate_evicts_and_says_who_holds_the_rest_when_it_cannot() -> None:
    _, pool, placement = single(1, 4)
    owner = remember(placement, [1, 2])
    cache(placement, [3])
    assert len(placement.allocate(2)) == 2
    with nothing_changes(placement), pytest.raises(OutOfBlocks) as raised:
        placement.allocate(5)
    assert (raised.value.asked, raised.value.free, raised.value.evictable, raised.value.held) == (5, 0, 0, 4)
    with nothing_changes(placement), pytest.raises(OutOfBlocks):
        placement.allocate(1)
    placement.release(owner)
    assert len(placement.allocate(1)) == 1
    assert by_state(pool) == (0, 3, 1)
    sound(placement)


def test_a_shared_owner_is_released_on_its_own() -> None:
    _, pool, placement = single()
    owner = remember(placement, [1, 2])
    other = placement.share(owner)
    assert placement.blocks_of(other).tolist() == placement.blocks_of(owner).tolist()
    placement.release(owner)
    assert by_state(pool) == (14, 2, 0)
    sound(placement)
    placement.release(other)
    assert by_state(pool) == (14, 0, 2)
    sound(placement)


@pytest.mark.parametrize(
    ("tokens", "matched", "common"),
    [([9, 9], 0, 0), ([1, 2], 0, 2), ([1, 2, 3, 4], 1, 0), ([1, 2, 3, 4, 5, 6, 0, 0], 1, 2), ([1, 2, 3, 0], 0, 3),
     ([1, 2, 3, 4, 7, 7, 7, 7], 1, 0), ([1, 2, 3, 4, 8, 8, 8], 1, 1), ([1, 2, 3, 4, 5, 6, 7, 8, 9], 2, 1)],
)  # fmt: skip
def test_a_partial_match_counts_the_tokens_in_common_with_the_next_block(
    tokens: list[int], matched: int, common: int
) -> None:
    _, _, placement = single(4)
    cache(placement, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9])
    cache(placement, [1, 2, 3, 4, 8, 1, 1, 1])
    found = placement.match(tokens, partial=True)
    assert (len(found[1]), found[2]) == (matched, common)
    assert placement.match(tokens)[2] == 0


def test_a_partial_hit_owns_the_block_to_copy_from_until_it_is_released() -> None:
    _, pool, placement = single(4)
    cache(placement, [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0])
    owner, _ = placement.acquire([1, 2, 3, 4])
    other, block, common = placement.partial(owner, [5, 6, 0, 0])
    assert (block, common) == (placement.match([1, 2, 3, 4, 5, 6, 7, 8])[1][1], 2)
    assert placement.blocks_of(other).tolist() == [*placement.blocks_of(owner).tolist(), block]
    assert placement.reserve(16) == 2
    sound(placement)
    placement.release(other)
    assert placement.partial(owner, [6]) == (-1, -1, 0)
    assert placement.partial(owner, []) == (-1, -1, 0)
    placement.release(owner)
    assert placement.reserve(16) == 0
    assert by_state(pool) == (16, 0, 0)
    sound(placement)


def test_namespaces_are_matched_apart() -> None:
    tree, _, placement = single()
    a, b = tree.namespace(b"a"), tree.namespace(b"b")
    cache(placement, [1, 2, 3], a)
    assert [len(placement.match([1, 2, 3], root)[1]) for root in (0, a, b)] == [0, 3, 0]
    cache(placement, [1, 2, 3], b)
    assert not set(placement.match([1, 2, 3], a)[1].tolist()) & set(placement.match([1, 2, 3], b)[1].tolist())
    sound(placement)


def test_many_namespaces_that_nothing_was_cached_in_are_in_order() -> None:
    tree, _, placement = single()
    roots = [tree.namespace(b"%d" % i) for i in range(500)]
    sound(placement)
    assert [len(placement.match([1], root)[1]) for root in roots] == [0] * 500
    placement.drop_namespace(roots[400])
    cache(placement, [1], roots[499])
    sound(placement)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 3])
def test_random_requests_keep_every_count_in_order(policy: str, block_size: int) -> None:
    rng = Random(f"{policy}{block_size}")
    tree, pool, placement = single(block_size, 14, policy=policy)
    owners: list[int] = []
    for _ in range(500):
        if owners and rng.random() < 0.5:
            placement.release(owners.pop(rng.randrange(len(owners))))
        tokens = [rng.randint(0, 1) for _ in range(rng.randint(0, 7) * block_size)]
        owner, matched = placement.acquire(tokens)
        rest = tokens[matched * block_size :]
        if placement.reserve(len(rest) // block_size) == 0:
            insert(placement, owner, rest)
            assert placement.match(tokens)[1].tolist() == placement.blocks_of(owner).tolist()
        owners.append(owner)
        sound(placement)
    for owner in owners:
        placement.release(owner)
    assert by_state(pool)[1] == 0
    assert placement.reserve(14) == 0
    assert (tree.num_blocks, tree.num_nodes) == (0, 1)
    sound(placement)


def test_whoever_is_deleted_first_the_rest_goes_on() -> None:
    tree, pool, placement = single(1, 4)
    cache(placement, [1, 2])
    del tree, pool
    gc.collect()
    assert len(placement.match([1, 2])[1]) == 2
    tree, pool = placement.tree, placement.pools[0]
    owner = remember(placement, [3])
    del placement
    gc.collect()
    assert tree.match([1, 2]).tolist() == [0, 1]
    assert len(pool.alloc(1)) == 1
    assert owner >= 0
    with pytest.raises(InvalidArgument):
        Placement(RadixTree(1), [pool])


def test_a_tier_without_a_pool_is_skipped() -> None:
    _, pools, _ = tiered(1, (2, 2))
    assert len(pools) == 2
    tree = RadixTree(1, 3)
    placement = Placement(tree, [BlockPool(2), None, BlockPool(2)])
    with nothing_changes(placement), pytest.raises(InvalidArgument):
        placement.reserve(1, 1)
    cache(placement, [1, 2])
    assert placement.reserve(2) == 2
    assert set(placement.take_moves()["dst_tier"].tolist()) == {2}
    sound(placement)
