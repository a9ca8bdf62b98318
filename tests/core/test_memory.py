"""The core keeps no Python object per block, node, row or owner.

So the garbage collector has nothing to walk.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import numpy as np
import pytest

from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree
from tests.slices import one_in

SLACK = 40  # objects and allocations that come and go with the interpreter's own caches


def growth(build: Callable[[int], object], n: int) -> tuple[int, int]:
    """Count tracked objects and small allocations that `build(n)` leaves, its result included."""
    gc.collect()
    objects, allocations = len(gc.get_objects()), sys.getallocatedblocks()
    kept = build(n)
    gc.collect()
    grown = len(gc.get_objects()) - objects, sys.getallocatedblocks() - allocations
    del kept
    return grown


def pool_with(n: int) -> object:
    pool = BlockPool(0, max_blocks=20_000)
    pool.alloc(n)
    return pool


def tree_with(n: int) -> object:
    tree, ids = RadixTree(2), np.zeros(1, np.int32)
    for i in range(n):
        ids[0] = i
        tree.insert(np.array([i, i], np.int32), ids)
    return tree


def placement_with(n: int) -> object:
    placement = Placement(RadixTree(1), [BlockPool(20_000)], event_words=1 << 16)
    for i in range(n):
        owner, _ = placement.acquire([i])
        placement.insert(owner, [i], placement.allocate(1))
        placement.share(owner)
    return placement


def tiers_with(n: int) -> object:
    placement = Placement(RadixTree(1, 2, max_run=1), [BlockPool(20_000), BlockPool(20_000)])
    owner, _ = placement.acquire([])
    placement.insert(owner, np.arange(n, dtype=np.int32), placement.pools[0].alloc(n))  # type: ignore[union-attr]
    placement.release(owner)
    placement.reserve(20_000)
    assert placement.num_in_flight == n
    return placement


def table_with(n: int) -> object:
    table = BlockTable(BlockPool(20_000), 10_000, block_size=4)
    for i in range(n):
        row, _ = table.open([i])
        table.step([row])
        table.commit([row])
    return table


@pytest.mark.parametrize("build", one_in(5, [tiers_with, pool_with, table_with, tree_with, placement_with]))
def test_ten_thousand_leave_no_more_objects_than_a_hundred(build: Callable[[int], object]) -> None:
    build(100)  # whatever is made once
    small, large = growth(build, 100), growth(build, 10_000)
    assert large[0] - small[0] < SLACK
    assert large[1] - small[1] < SLACK


@pytest.mark.parametrize("build", one_in(3, [tiers_with, tree_with, placement_with, table_with, pool_with]))
def test_nothing_is_left_when_it_is_deleted(build: Callable[[int], object]) -> None:
    build(100)
    gc.collect()
    before = len(gc.get_objects()), sys.getallocatedblocks()
    for _ in range(3):
        build(1000)
    gc.collect()
    assert len(gc.get_objects()) - before[0] < SLACK
    assert sys.getallocatedblocks() - before[1] < SLACK
