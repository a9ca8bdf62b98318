"""The cache's oracle on short histories and on random ones.

A reader can follow the short ones by hand; the random ones are checked against the oracle's own equations.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.oracle.cache_model import CacheModel, NoRoom, Owner

DEVICE, HOST, DISK = 0, 1, 2


def fill(cache: CacheModel, tokens: list[int], namespace: str | None = None) -> Owner:
    """Owns the prefix and has the tree take the rest of it, once there is room."""
    owner = cache.acquire(tokens, namespace)
    rest = tokens[len(owner.path) * cache.block_size :]
    make_room(cache, len(rest) // cache.block_size)
    cache.alloc(len(rest) // cache.block_size)
    assert cache.insert(owner, rest, [True] * (len(rest) // cache.block_size)) == len(rest) // cache.block_size
    return owner


def make_room(cache: CacheModel, num_blocks: int) -> None:
    while cache.reserve(num_blocks):
        moves = cache.take_moves()
        assert moves, "no room to be had"
        for transfer in moves:
            cache.complete(transfer, ok=True)


def finish(cache: CacheModel, ok: bool = True) -> None:
    for transfer in cache.take_moves():
        cache.complete(transfer, ok)


def test_what_was_inserted_is_matched_up_to_the_first_difference() -> None:
    cache = CacheModel(2, [8])
    owner = fill(cache, [1, 2, 3, 4, 5, 6])
    assert cache.match([1, 2, 3, 4, 9, 9]) == [DEVICE, DEVICE]
    assert cache.match([1, 2, 3]) == [DEVICE]
    assert cache.match([2, 2]) == []
    assert cache.match([1, 2], "another namespace") == []
    assert owner.path[1].content == (None, (1, 2, 3, 4))
    cache.check([owner])


def test_the_deepest_block_of_the_path_released_first_goes_first() -> None:
    cache = CacheModel(1, [4])
    first, second = fill(cache, [1, 2]), fill(cache, [5, 6])
    cache.release(first)
    cache.release(second)
    gone = []
    for _ in range(4):
        before = {block.content[1] for block in cache.blocks()}
        assert cache.reserve(cache.free(DEVICE) + 1) == 0
        gone += before - {block.content[1] for block in cache.blocks()}
    assert gone == [(1, 2), (1,), (5, 6), (5,)]
    assert cache.dropped == [4]


def test_what_somebody_owns_stays_and_the_shortfall_says_so() -> None:
    cache = CacheModel(1, [3])
    owner = fill(cache, [1, 2])
    other = cache.share(owner)
    cache.release(owner)
    assert cache.reserve(3) == 2
    with pytest.raises(NoRoom):
        cache.alloc(2)
    cache.release(other)
    assert cache.reserve(3) == 0
    cache.check([])


def test_a_demoted_prefix_is_still_matched_and_comes_back_by_promotion() -> None:
    cache = CacheModel(1, [2, 2])
    cache.release(fill(cache, [1, 2]))
    fill(cache, [5])
    assert cache.match([1, 2]) == [DEVICE, HOST]
    owner = cache.acquire([1, 2])
    assert cache.hits == [1, 1]
    with pytest.raises(NoRoom):
        cache.promote(owner)
    assert cache.match([1, 2]) == [DEVICE, HOST]


def test_an_inclusive_tier_keeps_its_copy_and_gives_it_up_without_a_move() -> None:
    cache = CacheModel(1, [2, 2], inclusive=[False, True])
    cache.release(fill(cache, [1]))
    cache.reserve(2)
    finish(cache)
    assert cache.match([1]) == [HOST]
    owner = cache.acquire([1])
    cache.promote(owner)
    finish(cache)
    assert owner.path[0].copies == {DEVICE, HOST}
    cache.release(owner)
    assert cache.reserve(2) == 0
    assert not cache.take_moves()
    assert cache.match([1]) == [HOST]
    cache.check([])


def test_what_falls_out_of_the_last_tier_is_dropped_leaves_first() -> None:
    cache = CacheModel(1, [1, 1, 1])
    cache.release(fill(cache, [1]))
    for token in (2, 3, 4):
        cache.release(fill(cache, [token]))
    assert cache.match([1]) == []
    assert [cache.match([token]) for token in (2, 3, 4)] == [[DISK], [HOST], [DEVICE]]
    assert cache.dropped == [0, 0, 1]


def test_a_block_on_its_way_up_cannot_be_matched_by_others_and_one_on_its_way_down_can() -> None:
    cache = CacheModel(1, [1, 1])
    cache.release(fill(cache, [1]))
    assert cache.reserve(1) == 1
    owner = cache.acquire([1])
    assert len(owner.path) == 1
    finish(cache)
    assert cache.match([1]) == [DEVICE]
    cache.release(owner)
    make_room(cache, 1)
    owner = cache.acquire([1])
    cache.promote(owner)
    assert cache.acquire([1]).path == []
    finish(cache)
    assert len(cache.acquire([1]).path) == 1


def test_a_failed_promotion_is_never_matched_again_and_goes_with_its_last_owner() -> None:
    cache = CacheModel(1, [1, 1])
    cache.release(fill(cache, [1]))
    make_room(cache, 1)
    owner = cache.acquire([1])
    cache.promote(owner)
    finish(cache, ok=False)
    assert cache.match([1]) == []
    assert cache.settle(owner) == 0
    assert cache.blocks() == []
    cache.release(owner)
    cache.check([])


def test_a_failed_demotion_loses_the_block_unless_somebody_came_back_for_it() -> None:
    for returns in (False, True):
        cache = CacheModel(1, [1, 1])
        cache.release(fill(cache, [1]))
        cache.reserve(1)
        owners = [cache.acquire([1])] if returns else []
        finish(cache, ok=False)
        assert cache.match([1]) == ([DEVICE] if returns else [])
        cache.check(owners)


def test_a_fresh_block_takes_the_place_of_a_colder_copy_and_gives_way_to_one_on_the_device() -> None:
    cache = CacheModel(1, [2, 1])
    cache.release(fill(cache, [1]))
    assert cache.reserve(2) == 1
    finish(cache)
    assert cache.match([1]) == [HOST]
    first = cache.acquire([])
    cache.alloc(1)
    assert cache.insert(first, [1], [True]) == 1
    assert cache.match([1]) == [DEVICE]
    assert cache.free(HOST) == 1
    other = cache.acquire([])
    cache.alloc(1)
    assert cache.insert(other, [1], [False]) == 1  # shared outside: it may give way, and stays with its other holders
    assert other.path == first.path
    assert cache.private == 1
    assert cache.insert(other, [2], [False]) == 0
    cache.check([first, other])


def test_a_dropped_namespace_matches_nothing_and_its_blocks_go_with_their_owners() -> None:
    cache = CacheModel(1, [4])
    owner = fill(cache, [1, 2], "a")
    cache.release(fill(cache, [3], "a"))
    cache.drop_namespace("a")
    assert cache.free(DEVICE) == 2
    assert cache.match([1], "a") == []
    cache.release(owner)
    assert cache.free(DEVICE) == 4
    cache.check([])


def test_pins_count_what_was_owned_when_they_were_set() -> None:
    cache = CacheModel(1, [4], pin_budget=2)
    owner = fill(cache, [1, 2])
    assert cache.pin(owner)
    assert cache.pin(owner)
    assert not cache.pin(fill(cache, [3]))
    cache.release(owner)
    assert cache.pinned == 0


def test_releasing_twice_and_giving_back_too_much_are_errors() -> None:
    cache = CacheModel(1, [2])
    owner = fill(cache, [1])
    cache.release(owner)
    with pytest.raises(AssertionError):
        cache.release(owner)
    with pytest.raises(AssertionError):
        cache.give_back(1)


@pytest.mark.parametrize("seed", range(30))
def test_the_equations_hold_through_random_histories(seed: int) -> None:
    rng = Random(seed)
    sizes = [rng.randint(2, 6), *(rng.choice([0, 3, 6]) for _ in range(2))]
    cache = CacheModel(1, sizes, inclusive=[rng.random() < 0.5 for _ in sizes])
    owners: list[Owner] = []
    for _ in range(200):
        choice = rng.randrange(6)
        if choice == 0:
            owners.append(cache.acquire([rng.randint(0, 1) for _ in range(4)], rng.choice("ab")))
        elif choice == 1 and owners:
            cache.release(owners.pop(rng.randrange(len(owners))))
        elif choice == 2 and owners and cache.free(DEVICE):
            cache.alloc(1)
            cache.give_back(1 - cache.insert(rng.choice(owners), [rng.randint(0, 1)], [True]))
        elif choice == 3:
            cache.reserve(cache.free(DEVICE) + 1)
        elif choice == 4:
            for transfer in cache.take_moves() and list(cache.in_flight):
                cache.complete(transfer, rng.random() < 0.8)
        elif owners:
            owner = rng.choice(owners)
            if sum(block.top != DEVICE for block in owner.path) <= cache.free(DEVICE):
                cache.promote(owner)
            cache.settle(owner)
        cache.check(owners)
