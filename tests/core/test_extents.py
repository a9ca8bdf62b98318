"""Pools that share one memory in extents."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.core import BlockPool, ExtentPool


def test_an_extent_belongs_to_one_pool_and_goes_back_with_its_last_block() -> None:
    shared = ExtentPool(3, (4, 2))
    full, short = shared.pools
    a, b = full.alloc(5), short.alloc(2)
    assert shared.num_free == 0
    assert sorted(shared.owners()) == [0, 0, 1]
    assert {int(block) // 4 for block in a}.isdisjoint({int(block) // 2 for block in b}), "the same bytes"
    assert full.num_available == 3
    assert short.num_available == 0
    with pytest.raises(pk.OutOfBlocks):
        short.alloc(1)
    full.free(a[4:])  # the only one of its extent
    assert shared.num_free == 1
    assert short.num_available == 2
    full.free(a[:4])
    short.free(b)
    shared.check_integrity()
    assert shared.num_free == 3


def test_pools_of_extents_stay_exact_over_random_calls() -> None:
    rng = Random(3)
    shared = ExtentPool(12, (5, 3, 1))
    held: list[list[int]] = [[], [], []]
    for _ in range(3000):
        number = rng.randrange(3)
        pool, mine = shared.pools[number], held[number]
        if rng.random() < 0.5:
            wanted = rng.randrange(1, 7)
            if wanted <= pool.num_available:
                mine += pool.alloc(wanted).tolist()
            else:
                with pytest.raises(pk.OutOfBlocks):
                    pool.alloc(wanted)
        elif mine:
            rng.shuffle(mine)
            count = rng.randrange(1, len(mine) + 1)
            pool.free(np.array(mine[:count], np.int32))
            del mine[:count]
        bytes_in_use = {(block * 60 // per) // 60 for per, ids in zip((5, 3, 1), held, strict=True) for block in ids}
        assert len(bytes_in_use) == 12 - shared.num_free
        assert pool.counts()["live"] == len(mine)
    shared.check_integrity()
    for pool, mine in zip(shared.pools, held, strict=True):
        pool.free(np.array(mine, np.int32))
    shared.check_integrity()
    assert shared.num_free == 12


def test_a_block_of_an_extent_is_not_given_back_twice() -> None:
    shared = ExtentPool(2, (3, 1))
    pool = shared.pools[0]
    ids = pool.alloc(3)
    with pytest.raises(pk.DoubleRelease):
        pool.free(np.array([ids[0], ids[1], ids[1]], np.int32))
    with pytest.raises(pk.InvalidArgument):
        pool.free(np.array([99], np.int32))
    shared.check_integrity()
    assert pool.counts()["live"] == 3
    pool.free(ids)
    assert shared.num_free == 2


@pytest.mark.parametrize(("extents", "per_extent"), [(2, ()), (2, (1, 1, 1, 1, 1)), (2, (0,)), (2**30, (4,))])
def test_extents_that_no_pools_can_share_are_refused(extents: int, per_extent: tuple[int, ...]) -> None:
    with pytest.raises(pk.InvalidArgument):
        ExtentPool(extents, per_extent)


def test_a_pool_of_its_own_knows_no_extents() -> None:
    pool = BlockPool(4)
    ids = pool.alloc(4)
    pool.free(ids)
    assert pool.counts()["capacity"] == pool.num_free == 4


def test_the_lowest_extent_with_room_gives_the_next_block() -> None:
    memory = ExtentPool(4, (3, 1))
    pool, other = memory.pools
    blocks = pool.alloc(12)
    for block in (10, 4, 1, 7):
        pool.free(blocks[blocks == block])
    assert pool.alloc(3).tolist() == [1, 4, 7], "the highest one drains"
    pool.free(np.array([9, 11], np.int32))
    assert (memory.num_free, other.alloc(1).tolist()) == (1, [3])
    memory.check_integrity()
